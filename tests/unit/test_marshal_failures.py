"""Exceptions of a rank in the notebook: own class, no second ``__init__``, nothing that ends the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_torchdist import marshal
from jupyter_torchdist.protocol.errors import RankFailed, StrategyError
from jupyter_torchdist.protocol.events import ErrorRecord
from tests import crossing
from tests.crossing import Notebook

ranks, notebook = crossing.ranks, crossing.notebook


def test_an_exception_class_of_the_notebook_is_its_own(notebook: Notebook) -> None:
    notebook.cell(
        "ran = []\nclass Odd(Exception):\n    def __init__(self, code, *, where):\n        ran.append(code)\n"
        "        super().__init__(f'{code} at {where}')\n        self.code, self.where = code, where"
    )
    notebook.send("raise Odd(7, where='there')")
    error = notebook.error()
    assert type(error) is notebook.names["Odd"]
    assert str(error) == "7 at there"
    assert vars(error) == {"code": 7, "where": "there"}
    assert notebook.names["ran"] == []


def test_slots_of_an_exception_come_along(notebook: Notebook) -> None:
    notebook.cell(
        "class Coded(RuntimeError):\n    __slots__ = ('code', 'unset')\n"
        "    def __init__(self, code): self.code = code\n    def __str__(self): return f'code {self.code}'"
    )
    notebook.send("raise Coded(None)")
    error = notebook.error()
    assert type(error) is notebook.names["Coded"]
    assert str(error) == "code None" and not hasattr(error, "unset")


def test_causes_notes_and_contexts_come_along(notebook: Notebook) -> None:
    notebook.send(
        "try:\n    try:\n        {}['k']\n    except KeyError as error:\n        raise ValueError('outer') from error\n"
        "except ValueError as error:\n    error.__notes__ = ['look here']\n    raise RuntimeError('last')"
    )
    error = notebook.error()
    assert type(error) is RuntimeError
    assert isinstance(error.__context__, ValueError)
    assert error.__context__.__notes__ == ["look here"]  # type: ignore[attr-defined]
    assert isinstance(error.__context__.__cause__, KeyError)
    assert error.__context__.__suppress_context__


def test_a_class_of_the_cell_and_a_tensor_inside(notebook: Notebook) -> None:
    notebook.send(
        "import torch\nclass Mine(ArithmeticError):\n    pass\n"
        "error = Mine('bad', torch.ones(2))\nerror.grad = torch.zeros(300_000)\nraise error"
    )
    error = notebook.error()
    assert type(error).__name__ == "Mine"
    assert isinstance(error, ArithmeticError)
    assert error.args[1].tolist() == [1, 1]
    assert error.grad.shape == (300_000,)  # type: ignore[attr-defined]


def test_what_cannot_be_pickled_in_an_exception_goes_as_its_repr(notebook: Notebook) -> None:
    notebook.send(
        "import threading\nerror = ValueError('bad', threading.Lock(), 5)\nerror.lock = threading.Lock()\nraise error"
    )
    error = notebook.error()
    assert type(error) is ValueError
    assert error.args[0] == "bad"
    assert "lock" in error.args[1]
    assert error.args[2] == 5


def test_a_class_that_cannot_be_rebuilt_is_synthesised(notebook: Notebook) -> None:
    notebook.send(
        "import threading\nclass Held(LookupError):\n    lock = threading.Lock()\n"
        "    def __str__(self): return 'held text'\n"
        "error = Held(1)\nerror.__notes__ = ['a note']\nraise error from ValueError('why')"
    )
    error = notebook.error()
    assert type(error).__name__ == "Held"
    assert type(error) is not LookupError
    assert isinstance(error, LookupError)
    assert str(error) == "held text"
    assert error.__notes__ == ["a note"]  # type: ignore[attr-defined]
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize(
    ("source", "title"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit('x')", "GeneratorExit: x"),
        ("class Stop(SystemExit): pass\nraise Stop('now')", "Stop: now"),
        ("class Base(BaseException): pass\nraise Base('b')", "Base: b"),
    ],
)
def test_nothing_that_ends_the_kernel_reaches_it(notebook: Notebook, source: str, title: str) -> None:
    notebook.send(source)
    error = notebook.error()
    assert type(error) is RankFailed
    assert error.message == title


@pytest.mark.parametrize(
    ("source", "check"),
    [
        (
            "open('/nowhere/x')",
            "error.errno == 2 and error.filename == '/nowhere/x' and type(error) is FileNotFoundError",
        ),
        ("b'\\xff'.decode('utf-8')", "error.start == 0 and error.encoding == 'utf-8' and 'utf-8' in str(error)"),
        ("compile('a b', 'f', 'exec')", "error.lineno == 1 and error.text and type(error) is SyntaxError"),
        ("import nowhere_at_all", "error.name == 'nowhere_at_all' and type(error) is ModuleNotFoundError"),
        ("(5).nothing", "error.name == 'nothing' and 'nothing' in str(error)"),
        ("undefined_here", "error.name == 'undefined_here'"),
        ("next(iter(()))", "type(error) is StopIteration"),
        (
            "import subprocess; subprocess.run(['false'], check=True)",
            "error.returncode == 1 and error.cmd == ['false']",
        ),
        (
            "import json; json.loads('{')",
            "error.pos == 1 and error.doc == '{' and type(error).__name__ == 'JSONDecodeError'",
        ),
        ("import torch; torch.ones(2) @ torch.ones(3)", "type(error) is RuntimeError"),
    ],
)
def test_exceptions_of_libraries_keep_their_fields(notebook: Notebook, source: str, check: str) -> None:
    captured = notebook.capture(source) if source != "undefined_here" else notebook.capture("exec('undefined_here')")
    notebook.captured = captured
    notebook.launch(captured, source if source != "undefined_here" else "exec('undefined_here')")
    error = notebook.error()
    assert eval(check, {"error": error}), (error, vars(error))


def test_an_exception_group(notebook: Notebook) -> None:
    group = pytest.importorskip("builtins").__dict__.get("ExceptionGroup")
    if group is None:
        pytest.skip("Python 3.11 has exception groups")
    notebook.send("raise ExceptionGroup('two', [ValueError(1), KeyError('k')])")
    error = notebook.error()
    assert type(error) is group
    assert [type(item) for item in error.exceptions] == [ValueError, KeyError]  # type: ignore[attr-defined]


def test_an_exception_that_holds_a_captured_object_holds_the_notebooks(notebook: Notebook) -> None:
    notebook.cell("data = [1, 2]")
    notebook.send("error = ValueError('bad data')\nerror.data = data\nraise error")
    assert notebook.error().data is notebook.names["data"]  # type: ignore[attr-defined]


def test_frames_show_the_notebooks_lines(notebook: Notebook) -> None:
    notebook.cell("scale = 0\n\ndef divide(x):\n    return x / scale")
    notebook.send("value = 3\ndivide(value)")
    frames = notebook.answer["frames"][1:]
    assert frames == [["Cell In[2]", 3, "<module>", "divide(value)"], ["Cell In[1]", 4, "divide", "return x / scale"]]


def test_a_damaged_file_gives_the_record(tmp_path: Path) -> None:
    record = ErrorRecord("Custom", "somewhere.else", "the message", "text")
    for content in (b"", b"garbage", b"\x80\x05."):
        path = tmp_path / "rank-00000.err.pkl"
        path.write_bytes(content)
        error = marshal.load_exception(path, {}, {}, record)
        assert type(error).__name__ == "Custom"
        assert str(error) == "the message"
    assert str(marshal.load_exception(tmp_path / "missing", {}, {}, record)) == "the message"


def test_dumping_without_a_bundle(tmp_path: Path) -> None:
    marshal.dump_exception(ValueError("early"), None, tmp_path / "results" / "error.pkl")
    record = ErrorRecord("ValueError", "builtins", "early", "text")
    error = marshal.load_exception(tmp_path / "results" / "error.pkl", {}, {}, record)
    assert type(error) is ValueError
    assert error.args == ("early",)


def test_our_own_error_keeps_its_hint_where_only_a_record_is_left(tmp_path: Path) -> None:
    text = "tp finds nothing to split\n  → use --strategy ddp"
    record = ErrorRecord("StrategyError", "jupyter_torchdist.protocol.errors", text, text)
    error = marshal.load_exception(tmp_path / "none.pickle", {}, {}, record)
    assert isinstance(error, StrategyError)
    assert (error.message, error.hint, str(error)) == ("tp finds nothing to split", "use --strategy ddp", text)
