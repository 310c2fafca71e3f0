"""Where a rank is, read from what ``faulthandler`` writes."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from jupyter_torchdist.usercode.frames import OURS, places_of_main
from jupyter_torchdist.usercode.stacks import in_loader, in_user_code, place, threads

HEAD = "Thread 0x00007f (most recent call first):\n"
OTHER = HEAD + '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n\n'
CURRENT = "Current thread 0x00007e (most recent call first):\n"


def frame(file: str, line: int, function: str) -> str:
    return f'  File "{file}", line {line} in {function}\n'


CELL = frame("Cell In[3]", 6, "<module>")
LOADER = "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
C10D = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (CELL, "Cell In[3], line 6"),
        (frame("Cell In[3]", 4, "work") + CELL, "Cell In[3], line 4, in work"),
        (
            frame("/usr/lib/python3.11/selectors.py", 415, "select") + frame(LOADER, 701, "__next__") + CELL,
            "Cell In[3], line 6, in DataLoader",
        ),
        (
            frame(LOADER, 701, "__next__") + frame(f"{OURS}ranks/batches.py", 9, "given") + CELL,
            "Cell In[3], line 6, in DataLoader",
        ),
        (frame(C10D, 3252, "all_reduce") + frame(C10D, 83, "wrapper") + CELL, "Cell In[3], line 6"),
        (frame(C10D, 2300, "destroy_process_group") + CELL, "Cell In[3], line 6, in destroy_process_group"),
        (frame("/usr/lib/python3.11/runpy.py", 88, "_run"), "/usr/lib/python3.11/runpy.py, line 88, _run"),
    ],
    ids=[
        "the cell",
        "a function",
        "a library's function",
        "ours between",
        "a collective",
        "no collective",
        "no line of the user",
    ],
)
def test_place(frames: str, expected: str) -> None:
    assert place(OTHER + CURRENT + frames) == expected


def test_who_waits_for_workers() -> None:
    assert in_loader(CURRENT + frame(LOADER, 701, "__next__") + CELL)
    assert not in_loader(CURRENT + frame("Cell In[3]", 4, "work") + CELL)


WORKER = LOADER.replace("dataloader", "_utils/worker")


def test_a_worker_at_work_and_an_idle_one() -> None:
    fetches = frame(WORKER, 349, "_worker_loop")
    own = frame("/usr/lib/python3.11/multiprocessing/process.py", 108, "run")
    assert in_user_code(CURRENT + frame("Cell In[3]", 4, "__getitem__") + fetches + own)
    assert not in_user_code(CURRENT + frame("/usr/lib/python3.11/queue.py", 180, "get") + fetches + own)


def test_nothing_was_written() -> None:
    assert place("") == ""
    assert threads("Fatal Python error\n") == []
    assert not in_loader("") and not in_user_code("")


def test_another_thread_sees_where_the_main_thread_is() -> None:
    found: list[list[tuple[str, int]]] = []
    thread = threading.Thread(target=lambda: found.append(places_of_main()))
    thread.start()
    line = sys._getframe().f_lineno + 1
    thread.join()
    own = [place for place in found[0] if place[0] == __file__]
    assert own and own[0][1] in range(line - 2, line + 1)
    around, outer = sys._getframe().f_back, []
    while around is not None:
        outer.append(around.f_code.co_filename)
        around = around.f_back
    assert [file for file, _ in found[0]][-len(outer) :] == outer


WALKS = """
import faulthandler, gc, threading, time
from jupyter_torchdist.usercode.frames import places_of_main

class Garbage:
    def __init__(self):
        self.me = self
    def __del__(self):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(3e-3)

def deep(levels):
    return deep(levels - 1) + 1 if levels else 0

def look():
    for _ in range(300):
        gc.collect(0)
        Garbage()
        full = []
        while gc.get_count()[0] < gc.get_threshold()[0] - 10:
            full.append([])
        places_of_main()

faulthandler.enable()
looks = threading.Thread(target=look)
looks.start()
while looks.is_alive():
    for levels in range(0, 900, 37):
        deep(levels)
print("whole", gc.isenabled())
"""


def test_looking_at_the_main_thread_collects_no_garbage_in_the_middle() -> None:
    """A collection that lets the main thread go on has crashed ranks of Python 3.11."""
    done = subprocess.run([sys.executable, "-c", WALKS], capture_output=True, text=True, timeout=100)
    assert done.stdout == "whole True\n", done.stderr


def test_looking_at_the_main_thread_leaves_the_collection_off_where_it_is_off() -> None:
    gc.disable()
    try:
        assert (__file__, sys._getframe().f_lineno) in places_of_main()
        assert not gc.isenabled()
    finally:
        gc.enable()
