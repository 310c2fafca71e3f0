"""Cells that cannot run, and values that cannot leave: told in words before anything starts, in a real kernel."""

from __future__ import annotations

import re

from jupyter_torchdist.store import catalog
from tests.notebook import CellError, Notebook


def refusal(notebook: Notebook, source: str) -> CellError:
    """What is said instead of starting a job: without a stack of ours, and nothing is written."""
    before = [job.job for job in catalog.jobs()]
    cell = notebook.try_run(source)
    assert cell.error is not None, cell.text
    assert "run_cell_magic" not in cell.error.traceback and "site-packages" not in cell.error.traceback
    assert [job.job for job in catalog.jobs()] == before, "a job was made"
    assert notebook.value("1 + 1") == 2
    return cell.error


def test_options_and_names_that_are_wrong(kernel: Notebook) -> None:
    kernel.run("learning_rate = 0.1\nvalue = 1")
    for line, name, words in (
        ("--rnks 2", "OptionError", ["--rnks", "did you mean --ranks?"]),
        ("--ranks 0", "OptionError", ["--ranks '0'", "at least 1"]),
        ("--ranks -1", "OptionError", ["--ranks '-1'", "at least 1"]),
        ("--ranks x", "OptionError", ["--ranks 'x'", "whole number"]),
        ("--ranks", "OptionError", ["--ranks needs a value"]),
        ("--ranks 2 stray", "OptionError", ["'stray' is not an option"]),
        ("--ranks 2 --gpus 2", "OptionError", ["--gpus and --ranks cannot be used together"]),
        ("--ranks 2 --timeout soon", "OptionError", ["--timeout 'soon'", "30s"]),
        ("--gpus 512", "ResourceError", ["GPU", "--ranks 512"]),
    ):
        error = refusal(kernel, f"%%distribute {line}\nvalue")
        assert error.name == name, error
        assert all(word in error.value for word in words), error.value
        assert "→" in error.traceback, "what to do now"
    error = refusal(kernel, "%%distribute --ranks 2\nx = 1\nprint(learning_rat)")
    assert error.name == "UndefinedName" and "'learning_rat'" in error.value and "line 3" in error.value
    assert "did you mean learning_rate?" in error.value
    assert kernel.value("issubclass(__import__('sys').last_type, NameError)")
    error = refusal(kernel, "%%distribute --ranks 2\nnothing_like_it()")
    assert "run the cell that defines it first" in error.value
    error = refusal(kernel, "%%distribute --ranks 2\nprint(td.rank)")
    assert "'td' is not defined" in error.value and "`import jupyter_torchdist as td` first" in error.value


def test_a_syntax_error_points_at_the_line(kernel: Notebook) -> None:
    for source, line, shown in (
        ("x = 1\ny = = 2", 3, "y = = 2"),
        ("x = 1\nif x:\nprint(x)", 4, "print(x)"),
        ("def f(:\n    pass", 2, "def f(:"),
        ("x = (1,\ny = 2", 2, "x = (1,"),
        ("x = 'abc", 2, "x = 'abc"),
        ("x = 1\nreturn x", 3, "return x"),
        ("for i in []:\n    pass\nelse:\n    continue", 5, "continue"),
    ):
        error = refusal(kernel, f"%%distribute --ranks 2\n{source}")
        assert error.name == "CellSyntaxError"
        lines = error.traceback.split("\n")
        assert re.match(rf"  Cell In\[\d+\], line {line}$", lines[0])
        assert lines[1].strip() == shown and lines[2].strip() == "^"
        assert kernel.value("issubclass(__import__('sys').last_type, SyntaxError)")


UNPICKLABLE = """
import asyncio, socket, sqlite3, threading
class Logger:
    def __init__(self):
        self.lock = threading.Lock()
class Trainer:
    def __init__(self):
        self.callbacks = [1, 2, {'log': Logger()}]
class Raises:
    def __reduce__(self):
        raise RuntimeError('no way')
class Recurses:
    def __reduce__(self):
        return list, ([Recurses()],)
def counting():
    yield 1
async def later():
    pass
trainer, raises, recurses = Trainer(), {'a': [Raises()]}, [Recurses()]
deep = []
for _ in range(100_000):
    deep = [deep]
generator, lock, opened = {'gen': counting()}, threading.RLock(), open('file.txt', 'w')
sock, database = socket.socket(), sqlite3.connect(':memory:')
running, thread, coroutine = asyncio.get_running_loop(), threading.Thread(target=print), later()
def uses_it():
    return trainer.callbacks
"""


