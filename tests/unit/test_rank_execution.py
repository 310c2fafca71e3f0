"""Compiling and running a cell as IPython would."""

from __future__ import annotations
import __future__

import asyncio
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.ranks import execution
from jupyter_torchdist.ranks.execution import CALL, VALUE
from jupyter_torchdist.usercode.source import remember_cell


def run(source: str, flags: int = 0) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    execution.run_cell(execution.compile_cell(source, "Cell In[1]", 2, flags), names)
    return names


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("x = 1\nx + 1", 2),
        ("1\n2\n", 2),
        ("'text'", "text"),
        ("x = 5\n(x\n + 1)  # a comment", 6),
        ("[i for i in range(3)]", [0, 1, 2]),
        ("';'", ";"),
        ("x = 3\nx #;", 3),
    ],
)
def test_the_last_value(source: str, value: Any) -> None:
    assert run(source)[VALUE] == value


@pytest.mark.parametrize("source", ["x = 1", "1;", "1 ;  # quiet", "for i in range(2):\n    i", "", "# nothing\n"])
def test_no_last_value(source: str) -> None:
    assert VALUE not in run(source)


def test_top_level_await() -> None:
    names = run("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 7\ny = await f()\nawait f()")
    assert (names["y"], names[VALUE]) == (7, 7)


def test_flags_of_future_imports() -> None:
    annotations = __future__.annotations.compiler_flag
    assert run("def f(x: undefined_name): pass", annotations)["f"].__annotations__ == {"x": "undefined_name"}
    with pytest.raises(NameError):
        run("def f(x: undefined_name): pass")


def test_a_future_import_in_the_cell() -> None:
    assert run("from __future__ import annotations\ndef f(x: nope): pass")["f"].__annotations__ == {"x": "nope"}


def test_lines_are_the_users() -> None:
    assert execution.compile_cell("x = 1\n", "c", 2).co_firstlineno in (1, 2)
    with pytest.raises(SyntaxError) as caught:
        execution.compile_cell("x = 1\nreturn 2", "Cell In[3]", 2)
    assert (caught.value.filename, caught.value.lineno) == ("Cell In[3]", 3)
    remember_cell("a\nb\n", "Cell In[99]", 3)
    assert linecache.getlines("Cell In[99]") == ["\n", "%%distribute\n", "a\n", "b\n"]
    linecache.checkcache()
    assert linecache.getline("Cell In[99]", 4) == "b\n"


def test_a_call() -> None:
    names: dict[str, Any] = {CALL: (lambda a, *, b: a + b, (1,), {"b": 2})}
    execution.run_call(names)
    assert names[VALUE] == 3

    async def later(x: int) -> int:
        return x

    names = {CALL: (later, (4,), {})}
    execution.run_call(names)
    assert names[VALUE] == 4


def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_script_tdx.py").write_text("VALUE = 5\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, beside_the_script_tdx\nargs = sys.argv\nname = __name__\nvalue = beside_the_script_tdx.VALUE\n"
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    execution.run_script(script.read_text(), str(script), ("train.py", "--lr", "1"), names)
    assert (names["args"], names["name"], names["value"]) == (["train.py", "--lr", "1"], "__main__", 5)
    monkeypatch.delitem(sys.modules, "beside_the_script_tdx")


def test_an_event_loop_policy_of_the_user_stays() -> None:
    """As a module beside the notebook sets one when it is imported: uvloop."""

    class Chosen(asyncio.DefaultEventLoopPolicy):
        """Not asyncio's own."""

    before = asyncio.get_event_loop_policy()
    chosen = Chosen()
    asyncio.set_event_loop_policy(chosen)
    try:
        execution.as_in_a_notebook()
        assert asyncio.get_event_loop_policy() is chosen
        asyncio.set_event_loop_policy(None)
        execution.as_in_a_notebook()
        asyncio.get_event_loop().close()  # there is none yet
    finally:
        asyncio.set_event_loop_policy(before)
