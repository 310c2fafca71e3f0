"""A kernel whose jobs the server does not see, where JupyterLab has our extension: the widget is shown instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.store import catalog
from tests.browser.frontend import Jupyter, Notebook
from tests.browser.test_widget import LONG, STEP, cancel, find
from tests.leaks import wait_until

BEGIN = "%load_ext jupyter_torchdist\nimport os\nos.environ['TORCHDIST_HOME'] = {home!r}"

pytestmark = pytest.mark.timeout(300)


def the_only_view(notebook: Notebook, number: int) -> Locator:
    """The one that is seen: the renderer's own, which found no job, has given its place to the widget's."""
    view = notebook.cell(number).locator(".td-output-widget .td-view")
    expect(view).to_be_visible(timeout=60_000)
    expect(notebook.view(number).locator("visible=true")).to_have_count(1)
    return view


def test_a_remote_kernel(server: Jupyter, page: Page, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    path = server.write("remote.ipynb", BEGIN.format(home=str(elsewhere)), LONG)
    notebook = Notebook.open(page, server, "lab", path)
    notebook.kernel_ready()
    notebook.run(0)
    notebook.run(1)
    view = the_only_view(notebook, 1)
    view.get_by_role("tab", name="Logs").click()
    expect(view).to_contain_text(STEP, timeout=60_000)
    first = view.get_by_text(STEP).last.inner_text()
    expect(view.get_by_text(STEP).last).not_to_have_text(first)
    expect(view.locator(".td-connection")).to_be_hidden()
    the_only_view(notebook, 1)
    notebook.picture("running")

    cancel(view)
    expect(view).to_contain_text("cancelled", timeout=60_000)
    assert [summary.state for summary in catalog.jobs(Home(elsewhere))] == ["cancelled"]
    assert not catalog.jobs(), "the server has seen this job"
    expect(notebook.cell(1).locator(".jp-InputPrompt").first).not_to_have_text("[*]:", timeout=60_000)
    page.get_by_role("button", name="Save and create checkpoint").first.click()
    assert wait_until(lambda: "JobCancelled" in (server.root / path).read_text())

    page.reload()
    view = the_only_view(notebook, 1)
    expect(view).to_contain_text("cancelled", timeout=60_000)
    find(view, "needle of rank 0")
    notebook.picture("reloaded")
    assert not notebook.errors
