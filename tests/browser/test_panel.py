"""The side bar's panel, the tab of a job, commands and notifications."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook, write_settings
from tests.browser.test_output import an_output


def open_panel(page: Page) -> None:
    page.get_by_role("tab", name="Distributed Jobs").click()


def test_jobs_are_listed_filtered_opened_and_their_end_is_told(
    server: Jupyter, page: Page, home: Path, running_job: FakeJob
) -> None:
    with FakeJob(now=time.time() - 100, label="Cell In[3]") as other:
        other.running().ended("failed", "rank 0 failed", 0)
    job = running_job.spec.job
    path = server.write("panel.ipynb", "pass", outputs={0: [an_output(job)]})
    notebook = Notebook.open(page, server, "lab", path)
    open_panel(page)
    rows = page.locator(".td-row")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("Cell In[7]")
    expect(rows.first).to_contain_text("running")
    expect(page.get_by_role("status").filter(has_text="2 jobs, 1 running")).to_be_visible()
    expect(page.get_by_role("button", name="1 distributed job", exact=True)).to_be_visible()
    page.get_by_label("Filter jobs").fill("failed")
    expect(rows).to_have_count(1)
    page.get_by_label("Filter jobs").fill("")
    rows.first.hover()
    notebook.picture("rows")

    rows.first.get_by_role("button", name="Open Cell In[7]").click()
    tab = page.locator(".td-main")
    expect(tab).to_contain_text("running")
    running_job.now = time.time()
    running_job.ended()
    expect(tab).to_contain_text("succeeded")
    expect(page.locator(".Toastify")).to_contain_text("Cell In[7] succeeded")
    notebook.picture("tab")
    assert not notebook.errors


def test_a_job_is_cancelled_and_deleted_after_a_question(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    notebook = Notebook.open(page, server, "lab", server.write("ask.ipynb", "pass"))
    open_panel(page)
    row = page.locator(".td-row").first
    row.get_by_role("button", name="Open Cell In[7]").focus()
    page.keyboard.press("Tab")
    expect(row.get_by_role("button", name="Cancel Cell In[7]…")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator(".Toastify")).to_contain_text("every rank is asked to stop")
    assert list(running_job.paths.requests.glob("*.json"))
    running_job.now = time.time()
    running_job.ended("cancelled")
    row.hover()
    row.get_by_role("button", name="Delete Cell In[7]…").click()
    notebook.picture("delete")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".td-panel")).to_contain_text("No jobs yet")
    assert not running_job.paths.root.exists()
    assert not notebook.errors


def test_the_cell_of_a_job_is_shown(server: Jupyter, page: Page, home: Path) -> None:
    sources = [f"x = {number}" for number in range(60)]
    with FakeJob(now=time.time(), label="Cell In[50]", notebook=str(server.root / "long.ipynb")) as job:
        job.running().ended()
    server.write("long.ipynb", *sources, outputs={49: [an_output(job.spec.job)]})
    notebook = Notebook.open(page, server, "lab", server.write("other.ipynb", "pass"))
    open_panel(page)
    row = page.locator(".td-row").first
    row.hover()
    row.get_by_role("button", name="Show the cell of Cell In[50]").click()
    active = page.locator(".jp-Cell.jp-mod-active").filter(has_text="x = 49")
    expect(active).to_be_in_viewport()
    expect(active.locator(".td-view")).to_contain_text("succeeded")
    assert not notebook.errors


def test_panel_and_tab_in_each_theme(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    dark, *others = ["JupyterLab Dark", "JupyterLab Light", "JupyterLab Dark High Contrast"]
    write_settings(server.settings, "apputils-extension/themes", theme=dark)
    running_job.rank(0).prints("a line of rank 0\n")
    notebook = Notebook.open(page, server, "lab", server.write("theme.ipynb", "pass"))
    expect(page.locator(f"body[data-jp-theme-name='{dark}']")).to_be_attached()
    open_panel(page)
    page.locator(".td-row-open").click()
    tab = page.locator(".td-main")
    expect(tab).to_contain_text("a line of rank 0")
    for theme in [dark, *others]:
        if theme != dark:
            notebook.in_theme(theme)
        view, area = tab.locator(".td-view").bounding_box(), tab.bounding_box()
        assert view is not None
        assert area is not None
        assert view["height"] == pytest.approx(area["height"], abs=4)
        notebook.picture(theme.removeprefix("JupyterLab ").lower().replace(" ", "-"))
    assert not notebook.errors


def test_in_notebook_a_job_opens_below_the_document(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    notebook = Notebook.open(page, server, "notebook", server.write("below.ipynb", "pass"))
    page.evaluate("job => window.jupyterapp.commands.execute('torchdist:open-job', {job})", running_job.spec.job)
    expect(page.locator(".td-main")).to_contain_text("running")
    page.evaluate("() => window.jupyterapp.commands.execute('torchdist:show-jobs')")
    expect(page.locator(".td-row")).to_contain_text("Cell In[7]")
    notebook.picture("down")
    assert not notebook.errors


def test_the_command_is_copied(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    notebook = Notebook.open(page, server, "lab", server.write("copy.ipynb", "pass"))
    open_panel(page)
    row = page.locator(".td-row").first
    row.hover()
    row.get_by_role("button", name="Copy the command of Cell In[7]").click()
    expect(page.locator(".Toastify")).to_contain_text("Copied")
    assert running_job.spec.job in page.evaluate("() => navigator.clipboard.readText()")
    assert not notebook.errors
