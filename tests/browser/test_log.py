"""The log under a cell: bars, colours, search, and the wheel."""

from __future__ import annotations

import io

from playwright.sync_api import Locator, Page, expect
from tqdm import tqdm

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook
from tests.browser.test_output import an_output


def test_the_wheel_is_the_notebooks_until_one_clicks_into_the_log(
    server: Jupyter, page: Page, running_job: FakeJob
) -> None:
    running_job.rank(0).prints("".join(f"line {number}\n" for number in range(2000)))
    more = ["\n".join("pass" for _ in range(40))] * 3
    path = server.write("wheel.ipynb", "pass", *more, outputs={0: [an_output(running_job.spec.job)]})
    notebook = Notebook.open(page, server, "lab", path)
    view = notebook.view(0)
    view.get_by_role("tab", name="Logs").click()
    log = view.get_by_role("grid")
    expect(log).to_contain_text("line 1999")
    end = top(log)
    place = log.bounding_box()
    assert place is not None
    page.mouse.move(place["x"] + 200, place["y"] + 50)
    page.mouse.wheel(0, 30)
    moves_to(page, log, place["y"] - 30)
    page.mouse.wheel(0, -30)
    moves_to(page, log, place["y"])
    assert top(log) == end

    log.click(position={"x": 300, "y": 50})
    page.mouse.wheel(0, -300)
    page.wait_for_function("([log, end]) => log.scrollTop < end - 250", arg=[log.element_handle(), end])
    moves_to(page, log, place["y"])
    page.mouse.wheel(0, 1000)
    page.wait_for_function("([log, end]) => log.scrollTop >= end - 1", arg=[log.element_handle(), end])
    for _ in range(100):  # until the browser takes it for another turn of the wheel
        page.mouse.wheel(0, 30)
        if (log.bounding_box() or place)["y"] < place["y"]:
            break
    else:
        raise AssertionError("at its end the log keeps the wheel")
    assert not notebook.errors


def top(log: Locator) -> float:
    return float(log.evaluate("log => log.scrollTop"))


def moves_to(page: Page, log: Locator, y: float) -> None:
    place = "([log, y]) => Math.abs(log.getBoundingClientRect().y - y) < 3"
    page.wait_for_function(place, arg=[log.element_handle(), y])


def test_bars_inside_one_another_and_a_search(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    file = io.StringIO()
    for _ in tqdm(range(3), "epoch", file=file, mininterval=0):
        for _ in tqdm(range(20), "batch", file=file, mininterval=0, leave=False):
            pass
    bars = file.getvalue()
    path = server.write("bars.ipynb", "pass", outputs={0: [an_output(running_job.spec.job)]})
    half = bars.index("50%", len(bars) // 2)
    for rank in (0, 1):
        running_job.rank(rank).prints("loading\nepochs begin\n")
        running_job.rank(rank).prints(bars[:half] + bars[half:].split("\x1b[A", 1)[0] + "\x1b[A", "err")
    notebook = Notebook.open(page, server, "lab", path)
    view = notebook.view(0)
    view.get_by_role("tab", name="Logs").click()
    rows = view.locator(".td-log-row")
    expect(rows.filter(has_text="epoch:")).to_have_count(2)
    expect(rows.filter(has_text="batch:")).to_have_count(2)
    notebook.picture("half")
    view.get_by_role("searchbox").press_sequentially("begin")
    expect(view.locator(".td-hit-current")).to_have_text("begin")
    expect(view.get_by_role("searchbox")).to_be_focused()
    notebook.picture("search")
    for rank in (0, 1):
        running_job.rank(rank).prints(bars[half:].split("\x1b[A", 1)[1] + "after\n", "err")
    expect(rows.filter(has_text="epoch: 100%")).to_have_count(2)
    expect(rows.filter(has_text="batch:")).to_have_count(0)
    running_job.rank(1).failed(ValueError("\x1b[31mred\x1b[0m"))
    running_job.ended("failed", "rank 1 failed: ValueError: \x1b[31mred\x1b[0m", 1)
    expect(view.locator(".td-failure-title")).to_contain_text(": red")
    expect(view).not_to_contain_text("\x1b")
    notebook.picture("over")
    assert not notebook.errors
