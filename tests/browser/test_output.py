"""The output under a cell."""

from __future__ import annotations

import time
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from jupyter_torchdist.protocol.feed import MIME_TYPE
from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook

FRONT_ENDS = pytest.mark.parametrize("front_end", ["lab", "notebook"])

CELL = """\
%%distribute --ranks 2
import os, time
rank = int(os.environ["RANK"])
for step in range(20):
    print("step", step, "of rank", rank, flush=True)
    time.sleep(0.3)
"""


def an_output(job: str, html: str = "<p>the still picture</p>") -> dict[str, Any]:
    """What a saved notebook has of a job."""
    data = {MIME_TYPE: {"job": job, "host": "here"}, "text/html": html, "text/plain": "the still text"}
    return {"output_type": "display_data", "data": data, "metadata": {}}


@FRONT_ENDS
def test_a_cell_is_watched_live(front_end: str, server: Jupyter, page: Page) -> None:
    path = server.write("live.ipynb", "%load_ext jupyter_torchdist", CELL)
    notebook = Notebook.open(page, server, front_end, path)
    notebook.kernel_ready()
    notebook.run(0)
    notebook.run(1)
    view = notebook.view(1)
    expect(view).to_be_visible(timeout=30_000)
    expect(view).to_contain_text("running", timeout=20_000)
    view.get_by_role("tab", name="Logs").click()
    expect(view).to_contain_text("step 3 of rank 1", timeout=20_000)
    notebook.picture("running")
    expect(view).to_contain_text("succeeded", timeout=60_000)
    notebook.picture("ended")
    assert not notebook.errors


@FRONT_ENDS
def test_a_reopened_notebook_shows_a_running_job_without_a_kernel(
    front_end: str, server: Jupyter, page: Page, running_job: FakeJob
) -> None:
    running_job.rank(1).prints("a line of rank 1\n")
    path = server.write("reopened.ipynb", "pass", outputs={0: [an_output(running_job.spec.job)]})
    notebook = Notebook.open(page, server, front_end, path)
    view = notebook.view(0)
    expect(view).to_contain_text("running", timeout=20_000)
    running_job.now = time.time()
    running_job.rank(1).failed()
    running_job.ended("failed", "rank 1 failed", 1)
    expect(view).to_contain_text("failed", timeout=20_000)
    expect(view).to_contain_text("ValueError: no good")
    notebook.picture("failed")
    assert not notebook.errors


@FRONT_ENDS
def test_a_job_of_somebody_else_shows_the_still_picture(front_end: str, server: Jupyter, page: Page) -> None:
    path = server.write("shared.ipynb", "pass", outputs={0: [an_output("20260102-030405-aaaaaa")]})
    notebook = Notebook.open(page, server, front_end, path)
    expect(notebook.cell(0)).to_contain_text("the still picture", timeout=20_000)
    notebook.picture("unknown")
    assert not notebook.errors