def test_values_that_cannot_leave(kernel: Notebook) -> None:
    kernel.run(UNPICKLABLE)
    for name, words in {
        "trainer": "trainer.callbacks[2]['log'].lock: _thread.lock",
        "raises": "raises['a'][0]: Raises: pickling it raised RuntimeError: no way",
        "recurses": "Recurses: it is nested too deeply, or its __reduce__ never ends",
        "deep": "it is nested too deeply",
        "generator": "generator['gen']: generator",
        "lock": "lock: _thread.RLock",
        "sock": "sock: socket.socket: a socket is a connection of this process",
        "opened": "opened: _io.TextIOWrapper: an open file belongs to this process",
        "running": "a running event loop belongs to this process",
        "database": "database: sqlite3.Connection: a database connection belongs to this process",
        "thread": "thread: threading.Thread: a thread cannot leave its process",
        "coroutine": "coroutine: coroutine",
    }.items():
        error = refusal(kernel, f"%%distribute --ranks 2\nx = 1\nprint({name})")
        assert error.name == "CaptureError" and words in error.value, error.value
        assert f"{name} cannot leave the notebook; line 3 needs it" in error.value
        assert f"--exclude {name}" in error.value and len(error.value) < 1000
    error = refusal(kernel, "%%distribute --ranks 2\nuses_it()")
    assert re.search(
        r"trainer cannot leave the notebook; function uses_it \(Cell In\[\d+\], line \d+\) needs", error.value
    )
    cell = kernel.run("%%distribute --ranks 1 --exclude lock\nfound = 'lock' in globals()")
    assert kernel.value("found") is False, cell.text
    kernel.run("opened.close(); sock.close(); database.close(); coroutine.close()")


def test_what_is_large_is_named(kernel: Notebook) -> None:
    kernel.run("import numpy as np\nhuge = np.ones(300_000_000, dtype=np.uint8)")
    cell = kernel.run("%%distribute --ranks 2\ntotal = int(huge[::1_000_000].sum())")
    assert kernel.value("total") == 300
    assert re.search(r"huge is large \(300(\.0)? MB, .*\): loading it inside the cell is faster", cell.text)
    kernel.run("small = huge[:1000].copy()")
    assert "is large" not in kernel.run("%%distribute --ranks 1\nsmall.sum()").text


def test_classes_and_functions_of_the_notebook_stay_its_own(kernel: Notebook) -> None:
    kernel.run(
        "FACTOR = 2\n"
        "def helper(x):\n    return x * FACTOR\n"
        "class Box:\n"
        "    def __init__(self, value):\n        self.value = value\n"
        "    def get(self):\n        return helper(self.value)\n"
        "before = Box(1)\n"
    )
    cell = kernel.run("%%distribute --ranks 2\nmade = Box(21)\nbefore.value = 7\nmade.get()")
    assert (cell.result or {})["text/plain"] == "42"
    kernel.run("FACTOR = 100\ndef helper(x):\n    return x * FACTOR + 1")
    assert kernel.value("(made.get(), before.get())") == (2101, 701)
    assert kernel.value("(type(made) is Box, type(before) is Box, isinstance(made, Box))") == (True, True, True)
    assert kernel.value("Box.get.__globals__ is globals()") is True
    kernel.run("%%distribute --ranks 2\nagain = made.get()")
    assert kernel.value("again") == 2101


def test_a_function_and_the_cell_share_their_globals(kernel: Notebook) -> None:
    """As in any cell: what a notebook function sets or reads is the cell's, and comes back."""
    kernel.run(
        "count, items, OTHER = 0, [], 5\n"
        "def bump():\n    global count\n    count += 1\n    return count\n"
        "def add(x):\n    items.append(x)\n    return OTHER\n"
    )
    plan = kernel.run("%%distribute --ranks 2 --plan\nbump()\nadd(3)").stdout
    assert re.search(r"^ +count +data .*function bump \(Cell In\[\d+\], line 4\)$", plan, re.MULTILINE)
    kernel.run("%%distribute --ranks 2\nbump()\ncount += 10\nOTHER = 6\nseen = bump(), add(3), count")
    assert kernel.value("(seen, count, items, OTHER)") == ((12, 6, 12), 12, [3], 6)
