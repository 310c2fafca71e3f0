"""Exceptions of user code in words."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_torchdist.protocol.errors import DamagedJob
from jupyter_torchdist.protocol.events import ErrorRecord
from jupyter_torchdist.ranks import api, execution, failures
from jupyter_torchdist.usercode.frames import is_ours
from jupyter_torchdist.usercode.source import remember_cell


def failing(source: str, label: str = "Cell In[7]", first_line: int = 2, **names: Any) -> ErrorRecord:
    remember_cell(source, label, first_line)
    try:
        execution.run_cell(execution.compile_cell(source, label, first_line), {"__name__": "__main__", **names})
    except BaseException as error:
        assert error.__traceback__ is not None
        return failures.record(error.with_traceback(error.__traceback__.tb_next))  # without this function's frame
    raise AssertionError("nothing was raised")


def test_lines_count_as_the_user_sees_them() -> None:
    error = failing("def f(x):\n    return 1 / x\n\nf(0)\n")
    assert (error.type, error.module, error.message) == ("ZeroDivisionError", "builtins", "division by zero")
    assert error.frames == (
        ("Cell In[7]", 5, "<module>", "f(0)"),
        ("Cell In[7]", 3, "f", "return 1 / x"),
    )
    assert error.text.startswith('Traceback (most recent call last):\n  File "Cell In[7]", line 5, in <module>\n')
    assert error.text.endswith("ZeroDivisionError: division by zero\n")
    assert error.title == "ZeroDivisionError: division by zero"


def test_a_magic_that_is_not_on_the_first_line() -> None:
    assert failing("\nboom\n", first_line=4).frames == (("Cell In[7]", 5, "<module>", "boom"),)


def test_frames_of_the_launching_are_left_out() -> None:
    error = failing("import jupyter_torchdist.ranks.api as td\nfor x in td.progress(3): pass\n")
    assert [frame[0] for frame in error.frames] == ["Cell In[7]"]
    assert "jupyter_torchdist" not in error.text.replace("import jupyter_torchdist.ranks.api as td", "")
    assert is_ours(str(api.__file__))


def test_the_loop_of_a_cell_with_await_is_left_out() -> None:
    error = failing("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    1 / 0\nawait f()")
    assert [frame[:3] for frame in error.frames] == [("Cell In[7]", 6, "<module>"), ("Cell In[7]", 5, "f")]
    assert "asyncio" not in error.text


def test_a_normal_end_says_where() -> None:
    try:
        exec(execution.compile_cell("import sys\nsys.exit()", "Cell In[7]", 2), {})
    except SystemExit as error:
        assert failures.ended_well(error)
        assert failures.end_in_words(error).startswith("sys.exit() at Cell In[7], line 3 ended the code")


def test_causes_notes_and_groups() -> None:
    error = failing(
        "try:\n    try:\n        {}['k']\n    except KeyError as e:\n        raise ValueError('bad') from e\n"
        "except ValueError as e:\n    raise RuntimeError('worse')\n"
    )
    assert error.type == "RuntimeError"
    assert "KeyError: 'k'" in error.text and "direct cause" in error.text and "During handling" in error.text


def test_notes_are_shown() -> None:
    source = (
        "e = ValueError('x')\nif hasattr(e, 'add_note'): e.add_note('a note')\nelse: e.args = ('a note',)\nraise e\n"
    )
    assert "a note" in failing(source).text


def test_recursion_is_shortened() -> None:
    same = failing("def f(n): return f(n + 1)\nf(0)\n")
    assert len(same.frames) <= 80 and len(same.text) < 20_000
    mutual = failing("def a(n): return b(n)\ndef b(n): return a(n)\na(0)\n")
    assert len(mutual.frames) <= 80 and len(mutual.text) < 40_000
    assert "more frames" in mutual.text


def test_a_broken_str_is_named() -> None:
    error = failing("class E(Exception):\n    def __str__(self): raise OSError\nraise E()\n")
    assert error.type == "E" and "raised an error" in error.message


def test_a_huge_message_is_cut() -> None:
    error = failing("raise ValueError('x' * 5_000_000)\n")
    assert len(error.text) < 250_000 and len(error.message) <= 200_000


def test_a_nested_class_keeps_its_name() -> None:
    error = failing("class A:\n    class E(Exception): pass\nraise A.E('t')\n")
    assert (error.type, error.module) == ("A.E", "__main__")


def test_a_syntax_error_of_an_evaluated_text() -> None:
    error = failing("eval('1 +')\n")
    assert error.type == "SyntaxError" and error.frames[-1][:2] == ("Cell In[7]", 2)


def test_a_script_shows_no_runpy(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('in a script')\n")
    error = _of(functools.partial(runpy.run_path, str(script)))
    assert [frame[0] for frame in error.frames if frame[0] != __file__] == [str(script)]
    assert "runpy>" not in error.text and "runpy.py" not in error.text


def test_our_own_errors_speak_for_themselves() -> None:
    error = failures.record(DamagedJob("a file is gone", "run the cell again"))
    assert error.frames == ()
    assert error.text == f"{DamagedJob.__module__}.DamagedJob: a file is gone\n  → run the cell again\n"


def test_json_and_back() -> None:
    error = failing("raise KeyError('\\udcff')\n")
    assert ErrorRecord.from_json(error.to_json()) == error


def _of(call: Callable[[], Any]) -> ErrorRecord:
    try:
        call()
    except ValueError as error:
        return failures.record(error)
    raise AssertionError("nothing was raised")
