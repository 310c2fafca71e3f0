"""Curves by hand: pointed at, zoomed, smoothed, drawn by time, and saved as files."""

from __future__ import annotations

import csv
import io
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from playwright.sync_api import ConsoleMessage, Locator, Page, expect

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook

STEPS = 101
BEGUN = 1_767_225_600.0
DRAWN = "canvas => canvas.toDataURL()"
EMPTY_SHARE = """canvas => {
    const [scale, context] = [devicePixelRatio, canvas.getContext('2d')];
    const [top, high] = [10 * scale, canvas.height - 46 * scale];
    const shares = [];
    for (let left = 70 * scale; left < canvas.width - 15 * scale; left++) {
        const alphas = context.getImageData(left, top, 1, high).data.filter((_, at) => at % 4 === 3);
        shares.push(alphas.filter(alpha => alpha === 0).length / alphas.length);
    }
    return Math.max(...shares);
}"""
"""Of the grid's emptiest column of pixels, which has no line but those across."""
SVG = "{http://www.w3.org/2000/svg}"


def loss(step: int, rank: int) -> float:
    return 1.0 + step + rank


def lr(step: int, rank: int) -> float:
    return 0.5 - step / 1000


def a_log(step: int, rank: int) -> dict[str, Any]:
    return {"t": BEGUN + step, "k": "log", "step": step, "v": {"loss": loss(step, rank), "lr": lr(step, rank)}}


class Curve:
    """One plot in the grid, which is as wide as all of its steps."""

    def __init__(self, view: Locator, name: str) -> None:
        self.card = view.get_by_role("listitem").filter(has=view.page.get_by_text(name, exact=True))
        self.figure = self.card.get_by_role("figure")
        self.tip = self.card.locator(".td-tip")
        self.all_of_it = self.card.get_by_role("button", name="all of it")
        self._mouse = view.page.mouse

    def _at(self, share: float) -> tuple[float, float]:
        box = self.card.locator(".u-over").bounding_box()
        assert box is not None
        return box["x"] + share * box["width"], box["y"] + box["height"] / 2

    def point(self, share: float) -> None:
        """The mouse at a place between the left edge (0) and the right one (1)."""
        self.figure.scroll_into_view_if_needed()
        self._mouse.move(*self._at(share))

    def drag(self, begin: float, end: float) -> None:
        self.point(begin)
        self._mouse.down()
        self._mouse.move(*self._at(end), steps=5)
        self._mouse.up()

    def double_click(self) -> None:
        self.figure.scroll_into_view_if_needed()
        self._mouse.dblclick(*self._at(0.5))

    def ends_between(self, low: int, high: int) -> None:
        """The last step shown, as a screen reader says it."""
        steps = "|".join(str(step) for step in range(low, high + 1))
        expect(self.figure).to_have_attribute("aria-label", re.compile(rf" at step ({steps}), from "))

    def save(self, what: str) -> bytes:
        """What the browser saves."""
        self.card.get_by_label("Save ").click()
        return saved(self.card.page, lambda: self.card.get_by_role("button", name=what).click())


def saved(page: Page, act: Callable[[], object]) -> bytes:
    with page.expect_download() as download:
        act()
    return Path(download.value.path()).read_bytes()


@pytest.fixture
def tab(server: Jupyter, page: Page, running_job: FakeJob) -> Notebook:
    """A page with the curves of a job in its main area."""
    for rank in (0, 1):
        running_job.rank(rank).records(*(a_log(step, rank) for step in range(STEPS)))
    notebook = Notebook.open(page, server, "lab", server.write("curves.ipynb", "pass"))
    page.evaluate("job => window.jupyterapp.commands.execute('torchdist:open-job', {job})", running_job.spec.job)
    page.locator(".td-main").get_by_role("tab", name="Curves").click()
    return notebook


