"""Exceptions as the notebook shows them."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from jupyter_torchdist.kernel import failure
from jupyter_torchdist.protocol.errors import CaptureError, CellSyntaxError, OptionError
from jupyter_torchdist.protocol.events import ErrorRecord
from jupyter_torchdist.protocol.state import JobState, RankState
from jupyter_torchdist.testing import a_spec

SOURCE = "def f(x):\n    y = x\n    raise ValueError(y)\n\nf(1)\n"
TEXT = (
    "Traceback (most recent call last):\n"
    '  File "Cell In[4]", line 6, in <module>\n    f(1)\n'
    '  File "Cell In[4]", line 4, in f\n    raise ValueError(y)\n'
    "ValueError: 1\n"
)
FRAMES = (("Cell In[4]", 6, "<module>", "f(1)"), ("Cell In[4]", 4, "f", "raise ValueError(y)"))
RECORD = ErrorRecord("ValueError", "builtins", "1", TEXT, FRAMES, 5.0)


def bare(lines: list[str]) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))


def failed(record: ErrorRecord = RECORD, world: int = 8) -> tuple[JobState, RankState]:
    ranks = {number: RankState(number, "n0", "box", 7, "interrupted") for number in range(world)}
    ranks[1] = replace(ranks[1], state="failed", error=record)
    return JobState("j", None, "Cell In[4]", "failed", world, ranks=ranks, first_failure=1), ranks[1]


def shown(record: ErrorRecord = RECORD) -> str:
    state, rank = failed(record)
    spec = a_spec(source=SOURCE, label="Cell In[4]")
    return bare(failure.rank_failure(state, rank, failure.sources_of(spec, {})))


def test_the_traceback_shows_the_notebooks_lines_as_the_user_counts_them() -> None:
    text = shown()
    assert "rank 1 on box" in text
    assert "Cell In[4], line 6\n      4     raise ValueError(y)\n      5 \n----> 6 f(1)\n\n" in text
    assert "Cell In[4], line 4, in f\n      2 def f(x):\n      3     y = x\n----> 4     raise ValueError(y)\n" in text
    assert text.endswith("ValueError: 1\n\n7 other ranks were stopped because of this")


def test_a_source_that_is_not_the_one_that_ran_is_not_shown() -> None:
    frames = (("Cell In[4]", 4, "f", "something_else()"), ("/gone/module.py", 12, "g", "other()"))
    text = shown(replace(RECORD, frames=frames))
    assert "Cell In[4], line 4, in f\n----> 4 something_else()\n" in text
    assert "/gone/module.py, line 12, in g\n----> 12 other()\n" in text


def test_causes_and_notes_are_there() -> None:
    first = 'Traceback (most recent call last):\n  File "Cell In[4]", line 2, in f\nKeyError: 3\n'
    joined = "\nThe above exception was the direct cause of the following exception:\n\n"
    text = shown(replace(RECORD, text=first + joined + TEXT + "a note\n"))
    assert "KeyError: 3" in text and "direct cause" in text
    assert text.index("KeyError") < text.index("ValueError: 1")
    assert "ValueError: 1\na note" in text


def test_a_record_without_frames_is_shown_as_it_is() -> None:
    assert "SyntaxError: invalid" in shown(replace(RECORD, frames=(), text="  x = = 1\nSyntaxError: invalid\n"))


def test_own_errors_are_short() -> None:
    assert bare(failure.refusal(OptionError("no --rank", "did you mean --ranks?"))) == (
        "OptionError: no --rank\n  → did you mean --ranks?"
    )
    error = CaptureError("a lock cannot leave", "make it inside", path="trainer._lock", line="line 3: fit(trainer)")
    assert bare(failure.refusal(error)).startswith("line 3: fit(trainer)\nCaptureError: a lock")


def test_a_syntax_error_points_at_the_place() -> None:
    error = CellSyntaxError("invalid syntax", "mend it", filename="Cell In[5]", lineno=3, offset=7, text="  x = = 1\n")
    assert bare(failure.refusal(error)) == (
        "  Cell In[5], line 3\n    x = = 1\n        ^\nCellSyntaxError: invalid syntax\n  → mend it"
    )


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception that refuses attributes."""

    code: int


@pytest.mark.parametrize("error", [ValueError("x"), Frozen(3), SystemError()])
def test_any_exception_takes_a_rendering(error: BaseException) -> None:
    failure.attach(error, ["as told"])
    assert error._render_traceback_() == ["as told"]  # type: ignore[attr-defined]


def test_a_rendering_survives_copies() -> None:
    error = failure.attach(ValueError("x"), ["as told"])
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert other._render_traceback_() == ["as told"]  # type: ignore[union-attr]


@pytest.fixture
def shell(capsys: Any) -> Iterator[Any]:
    InteractiveShell.clear_instance()
    shell: Any = InteractiveShell.instance()
    yield shell
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()


def errors(shell: Any, code: str, capsys: Any) -> str:
    shell.run_cell(code)
    captured = capsys.readouterr()
    return bare([captured.out + captured.err])


RAISE = "from jupyter_torchdist.kernel import failure as _f\nraise _f.attach({}, ['AS TOLD'])"


@pytest.mark.parametrize("error", ["ValueError('x')", "SyntaxError('x')", "KeyboardInterrupt()"])
def test_ipython_shows_the_rendering(shell: Any, error: str, capsys: Any) -> None:
    uninstall = failure.install(shell)
    text = errors(shell, RAISE.format(error), capsys)
    assert "AS TOLD" in text and "Traceback" not in text and "line" not in text
    uninstall()


def test_other_syntax_errors_are_shown_as_ever(shell: Any, capsys: Any) -> None:
    code = "exec('1 +')"
    before = errors(shell, code, capsys)
    uninstall = failure.install(shell)
    assert errors(shell, code, capsys) == before
    uninstall()
    assert errors(shell, code, capsys) == before
    assert "invalid syntax" in before


def test_somebody_elses_handler_goes_on(shell: Any, capsys: Any) -> None:
    seen: list[str] = []
    shell.set_custom_exc((KeyError,), lambda self, kind, error, trace, tb_offset=None: seen.append(kind.__name__))
    uninstall = failure.install(shell)
    shell.run_cell("{}['x']")
    uninstall()
    shell.run_cell("{}['x']")
    assert seen == ["KeyError", "KeyError"]
