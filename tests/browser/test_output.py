"""The output under a cell."""

from __future__ import annotations

import time
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from jupyter_torchdist.protocol.feed import MIME_TYPE
from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook

FRONT_ENDS = pytest.mark.parametrize("front_end", ["lab", pytest.param("notebook", marks=pytest.mark.soak)])

CELL = """\
%%distribute --ranks 2
import os, time
rank = int(os.environ["RANK"])
for step in range(20):
    print("step", step, "of rank", rank, flush=True)
    time.sleep(0.3)
"""


TYPED = "%%distribute --ranks 2 --"

LINE_IS = """text => {
    const {anchorNode} = document.getSelection();
    const element = anchorNode?.nodeType === Node.TEXT_NODE ? anchorNode.parentElement : anchorNode;
    return element?.closest('.cm-line')?.textContent === text;
}"""
"""Whether the cursor is in that line of a cell."""


def an_output(job: str, html: str = "<p>the still picture</p>") -> dict[str, Any]:
    """What a saved notebook has of a job."""
    data = {MIME_TYPE: {"job": job, "host": "here"}, "text/html": html, "text/plain": "the still text"}
    return {"output_type": "display_data", "data": data, "metadata": {}}


@pytest.mark.parametrize("front_end", ["lab", "notebook"])
def test_what_stands_under_a_cell(front_end: str, server: Jupyter, page: Page, running_job: FakeJob) -> None:
    """Of a running job without a kernel, of a job that is somebody else's, and of one that is begun here."""
    running_job.rank(1).prints("a line of rank 1\n")
    outputs = {0: [an_output(running_job.spec.job)], 1: [an_output("20260102-030405-aaaaaa")]}
    source = "# a cell\nx = 1\nraise ValueError('no good')"
    path = server.write("cells.ipynb", source, "pass", "%load_ext jupyter_torchdist", CELL, TYPED, outputs=outputs)
    notebook = Notebook.open(page, server, front_end, path)
    view = notebook.view(0)
    expect(view).to_contain_text("running", timeout=20_000)
    expect(notebook.cell(1)).to_contain_text("the still picture", timeout=20_000)
    expect(notebook.view(1)).to_contain_text("This server has no such job: it ran elsewhere, or was deleted.")
    expect(notebook.view(1)).to_contain_text("Below is the picture that was saved with the notebook.")
    running_job.now = time.time()
    running_job.rank(1).failed(frames=(("Cell In[7]", 3, "<module>", "raise ValueError('no good')"),))
    running_job.ended("failed", "rank 1 failed", 1)
    expect(view).to_contain_text("failed", timeout=20_000)
    expect(view).to_contain_text("ValueError: no good")
    notebook.picture("failed")
    its_lines_lead_to_the_cell(notebook, view)

    notebook.kernel_ready()
    notebook.run(2)
    notebook.run(3)
    view = notebook.view(3)
    view.scroll_into_view_if_needed()
    expect(view).to_contain_text("running", timeout=30_000)
    view.get_by_role("tab", name="Logs").click()
    expect(view).to_contain_text("step 3 of rank 1", timeout=20_000)
    notebook.picture("running")
    expect(view).to_contain_text("succeeded", timeout=60_000)
    is_bounded(view)
    notebook.picture("ended")
    options_are_offered_and_explained(notebook, 4)
    if front_end == "notebook":
        a_job_opens_below_the_document(notebook, running_job)
    assert not notebook.errors


def is_bounded(view: Locator) -> None:
    """However many lines there are: they are scrolled within the view."""
    assert view.evaluate("view => view.offsetHeight") <= 430  # --td-height, and borders
    assert view.locator(".td-logs-scroll").evaluate("list => list.scrollHeight > list.clientHeight + 100")


def options_are_offered_and_explained(notebook: Notebook, number: int) -> None:
    """By Tab, with what each is; and by Shift-Tab on one of them."""
    page, text = notebook.page, notebook.cell(number).locator(".cm-content")
    text.click()
    text.press("End")
    text.press("Tab")
    offered = page.locator(".jp-Completer")
    expect(offered).to_contain_text("--strategy")
    fits = "all => all.length > 20 && all.every(each => each.scrollHeight <= each.clientHeight)"
    assert offered.locator(".jp-Completer-typeExtended").evaluate_all(fits), "what they are takes more than one line"
    notebook.picture("completer")
    text.press("Escape")
    expect(offered).to_be_hidden()
    text.press_sequentially("strategy")
    text.press("Escape")  # the list that typing may have brought
    text.press("Shift+Tab")
    explained = page.locator(".jp-Tooltip")
    expect(explained).to_contain_text("fsdp")
    notebook.picture("tooltip")
    text.press("Escape")
    expect(explained).to_have_count(0)


def its_lines_lead_to_the_cell(notebook: Notebook, view: Locator) -> None:
    view.get_by_role("button", name="Cell In[7], line 3").click()
    cell = notebook.cell(0)
    expect(cell.locator(".cm-focused")).to_be_visible()
    notebook.page.wait_for_function(LINE_IS, arg="raise ValueError('no good')")
    if view.locator(".td-traceback").get_attribute("open") is None:  # folded until the kernel is known to be idle
        view.get_by_text("Traceback", exact=True).click()
    view.get_by_text("Whole traceback").click()
    expect(view.locator(".td-whole .td-code")).to_be_in_viewport()
    failure = view.locator(".td-failure")
    assert failure.evaluate("box => box.scrollHeight <= box.clientHeight"), "the whole traceback does not fit"
    notebook.picture("whole")
    view.get_by_text("Whole traceback").click()


def a_job_opens_below_the_document(notebook: Notebook, job: FakeJob) -> None:
    page = notebook.page
    page.evaluate("job => window.jupyterapp.commands.execute('torchdist:open-job', {job})", job.spec.job)
    expect(page.locator(".td-main .td-line .td-state")).to_be_in_viewport()
    expect(page.locator(".td-main .td-line .td-state")).to_have_text("failed")
    page.evaluate("() => window.jupyterapp.commands.execute('torchdist:show-jobs')")
    row = page.locator(".td-row").filter(has_text="failed")
    expect(row).to_be_in_viewport()
    expect(row).to_contain_text("Cell In[7]")
    notebook.picture("down")
