"""Rich output without IPython."""

from __future__ import annotations

import base64
import builtins
import errno
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import IPython.display
import matplotlib
import pandas
import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.ranks import shell
from jupyter_torchdist.ranks.afterimport import after_import
from jupyter_torchdist.ranks.streams import display as streams
from jupyter_torchdist.ranks.streams.display import Display, Frontend
from jupyter_torchdist.ranks.streams.mimebundle import TEXT_LIMIT, mimebundle


class Rich:
    def __repr__(self) -> str:
        return "Rich()"

    def _repr_html_(self) -> str:
        return "<b>rich</b>"

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return b"png", {"width": 3}

    def _repr_svg_(self) -> str:
        raise ValueError("broken")

    def _repr_latex_(self) -> None:
        return None


class Whole:
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"text/html": "<i>whole</i>", "application/json": {"a": 1}}, {"text/html": {"isolated": True}}


class Broken:
    def __repr__(self) -> str:
        raise OSError


def test_representations() -> None:
    data, metadata = mimebundle(Rich())
    assert data == {
        "text/html": "<b>rich</b>",
        "image/png": base64.b64encode(b"png").decode(),
        "text/plain": "Rich()",
    }
    assert metadata == {"image/png": {"width": 3}}
    data, metadata = mimebundle(Whole())
    assert data["text/html"] == "<i>whole</i>" and metadata == {"text/html": {"isolated": True}}
    assert set(mimebundle(Rich)[0]) == {"text/plain"}
    assert mimebundle(Broken())[0] == {"text/plain": "<Broken whose repr raised OSError>"}


def test_a_long_repr_is_bounded() -> None:
    text = mimebundle("x" * 10**6)[0]["text/plain"]
    assert len(text) < TEXT_LIMIT + 100 and "characters left out" in text


def test_a_table_and_a_figure() -> None:
    assert "<table" in mimebundle(pandas.DataFrame({"a": [1]}))[0]["text/html"]
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([1, 2])
    assert base64.b64decode(mimebundle(figure)[0]["image/png"]).startswith(b"\x89PNG")


@pytest.fixture
def shown(tmp_path: Path) -> tuple[Display, Any]:
    path = tmp_path / "display"
    display = Display(path, lambda text: None)
    return display, lambda: [codec.loads(line) for line in path.read_bytes().splitlines()]


def test_display_update_and_clear(shown: tuple[Display, Any]) -> None:
    display, lines = shown
    frontend = Frontend(display)
    assert frontend.display(1, "two") is None
    handle = frontend.display(Rich(), display_id=True)
    assert handle is not None
    handle.update("new")
    frontend.update_display("newer", display_id="mine")
    frontend.display({"text/plain": "raw"}, raw=True, display_id="r", metadata={"m": 1})
    frontend.clear_output(wait=True)
    found = lines()
    assert [line["kind"] for line in found] == ["display", "display", "display", "update", "update", "display", "clear"]
    assert found[0]["data"] == {"text/plain": "1"} and found[0]["id"] is None
    assert found[2]["id"] == found[3]["id"] == handle.display_id
    assert found[4]["id"] == "mine" and found[5]["data"] == {"text/plain": "raw"} and found[6]["wait"] is True


def test_a_display_shows_itself_or_writes_its_own_text(shown: tuple[Display, Any]) -> None:
    class Own:
        def _ipython_display_(self) -> None:
            display.publish("shown by itself")

    class Fails(Own):
        def _ipython_display_(self) -> None:
            raise OSError

        def __repr__(self) -> str:
            return "Fails()"

    class Pretty:
        def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
            printer.text("pretty")

    display, lines = shown
    Frontend(display).display(Own(), Fails(), Pretty(), {"a": ["b" * 40] * 3})
    texts = [line["data"]["text/plain"] for line in lines()]
    assert texts[:3] == ["'shown by itself'", "Fails()", "pretty"]
    assert texts[3].count("\n") == 2


def test_a_handle_of_a_rank_is_the_notebooks(shown: tuple[Display, Any]) -> None:
    handle = pickle.loads(pickle.dumps(Frontend(shown[0]).display(1, display_id="mine")))
    assert isinstance(handle, IPython.display.DisplayHandle)
    assert handle.display_id == "mine"


def test_what_has_no_json_form_is_left_out(shown: tuple[Display, Any]) -> None:
    display, lines = shown
    display.write("display", {"application/json": object(), "text/plain": "x"}, {})
    assert lines()[0]["data"] == {"text/plain": "x"}


