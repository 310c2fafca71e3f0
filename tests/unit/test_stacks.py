"""Where a rank is, read from what ``faulthandler`` writes."""

from __future__ import annotations

import pytest

from jupyter_torchdist.node.stacks import place, threads

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
            "Cell In[3], line 6, in torch.utils.data.dataloader.__next__",
        ),
        (frame(C10D, 3252, "all_reduce") + frame(C10D, 83, "wrapper") + CELL, "Cell In[3], line 6"),
        (frame("/usr/lib/python3.11/runpy.py", 88, "_run"), "/usr/lib/python3.11/runpy.py, line 88, _run"),
    ],
    ids=["the cell", "a function", "a library's function", "a collective", "no line of the user"],
)
def test_place(frames: str, expected: str) -> None:
    assert place(OTHER + CURRENT + frames) == expected


def test_nothing_was_written() -> None:
    assert place("") == ""
    assert threads("Fatal Python error\n") == []
