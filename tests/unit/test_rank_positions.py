"""Where running code stands in its source, on every Python that is supported."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from jupyter_torchdist.ranks import execution
from jupyter_torchdist.usercode import positions
from jupyter_torchdist.usercode.source import remember_cell, remember_source


class Place:
    """Called, used as an operand, indexed or read, it notes at what its caller was then."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Place:
        return self._note(sys._getframe(1))

    def method(self, *args: Any) -> Place:
        return self._note(sys._getframe(1))

    def __mul__(self, other: Any) -> Place:
        return self._note(sys._getframe(1))

    def __getitem__(self, index: Any) -> Place:
        return self._note(sys._getframe(1))

    def __itruediv__(self, other: Any) -> Place:
        return self._note(sys._getframe(1))

    def __neg__(self) -> Place:
        return self._note(sys._getframe(1))

    def __lt__(self, other: Any) -> bool:
        self._note(sys._getframe(1))
        return False

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))

    def _note(self, frame: FrameType) -> Place:
        span = positions.running(frame)
        self.seen.append(None if span is None else text_of(SOURCE[frame.f_code.co_filename], span))
        return self


SOURCE: dict[str, str] = {}


def text_of(source: str, span: positions.Span) -> str:
    """What stands there, in one line."""
    lines = [line.encode() for line in source.splitlines()[span.line - 1 : span.end_line]]
    lines[-1] = lines[-1][: span.end_column]
    lines[0] = lines[0][span.column :]
    return " ".join(line.decode().strip() for line in lines)


def seen(cell: str, above: int = 0) -> list[str | None]:
    """What each use of ``x`` in a cell stood at."""
    cell = textwrap.dedent(cell).strip("\n") + "\n"
    SOURCE["Cell In[7]"] = "\n" * above + cell
    remember_cell(cell, "Cell In[7]", 1 + above)
    x = Place()
    execution.run_cell(execution.compile_cell(cell, "Cell In[7]", 1 + above), {"x": x, "y": 2})
    return x.seen


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("x(1); x(2)", ["x(1)", "x(2)"]),
        ("x.method(1).method(2)", ["x.method(1)", "x.method(1).method(2)"]),
        ("a = x(x * 3, k=x[1])", ["x * 3", "x[1]", "x(x * 3, k=x[1])"]),
        ("'é'; x(1); -x", ["x(1)", "-x"]),
        ("x /= 3", ["x /= 3"]),
        ("if x(1) and x < 2:\n    pass", ["x(1)", "x < 2"]),
        ("for i in x:\n    x(i)\n    x[i]", ["x(i)", "x[i]", "x(i)", "x[i]"]),
        ("def f(a):\n    return a[0] * (lambda b: b(2))(a)\nf(x)", ["a[0]", "b(2)", "a[0] * (lambda b: b(2))(a)"]),
        ("a = [x(i) for i in range(2)]; x[5]", ["x(i)", "x(i)", "x[5]"]),
        ("x(\n    x[0],\n    1,\n)", ["x[0]", "x( x[0], 1, )"]),
        ("class A:\n    def __m(self, a):\n        a(1); a(2)\n    n = __m\nA().n(x)", ["a(1)", "a(2)"]),
        ("async def f():\n    x(1); x(2)\nawait f()", ["x(1)", "x(2)"]),
        ("from __future__ import annotations\ndef f(a: int):\n    a(1); a(2)\nf(x)", ["a(1)", "a(2)"]),
    ],
)
@pytest.mark.parametrize("above", [0, 2])
def test_what_runs_is_known_to_the_column(cell: str, expected: list[str], above: int) -> None:
    assert seen(cell, above) == expected


def test_nothing_is_said_of_code_whose_source_is_another() -> None:
    """A file that was edited, or that is not there."""
    x = Place()
    SOURCE["nowhere.py"] = "x(1); x(2)"
    remember_source("nowhere.py", "x(1); x(2); x(3)" if sys.version_info < (3, 11) else "x(1); x(2)")
    exec(compile("x(1); x(2)", "nowhere.py", "exec"), {"x": x})
    assert x.seen == ([None] * 2 if sys.version_info < (3, 11) else ["x(1)", "x(2)"])


def test_the_extent_of_one_of_several_lambdas_in_a_line() -> None:
    cell = "pair = [lambda a: a * 2, lambda a: a * 2 if a else a.real, lambda a: (lambda b: b)(a) and a]\n"
    remember_cell(cell, "Cell In[8]", 1)
    names: dict[str, Any] = {}
    execution.run_cell(execution.compile_cell(cell, "Cell In[8]", 1), names)
    spans = [positions.extent(one.__code__) for one in names["pair"]]
    assert [text_of(cell, span) for span in spans if span] == [
        "a * 2",
        "a * 2 if a else a.real",
        "(lambda b: b)(a) and a",
    ]
