"""How high a view under a cell is: as its content needs, until the reader chooses."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import Locator, Page, expect

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook, write_settings
from tests.browser.test_output import FRONT_ENDS, an_output

HIGHEST = 420

EMPTY = """panel => {
    const bottoms = [...panel.querySelectorAll('.td-curve')].map(card => card.getBoundingClientRect().bottom);
    return panel.getBoundingClientRect().bottom - Math.max(...bottoms);
}"""
"""Pixels below the lowest curve."""


def height(view: Locator) -> int:
    return int(view.evaluate("view => view.offsetHeight"))


@FRONT_ENDS
@pytest.mark.timeout(120)
def test_a_view_is_as_high_as_its_content(front_end: str, server: Jupyter, page: Page, running_job: FakeJob) -> None:
    curve = [{"t": time.time() + step, "k": "log", "step": step, "v": {"loss": 1 / (1 + step)}} for step in range(50)]
    running_job.rank(0).records(*curve)
    outputs = {0: [an_output(running_job.spec.job)]}
    if front_end == "lab":  # the other one is in the light theme
        write_settings(server.settings, "apputils-extension/themes", theme="JupyterLab Dark")
    notebook = Notebook.open(page, server, front_end, server.write("height.ipynb", "pass", "pass", outputs=outputs))
    view = notebook.view(0)
    expect(view.locator(".td-curve")).to_be_visible()
    assert height(view) < HIGHEST
    assert view.get_by_role("tabpanel", name="Curves").evaluate(EMPTY) < 30
    notebook.picture("curve")
    it_grows_and_never_shrinks(view, running_job)
    notebook.picture("grown")
    the_reader_chooses(view, running_job)
    notebook.picture("chosen")
    assert not notebook.errors


def it_grows_and_never_shrinks(view: Locator, job: FakeJob) -> None:
    before = height(view)
    view.get_by_role("tab", name="Logs").click()
    assert height(view) >= before
    job.rank(1).prints("".join(f"line {number}\n" for number in range(300)))
    expect(view.get_by_text("line 299", exact=True)).to_be_in_viewport()
    assert height(view) == HIGHEST
    assert view.locator(".td-logs-scroll").evaluate("list => list.scrollHeight > list.clientHeight + 100")
    view.get_by_role("tab", name="Curves").click()
    assert height(view) == HIGHEST


def the_reader_chooses(view: Locator, job: FakeJob) -> None:
    page, handle = view.page, view.get_by_role("separator", name="height of the view")
    handle.press("Enter")
    tall = height(view)
    assert tall > HIGHEST
    expect(handle).to_have_attribute("aria-valuenow", str(tall))
    handle.press("Enter")
    assert height(view) == HIGHEST
    handle.press("ArrowUp")
    assert height(view) == HIGHEST - 40
    handle.scroll_into_view_if_needed()
    box = handle.bounding_box()
    assert box is not None
    middle = box["x"] + box["width"] / 2
    page.mouse.move(middle, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(middle, box["y"] + 4 - 100, steps=5)
    page.mouse.up()
    assert height(view) == HIGHEST - 140
    view.get_by_role("tab", name="Logs").click()
    job.rank(1).prints("one more\n")
    expect(view.get_by_text("one more", exact=True)).to_be_visible()
    assert height(view) == HIGHEST - 140