def test_pointed_at_zoomed_and_drawn_in_other_ways(tab: Notebook) -> None:
    said: list[str] = []
    tab.page.on("console", lambda message: said.append(message.text) if is_ours(message) else None)
    view = tab.page.locator(".td-main .td-view")
    first, second = Curve(view, "loss"), Curve(view, "lr")
    for curve in (first, second):
        curve.ends_between(100, 100)
    is_read_under_the_mouse(first)
    is_zoomed_alone(first, second)
    is_zoomed_together(first, second)
    tab.picture("zoomed-together")
    view.get_by_label("zoom together").uncheck()
    first.all_of_it.click()
    is_smoothed_and_on_a_log_axis(tab, view, first)
    is_drawn_by_time(view, first)
    tab.picture("time")
    assert not said
    assert not tab.errors


def is_ours(message: ConsoleMessage) -> bool:
    return message.type == "error" and "torchdist" in message.location["url"] + message.text


def is_read_under_the_mouse(curve: Curve) -> None:
    expect(curve.tip).to_be_hidden()
    curve.point(0.5)
    expect(curve.tip).to_be_visible()
    expect(curve.tip.locator("div")).to_have_text(["step 50", "mean: 51.5  ≠ 51 … 52"])
    curve.point(1.2)
    expect(curve.tip).to_be_hidden()


def is_zoomed_alone(curve: Curve, other: Curve) -> None:
    expect(curve.all_of_it).to_be_hidden()
    curve.drag(0.25, 0.75)
    curve.ends_between(73, 76)
    curve.point(0.5)
    expect(curve.tip).to_contain_text(re.compile("step (49|50|51)"))
    other.ends_between(100, 100)
    expect(other.all_of_it).to_be_hidden()
    curve.double_click()
    curve.ends_between(100, 100)
    expect(curve.all_of_it).to_be_hidden()
    curve.drag(0.25, 0.75)
    curve.ends_between(73, 76)
    curve.all_of_it.click()
    curve.ends_between(100, 100)


def is_zoomed_together(curve: Curve, other: Curve) -> None:
    """One curve's range becomes the others', in both directions."""
    curve.drag(0.25, 0.75)
    curve.ends_between(73, 76)
    curve.card.page.get_by_label("zoom together").check()
    other.ends_between(73, 76)
    other.all_of_it.click()
    for each in (curve, other):
        each.ends_between(100, 100)
    other.drag(0.1, 0.5)
    for each in (curve, other):
        each.ends_between(48, 51)


def is_smoothed_and_on_a_log_axis(tab: Notebook, view: Locator, curve: Curve) -> None:
    drawn_anew(curve, lambda: view.get_by_label("smoothing").fill("0.9"))
    curve.point(0.5)
    expect(curve.tip).to_contain_text(re.compile(r"mean: 51\.5 \(≈ \d"))
    drawn_anew(curve, lambda: view.get_by_label("log axis").check())
    tab.picture("smooth-log")
    drawn_anew(curve, lambda: view.get_by_label("smoothing").fill("0"))
    curve.point(0.5)
    expect(curve.tip).not_to_contain_text("≈")
    drawn_anew(curve, lambda: view.get_by_label("log axis").uncheck())


def drawn_anew(curve: Curve, act: Callable[[], object]) -> None:
    """Another picture, after the mouse has gone."""
    curve.point(1.2)
    expect(curve.tip).to_be_hidden()
    before = curve.card.locator("canvas").evaluate(DRAWN)
    act()
    changed = "([card, before]) => card.querySelector('canvas')?.toDataURL() !== before"
    curve.card.page.wait_for_function(changed, arg=[curve.card.element_handle(), before])