def test_a_line_stands_for_each_display_and_an_update_has_its_number(tmp_path: Path) -> None:
    said: list[str] = []
    display = Display(tmp_path / "display", said.append)
    frontend = Frontend(display)
    frontend.display(Rich(), "a\nb")
    handle = frontend.display(1, display_id=True)
    assert handle is not None
    handle.update(2)
    frontend.update_display(3, display_id="never shown")
    frontend.clear_output()
    frontend.display({"text/html": "x", "a b\nc": "y", "text/plain": "p" * 300}, raw=True)
    display.publish(5, "result")
    display.publish(Rich(), "result")
    assert said == [
        "[display 1: text/html] Rich()\n",
        "[display 2: text/plain] 'a\\nb'\n",
        "[display 3: text/plain] 1\n",
        f"[display 4: text/html] {'p' * 200}…\n",
        "[display 6: text/html] Rich()\n",
    ]
    lines = [codec.loads(line) for line in (tmp_path / "display").read_bytes().splitlines()]
    assert [line.get("number") for line in lines] == [1, 2, 3, 3, None, None, 4, 5, 6]


def test_what_is_too_large_is_left_out_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    display = Display(tmp_path / "display", said.append, limit=2_000_000)
    bundle = {"image/png": "x" * 3_000_000, "text/plain": "a picture"}
    display.write("display", bundle, {"image/png": {"width": 3}})
    assert said == [
        "[display 1: text/plain] a picture (image/png left out: its 3 MB are more than the 2 MB that can be kept)\n"
    ]
    record = codec.loads((tmp_path / "display").read_bytes())
    assert record["data"] == {"text/plain": said[0].split("] ")[1].strip()} and record["metadata"] == {}
    monkeypatch.setattr(streams, "ALL_LIMIT", 500)
    display.write("display", {"image/png": "x" * 1000, "text/plain": "another"}, {})
    assert "another (image/png left out" in said[1]
    assert (tmp_path / "display").stat().st_size < 1000


def test_after_a_full_disk_the_next_display_has_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    display = Display(tmp_path / "display", said.append)
    write, room = os.write, [10]

    def full(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", full)
    display.publish(1)
    display.publish(2)
    assert said == [], "of what is lost nothing is said"
    room[0] = 10_000
    display.publish(3)
    monkeypatch.undo()
    torn, whole = (tmp_path / "display").read_bytes().splitlines()
    assert len(torn) == 10 and codec.loads(whole)["number"] == 3
    assert said == ["[display 3: text/plain] 3\n"]


def test_open_figures_are_shown_and_closed(shown: tuple[Display, Any]) -> None:
    display, lines = shown
    matplotlib.use("Agg", force=True)
    from matplotlib import pyplot

    result = pyplot.figure()
    display.publish(result, "result")
    pyplot.figure()
    display.figures()
    assert pyplot.get_fignums() == []
    assert [line["kind"] for line in lines()] == ["result", "display"]
    assert all("image/png" in line["data"] for line in lines())


@pytest.fixture
def fresh_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "tdx_imported_later"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield name
    sys.modules.pop(name, None)


def test_after_import_waits_for_the_import(fresh_module: str) -> None:
    def change(module: ModuleType) -> None:
        module.value += 1  # type: ignore[attr-defined]

    after_import({fresh_module: change})
    assert fresh_module not in sys.modules
    module: Any = __import__(fresh_module)
    assert module.value == 2 and "afterimport" not in type(module.__loader__).__module__
    after_import({fresh_module: change})
    assert module.value == 3


def test_after_import_of_a_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    after_import({"tdx_no_such_module": lambda module: None})
    with pytest.raises(ImportError):
        __import__("tdx_no_such_module")


def test_a_node_without_ipython(shown: tuple[Display, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    display, lines = shown
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(builtins, "get_ipython", lambda: None, raising=False)
    frontend = Frontend(display)
    shell._stand_in({"display": frontend.display, "clear_output": frontend.clear_output})
    names: dict[str, Any] = {}
    exec("from IPython.display import HTML, clear_output, display\nfrom IPython import get_ipython", names)
    names["display"](names["HTML"]("<b>x</b>"))
    names["clear_output"]()
    assert lines()[0]["data"]["text/html"] == "<b>x</b>" and lines()[1]["kind"] == "clear"
