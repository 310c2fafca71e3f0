"""What cannot leave the notebook: refused before anything starts, with the path, the line and the remedy."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from jupyter_torchdist.capture import capture_call, capture_cell
from jupyter_torchdist.marshal.culprit import explain
from jupyter_torchdist.protocol.errors import CaptureError, UndefinedName
from jupyter_torchdist.ranks.eventfile import EventFile
from tests import crossing
from tests.crossing import Notebook

ranks, notebook = crossing.ranks, crossing.notebook


@pytest.mark.parametrize(
    ("make", "path", "words"),
    [
        ("import threading\nx = threading.Lock()", "x", "_thread.lock"),
        ("x = (i for i in range(3))", "x", "generator"),
        ("import socket\nx = socket.socket()", "x", "a socket is a connection of this process"),
        ("x = open(path)", "x", "an open file belongs to this process"),
        ("x = open(path, 'rb')", "x", "an open file belongs to this process"),
        ("x = open(path, 'w')", "x", "an open file belongs to this process"),
        ("import sqlite3\nx = sqlite3.connect(':memory:')", "x", "database connection"),
        ("import asyncio\nx = asyncio.new_event_loop()", "x", "event loop"),
        ("import threading\nx = threading.Thread()", "x", "a thread cannot leave its process"),
        ("import multiprocessing\nx = multiprocessing.Process()", "x", "process"),
        ("from concurrent.futures import ThreadPoolExecutor\nx = ThreadPoolExecutor()", "x", "a pool of workers"),
        ("x = memoryview(b'abc')", "x", "memoryview"),
        ("import sys\nx = sys._getframe()", "x", "frame"),
        ("async def f(): pass\nx = f()", "x", "coroutine"),
        ("import contextvars\nx = contextvars.ContextVar('v')", "x", "ContextVar"),
        ((
            "import threading\nclass T: pass\nx = T()\nx.callbacks = [1, 2, T()]\n"
            "x.callbacks[2]._thread = threading.Lock()"
        ),
         "x.callbacks[2]._thread", "_thread.lock"),
        ("import threading\nx = {'a': [1, {'k': (0, threading.Lock())}]}", "x['a'][1]['k'][1]", "_thread.lock"),
        ((
            "import threading\nclass S:\n    __slots__ = ('lock',)\nx = S()\n"
            "x.lock = threading.Lock()"
        ), "x.lock", "_thread.lock"),
        ("import threading\nlock = threading.Lock()\ndef make(lock):\n    return lambda: lock\nx = make(lock)",
         "x (its variable lock)", "_thread.lock"),
        ("import threading\ndef x(l=threading.Lock()): pass", "x.__defaults__[0]", "_thread.lock"),
        ("import threading\nclass x:\n    lock = threading.Lock()", "x.lock", "_thread.lock"),
        ("import threading, functools\nx = functools.partial(print, threading.Lock())", "x.args[0]", "_thread.lock"),
        ((
            "import threading\nclass C:\n    def m(self): pass\nc = C()\nc.l = threading.Lock()\n"
            "x = c.m"
        ), "x.__self__.l", "_thread.lock"),
        ("class R:\n    def __reduce__(self): raise OSError('no disk')\nx = [R()]", "x[0]", "raised OSError: no disk"),
        ("class R:\n    def __reduce__(self): return (R, (R(),))\nx = {'r': R()}", "x['r']", "__reduce__ never ends"),
        ("x = []\nfor _ in range(100_000): x = [x]", "x", "nested too deeply"),
        ("import torch\nx = [torch.jit.script(torch.nn.ReLU())]", "x[0]", "TorchScript cannot be pickled"),
        ("import torch\nx = torch.utils.data.DataLoader([1, 2])\nx = [iter(x)]", "x[0]", "a DataLoader's iterator"),
        ("import numpy as np, threading\nx = np.array([None, threading.Lock()], dtype=object)", "x", "_thread.lock"),
        ("import threading\nx = {threading.Lock(): 1}", "x (key <unlocked _thread.lock", "_thread.lock"),
    ],
)  # fmt: skip
def test_the_culprit_is_named(notebook: Notebook, tmp_path: Path, make: str, path: str, words: str) -> None:
    file = tmp_path / "file.txt"
    file.write_text("text")
    notebook.names["path"] = str(file)
    notebook.cell(make)
    with pytest.raises(CaptureError) as caught:
        notebook.capture("a = 1\nprint(x)")
    error = caught.value
    assert error.path.startswith(path), error.path
    assert words in str(error)
    assert error.line == "line 3"
    assert "line 3" in str(error)
    assert "--exclude x" in error.hint
    close = getattr(notebook.names["x"], "close", None)
    if close:
        close()


def test_the_path_ends_at_an_object_of_this_package(tmp_path: Path) -> None:
    events = EventFile(tmp_path / "events", 0)
    found = explain({"old": events.write}, "handlers", TypeError("cannot pickle it"))
    assert found.path == "handlers['old'].__self__"
    assert found.sentence.endswith("EventFile: it belongs to this process")
    events.close()


def test_the_culprit_behind_a_function_names_the_function(notebook: Notebook) -> None:
    notebook.cell("import threading\nlock = [threading.Lock()]\n\ndef train():\n    with lock[0]:\n        pass")
    with pytest.raises(CaptureError) as caught:
        notebook.capture("train()")
    assert caught.value.path == "lock[0]"
    assert caught.value.line == "function train (Cell In[1], line 5)"


def test_excluded_names_stay(notebook: Notebook) -> None:
    notebook.cell("import threading\nlock = threading.Lock()\nn = 1\ndef f(): return lock")
    captured = notebook.capture("f\nn\nlock", exclude=("lock",))
    assert set(captured.names) == {"f", "n"}


def test_what_the_cell_binds_itself_may_stay(notebook: Notebook) -> None:
    notebook.cell("import threading\nresult = threading.Lock()")
    captured = notebook.capture("import os\nif os.getpid():\n    result = 1\nprint(result)")
    assert "result" not in captured.names
    assert any("result was left behind" in note for note in captured.notes)


@pytest.mark.parametrize("name", ["In", "Out"])
def test_the_history_stays(notebook: Notebook, name: str) -> None:
    notebook.names[name] = {1: threading.Lock()}
    with pytest.raises(CaptureError, match="history"):
        notebook.capture(f"print({name})")


def test_a_name_of_the_shell_is_told_from_one_that_is_not_defined(tmp_path: Path) -> None:
    names = {"__name__": "__main__", "In": ["", "x"]}
    with pytest.raises(CaptureError, match=r"In is the notebook's history and stays there \(needed by line 1\)"):
        capture_cell("print(In[-1])", "Cell In[1]", 1, names, hidden=["In"], cwd=tmp_path)


def test_a_magic_that_stands_above_ours_is_sent_there(notebook: Notebook) -> None:
    with pytest.raises(CaptureError) as caught:
        notebook.capture("get_ipython().run_cell_magic('capture', 'out', 'print(1)')")
    assert caught.value.hint == "put it above %%distribute"


@pytest.mark.parametrize(
    ("define", "source", "words"),
    [
        ("", "get_ipython().run_line_magic('time', 'f()')", "%time cannot run on ranks (line 2)"),
        ("", "get_ipython().run_cell_magic('bash', '', 'ls')", "%%bash"),
        (
            "def f():\n    x = 1\n    get_ipython().run_line_magic('cd', '/')",
            "f()",
            "%cd cannot run on ranks (function f (Cell In[1], line 3))",
        ),
    ],
)
def test_magics_are_refused_by_name(notebook: Notebook, define: str, source: str, words: str) -> None:
    notebook.cell(define)
    with pytest.raises(CaptureError) as caught:
        notebook.capture(source)
    assert words in str(caught.value)


def test_shell_commands_are_not_refused(notebook: Notebook) -> None:
    notebook.cell("def f():\n    return get_ipython().getoutput('ls')")
    assert "f" in notebook.capture("get_ipython().system('ls')\nf()").names


def test_an_undefined_name_is_an_error_at_once(notebook: Notebook) -> None:
    notebook.cell("learning_rate = 0.1")
    with pytest.raises(UndefinedName) as caught:
        notebook.capture("x = 1\nprint(learning_rat)")
    error = caught.value
    assert isinstance(error, NameError)
    assert error.name == "learning_rat"
    assert "did you mean learning_rate" in error.hint
    assert "line 3" in str(error)


def test_a_name_used_before_its_definition(notebook: Notebook) -> None:
    with pytest.raises(UndefinedName, match=r"'f' is used \(line 2\) before the cell defines it \(line 3\)"):
        notebook.capture("f()\ndef f(): pass")


@pytest.mark.parametrize(
    "source",
    [
        "if False:\n    nowhere",
        "try:\n    nowhere\nexcept NameError:\n    pass",
        "from math import *\npi2",
        "exec('made = 1')\nmade",
        "def f(): return nowhere",
        "display(get_ipython())",
        "__name__",
    ],
)
def test_a_name_that_may_come_to_be_is_no_error(notebook: Notebook, source: str) -> None:
    notebook.capture(source)


def test_a_function_that_needs_a_missing_name_gives_a_note(notebook: Notebook) -> None:
    captured = notebook.capture("def f(): return nowhere\nf()")
    assert captured.notes == ("nowhere (line 2) is not defined; the cell fails if it runs that line",)


def test_a_captured_function_that_needs_a_missing_name_gives_a_note(notebook: Notebook) -> None:
    notebook.cell(
        "def f(x):\n    return len(nowhere)\ndef g():\n    global made\n    made = 1\ndef h(): return made, late"
    )
    captured = notebook.capture("late = 2\ng(), h(), f(1)")
    assert captured.notes == (
        "nowhere is not defined (function f (Cell In[1], line 2)); the job fails if it runs that line",
    )


def test_large_data_gives_a_note(notebook: Notebook) -> None:
    notebook.cell("import numpy as np\ndata = np.zeros(13_000_000)\ndef f(): return data")
    captured = notebook.capture("f()")
    assert any("data is large (104.0 MB" in note and "inside the cell" in note for note in captured.notes)
    sizes = {item.name: item.size for item in captured.receipt}
    assert sizes["data"] == 104_000_000
    assert sizes["f"] < 10_000


def test_the_receipt_says_what_and_where(notebook: Notebook) -> None:
    notebook.cell(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.l = nn.Linear(2, 3)\nmodel = Net()\nx = torch.zeros(4, 5)\n"
        "lr = 0.1\n\ndef train(a, b=1):\n    return model(x) * lr"
    )
    captured = notebook.capture("y = 1\ntrain(torch, [Net])")
    receipt = {item.name: (item.kind, item.what, item.needed) for item in captured.receipt}
    assert receipt["torch"] == ("module", "torch as import", "line 3")
    assert receipt["train"] == ("function", "function train(a, b)", "line 3")
    assert receipt["Net"] == ("class", "class Net(Module)", "line 3")
    assert receipt["model"] == ("model", "Net with 9 parameters", "function train (Cell In[1], line 12)")
    assert receipt["x"] == ("tensor", "Tensor float32 (4, 5)", "function train (Cell In[1], line 12)")
    assert receipt["lr"][:2] == ("data", "float 0.1")
    assert captured.bound == ("y",)
    assert "class Net" in captured.lines["Cell In[1]"]


def test_an_unchanged_capture_is_the_same_bytes(notebook: Notebook) -> None:
    notebook.cell(
        "import torch\nmodel = torch.nn.Linear(300, 300)\ndef f(): return model\nclass C: pass\nc = [C(), {'a', 'b'}]"
    )
    first, second = notebook.capture("f(), c"), notebook.capture("f(), c")
    assert first.stream == second.stream
    assert [bytes(buffer.raw()) for buffer in first.buffers] == [bytes(buffer.raw()) for buffer in second.buffers]
    store = notebook.store
    from jupyter_torchdist import capture

    capture.pack(first, "a", store.put)
    before = store.written
    capture.pack(second, "b", store.put)
    assert store.written == before


def test_an_object_that_looks_itself_up_without_an_end(notebook: Notebook) -> None:
    notebook.cell("class Loop:\n    def __getattribute__(self, name): return getattr(self, name)\na = Loop()")
    with pytest.raises(CaptureError, match=r"a: Loop: its __getattribute__ calls itself without end") as raised:
        notebook.capture("print(type(a))")
    assert raised.value.path == "a"


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        (([1, threading.Lock()],), {}, "first[1]"),
        ((1, 2, threading.Lock()), {}, "more"),
        ((1,), {"last": threading.Lock()}, "last"),
    ],
)
def test_an_argument_of_a_call_has_the_name_of_its_parameter(
    notebook: Notebook, args: tuple[object, ...], kwargs: dict[str, object], path: str
) -> None:
    notebook.cell("def train(first, *more, last=None): pass")
    with pytest.raises(CaptureError, match="the call of train cannot leave the notebook") as refused:
        capture_call(notebook.names["train"], args, kwargs, cwd=notebook.home)
    assert f"\n  {path}: _thread.lock" in str(refused.value) and "inside the function" in refused.value.hint


def test_a_method_that_is_called_has_its_own_name(notebook: Notebook) -> None:
    notebook.cell("import threading\nclass A:\n    def run(self): pass\na = A()\na.lock = threading.Lock()")
    with pytest.raises(CaptureError, match=r"A\.run\.__self__\.lock: _thread"):
        capture_call(notebook.names["a"].run, (), {}, cwd=notebook.home)