@pytest.mark.soak
def test_begun_with_one_step_it_is_drawn_as_any_other(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    """A value alone is a dot; those after it are a line, without dots, whatever the plot began with."""
    rank = running_job.rank(0)
    rank.records(a_log(0, 0))
    Notebook.open(page, server, "lab", server.write("one.ipynb", "pass"))
    page.evaluate("job => window.jupyterapp.commands.execute('torchdist:open-job', {job})", running_job.spec.job)
    view = page.locator(".td-main .td-view")
    expect(view.get_by_role("tab", name="Curves")).to_have_attribute("aria-selected", "true")
    curve = Curve(view, "loss")
    curve.ends_between(0, 0)
    rank.records(*(a_log(step, 0) for step in range(1, STEPS)))
    curve.ends_between(100, 100)
    grown = curve.card.locator("canvas").evaluate(DRAWN)
    drawn_anew(curve, lambda: view.get_by_label("log axis").check())
    drawn_anew(curve, lambda: view.get_by_label("log axis").uncheck())
    same = "([card, grown]) => card.querySelector('canvas')?.toDataURL() === grown"
    page.wait_for_function(same, arg=[curve.card.element_handle(), grown], timeout=5_000)


@pytest.mark.soak
def test_many_decades_leave_room_between_the_lines(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    rank = running_job.rank(0)
    rank.records(*({**a_log(step, 0), "v": {"loss": 10.0 ** (2 - 14 * step / (STEPS - 1))}} for step in range(STEPS)))
    Notebook.open(page, server, "lab", server.write("decades.ipynb", "pass"))
    page.evaluate("job => window.jupyterapp.commands.execute('torchdist:open-job', {job})", running_job.spec.job)
    view = page.locator(".td-main .td-view")
    expect(view.get_by_role("tab", name="Curves")).to_have_attribute("aria-selected", "true")
    curve = Curve(view, "loss")
    curve.ends_between(100, 100)
    drawn_anew(curve, lambda: view.get_by_label("log axis").check())
    assert curve.card.locator("canvas").evaluate(EMPTY_SHARE) > 0.9


def is_drawn_by_time(view: Locator, curve: Curve) -> None:
    """A range of steps does not stay."""
    curve.drag(0.25, 0.75)
    expect(curve.all_of_it).to_be_visible()
    view.get_by_label(re.compile("^by")).select_option("time")
    expect(curve.figure).to_have_attribute("aria-label", re.compile(r" at \d\d:\d\d:\d\d, from 1.5 to 101.5"))
    expect(curve.all_of_it).to_be_hidden()
    curve.point(0.5)
    expect(curve.tip).to_contain_text(time.strftime("%H:%M:%S", time.localtime(BEGUN + 50)))


def test_saved_as_files(tab: Notebook) -> None:
    view = tab.page.locator(".td-main .td-view")
    curve = Curve(view, "loss")
    curve.ends_between(100, 100)

    picture = curve.save("PNG")
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    drawn = curve.card.locator("canvas").evaluate("canvas => [canvas.width, canvas.height]")
    assert [width, height] == [drawn[0], drawn[1] + 28]  # the name stands above

    svg = ElementTree.fromstring(curve.save("SVG"))
    assert next(text.text for text in svg.iter(f"{SVG}text")) == "loss"
    line = next(path for path in svg.iter(f"{SVG}path") if path.findtext(f"{SVG}title") == "mean")
    assert len(re.split("[ML]", line.attrib["d"])) == STEPS + 1

    view.get_by_label(re.compile("^lines")).select_option("every rank")
    expect(view.locator(".td-legend-item")).to_have_text(["rank 0: running", "rank 1: running"])
    assert rows(curve.save("CSV")) == sorted(recorded("loss", loss))
    curve.drag(0.25, 0.75)
    curve.ends_between(73, 76)
    shown = [row for row in rows(curve.save("CSV")) if row[1] == 0]
    assert [row[2] for row in shown] == list(range(int(shown[0][2]), int(shown[-1][2]) + 1))
    assert 24 <= shown[0][2] <= 27
    assert 73 <= shown[-1][2] <= 77
    curve.all_of_it.click()
    everything = saved(tab.page, lambda: view.get_by_role("toolbar").get_by_role("button", name="CSV").click())
    assert rows(everything) == sorted([*recorded("loss", loss), *recorded("lr", lr)])
    assert not tab.errors


def recorded(name: str, value: Callable[[int, int], float]) -> list[tuple[str, int, float, float, float, float]]:
    points = [(rank, step, value(step, rank)) for rank in (0, 1) for step in range(STEPS)]
    return [(name, rank, step, found, found, found) for rank, step, found in points]


def rows(file: bytes) -> list[tuple[str, int, float, float, float, float]]:
    """Of a CSV file, sorted."""
    head, *body = csv.reader(io.StringIO(file.decode()))
    assert head == ["name", "rank", "step", "value", "low", "high"]
    return sorted((name, int(rank), *map(float, numbers)) for name, rank, *numbers in body)  # type: ignore[misc]
