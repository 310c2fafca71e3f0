"""Someone who never saw it, and reads no page: does what the screen says, finds rank 1's traceback, and cancels."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.frontend import Jupyter, Notebook
from tests.browser.test_life import paste, state_is

FAILS = """
import torch.distributed as dist
def load(batch):
    if dist.get_rank() == 1:
        raise ValueError(f"batch {batch} is empty")
load(3)
dist.barrier()
"""
SLEEPS = """
import time
time.sleep(600)
"""


@pytest.mark.timeout(300)
def test_from_an_empty_panel_to_a_traceback_and_a_cancel(server: Jupyter, page: Page) -> None:
    notebook = Notebook.open(page, server, "lab", server.write("first.ipynb", "", "", ""))
    notebook.kernel_ready()
    page.get_by_role("tab", name="Distributed Jobs").click()
    expect(page.locator(".td-panel-empty")).to_contain_text("No jobs yet")
    load, magic = re.findall(r"%load_ext \w+|%%\w+", page.locator(".td-panel-empty").inner_text())

    paste(notebook, 0, load)
    paste(notebook, 1, f"{magic} --ranks 2{FAILS}")
    view = notebook.view(1)
    state_is(view, "failed")
    failure = view.locator(".td-failure")
    expect(failure).to_be_in_viewport(ratio=0.9)
    for words in ("rank 1", "ValueError: batch 3 is empty", "Cell In[2], line 5"):
        expect(failure.locator(".td-failure-head")).to_contain_text(words)
    expect(notebook.cell(1).locator(".jp-OutputArea")).to_contain_text("Traceback (most recent call last)")
    expect(failure.locator(".td-frame").last).to_be_hidden()  # the cell has it
    notebook.picture("failed")
    failure.get_by_text("Traceback", exact=True).click()
    expect(failure).to_contain_text('raise ValueError(f"batch {batch} is empty")')
    notebook.kernel_ready()  # what is run while a cell is failing is dropped

    paste(notebook, 2, f"{magic} --ranks 2{SLEEPS}")
    view = notebook.view(2)
    state_is(view, "running")
    expect(page.get_by_text("Python 3 (ipykernel) | Busy")).to_be_visible()
    view.get_by_role("button", name="Cancel").click()
    notebook.picture("asked")
    view.get_by_role("button", name="Cancel job").click()
    state_is(view, "cancelled")
    expect(page.locator(".td-row")).to_have_count(2)
    assert not notebook.errors
