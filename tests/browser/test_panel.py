"""The side bar's panel, the tab of a job, commands and notifications."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import time
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store.jobdir import taken_requests
from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook, write_settings
from tests.browser.test_output import an_output
from tests.leaks import wait_until

THEMES = ["JupyterLab Dark", "JupyterLab Light", "JupyterLab Dark High Contrast"]


NOTIFY = "select[name='jp-SettingsEditor-jupyter-torchdist:jobs_notify']"
"""In the settings' editor; JupyterLab gives it no label."""


def open_panel(page: Page) -> None:
    page.get_by_role("tab", name="Distributed Jobs").click()


def test_the_panel_and_its_jobs(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    """Listed, filtered, copied, opened, told of when they end, cancelled, deleted."""
    write_settings(server.settings, "apputils-extension/themes", theme=THEMES[0])
    running_job.rank(0).prints("a line of rank 0\n")
    now = time.time()
    with FakeJob(now=now - 200, label="Cell In[3]") as failed:
        failed.running().ended("failed", "rank 0 failed", 0)
    path = server.write("panel.ipynb", "pass", outputs={0: [an_output(running_job.spec.job)]})
    with FakeJob(now=now - 100, label="Cell In[8]") as other:
        other.running()
        notebook = Notebook.open(page, server, "lab", path)
        expect(page.locator(f"body[data-jp-theme-name='{THEMES[0]}']")).to_be_attached()
        page.get_by_role("button", name="2 distributed jobs", exact=True).click()
        are_listed_filtered_and_copied(notebook, running_job)
        is_opened_in_each_theme(notebook)
        only_an_end_out_of_sight_is_told(notebook, running_job)
        is_killed_cancelled_and_deleted(notebook, other)
        nothing_runs_and_the_status_bar_is_silent(page)
    is_chosen_in_the_palette(notebook, failed)
    as_much_is_told_as_the_settings_say(notebook)
    assert not notebook.errors


def row_of(page: Page, label: str) -> Locator:
    return page.locator(".td-row").filter(has_text=label)


def are_listed_filtered_and_copied(notebook: Notebook, running: FakeJob) -> None:
    page, rows = notebook.page, notebook.page.locator(".td-row")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("Cell In[7]")
    expect(rows.first).to_contain_text("running")
    expect(page.get_by_role("status").filter(has_text="3 jobs, 2 running")).to_be_visible()
    expect(page.get_by_label("Filter jobs")).to_be_focused()
    page.get_by_label("Filter jobs").fill("failed")
    expect(rows).to_have_count(1)
    page.get_by_label("Filter jobs").fill("")
    expect(rows).to_have_count(3)  # a row shows its buttons while the pointer is on it: not on the one that goes
    notebook.picture("rows")
    rows.first.hover()
    rows.first.get_by_role("button", name="Copy the command of Cell In[7]").click()
    expect(page.locator(".Toastify")).to_contain_text("Copied")
    assert running.spec.job in page.evaluate("() => navigator.clipboard.readText()")


def is_opened_in_each_theme(notebook: Notebook) -> None:
    page = notebook.page
    page.get_by_role("button", name="Open Cell In[7]").click()
    tab = page.locator(".td-main")
    expect(tab).to_contain_text("a line of rank 0")
    expect(page.get_by_role("tab", name="Cell In[7] · ")).to_be_visible()
    for theme in THEMES:
        if theme != THEMES[0]:
            notebook.in_theme(theme)
        # while a theme's sheet is loaded nothing has a place
        page.wait_for_function(
            """([tab, view]) => view.checkVisibility() && Math.abs(view.offsetHeight - tab.offsetHeight) <= 4""",
            arg=[tab.element_handle(), tab.locator(".td-view").element_handle()],
        )
        notebook.picture(theme.removeprefix("JupyterLab ").lower().replace(" ", "-"))


def only_an_end_out_of_sight_is_told(notebook: Notebook, running: FakeJob) -> None:
    """A job whose view is on the screen needs no notification."""
    page, toasts = notebook.page, notebook.page.locator(".Toastify")
    running.now = time.time()
    running.ended()
    expect(page.locator(".td-main")).to_contain_text("succeeded")
    expect(row_of(page, "Cell In[7]")).to_contain_text("succeeded")
    with a_running_job("unseen") as unseen:
        expect(row_of(page, "unseen")).to_contain_text("running")
        unseen.rank(1).records({"t": 1.0, "k": "log", "step": 3, "v": {"loss": math.nan}})
        ends(page, unseen, "succeeded")
    expect(row_of(page, "unseen")).to_contain_text("The last value is not a number: loss")
    expect(toasts).to_contain_text("unseen succeeded: The last value is not a number: loss")
    expect(toasts).not_to_contain_text("Cell In[7] succeeded")
    notebook.picture("tab")
    shutil.rmtree(unseen.paths.root)
    expect(row_of(page, "unseen")).to_have_count(0)


def is_killed_cancelled_and_deleted(notebook: Notebook, job: FakeJob) -> None:
    page, row = notebook.page, row_of(notebook.page, "Cell In[8]")
    row.get_by_role("button", name="Open Cell In[8]").focus()
    page.keyboard.press("Tab")
    expect(row.get_by_role("button", name="Cancel Cell In[8]…")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator(".Toastify")).to_contain_text("every rank is asked to stop")
    assert [asked.kind for asked in taken_requests(job.paths)] == ["interrupt"]
    row.hover()
    row.get_by_role("button", name="Cancel Cell In[8]…").click()
    page.get_by_role("button", name="Kill it").click()
    assert wait_until(lambda: [asked.kind for asked in taken_requests(job.paths)] == ["kill"])
    job.now = time.time()
    job.ended("cancelled")
    row.hover()
    row.get_by_role("button", name="Delete Cell In[8]…").click()
    expect(page.locator(".Toastify")).not_to_contain_text("Cell In[8] cancelled")
    notebook.picture("delete")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(row).to_have_count(0)
    assert not job.paths.root.exists()


def nothing_runs_and_the_status_bar_is_silent(page: Page) -> None:
    expect(page.get_by_role("status").filter(has_text="2 jobs")).to_be_visible()
    expect(page.locator(".td-status-button")).to_be_hidden()


def is_chosen_in_the_palette(notebook: Notebook, job: FakeJob) -> None:
    """A job that is opened, and a command for which there is no job."""
    page, dialog = notebook.page, notebook.page.locator(".jp-Dialog")
    from_the_palette(page, "Open Distributed Job")
    chosen = dialog.get_by_role("option").filter(has_text=job.spec.job)
    dialog.locator("select").select_option(chosen.inner_text())
    dialog.locator(".jp-mod-accept").click()
    expect(page.get_by_role("tab", name="Cell In[3] · ")).to_be_visible()
    tab = page.locator(".td-main").filter(has_text="Cell In[3]")
    expect(tab.locator(".td-line .td-state")).to_have_text("failed")
    page.keyboard.press("Tab")
    expect(tab.locator(":focus")).to_be_visible()
    from_the_palette(page, "Cancel Distributed Job")
    expect(dialog).to_contain_text("There is no job for which this can be done.")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)


def from_the_palette(page: Page, label: str) -> None:
    page.keyboard.press("Control+Shift+C")
    palette = page.locator(".lm-CommandPalette-input")
    expect(palette).to_be_focused()
    palette.fill(label)
    expect(page.locator(".lm-CommandPalette-item.lm-mod-active")).to_have_text(re.compile(f"^{label}"))
    page.keyboard.press("Enter")


def as_much_is_told_as_the_settings_say(notebook: Notebook) -> None:
    """Chosen while jobs run; what comes to an end and is not told is followed by one that is."""
    page, toasts = notebook.page, notebook.page.locator(".Toastify")
    page.evaluate("() => void window.jupyterapp.commands.execute('settingeditor:open', {query: 'Distributed Jobs'})")
    names = ("passed over", "a loud one", "a silent one", "the last")
    with contextlib.ExitStack() as stack:
        passed_over, loud, silent, last = (stack.enter_context(a_running_job(name)) for name in names)
        expect(page.get_by_role("status").filter(has_text="4 running")).to_be_visible()
        choose(page, "failures")
        ends(page, passed_over, "succeeded")
        ends(page, loud, "failed")
        expect(toasts).to_contain_text("a loud one failed")
        expect(toasts).not_to_contain_text("passed over")
        choose(page, "none")
        ends(page, silent, "failed")
        choose(page, "all")
        ends(page, last, "succeeded")
        expect(toasts).to_contain_text("the last succeeded")
        expect(toasts).not_to_contain_text("a silent one")
        told = page.locator(".Toastify__toast").filter(has_text="a loud one failed")
        told.get_by_role("button", name="Open").click()
        expect(page.get_by_role("tab", name="a loud one · ")).to_be_visible()


def a_running_job(name: str) -> FakeJob:
    return FakeJob(now=time.time(), options=Options(ranks=2, name=name)).running()


def ends(page: Page, job: FakeJob, state: str) -> None:
    """The job ends, and the page has heard of it."""
    job.now = time.time()
    job.ended(state)
    expect(row_of(page, job.spec.options.name or "").filter(has_text=state)).to_have_count(1)


def choose(page: Page, which: str) -> None:
    """In the settings' editor, of which ends one is told; JupyterLab saves and reads that again."""
    read = re.compile(r"/lab/api/settings/jupyter-torchdist(:|%3A)jobs")
    with page.expect_response(lambda answer: answer.request.method == "GET" and bool(read.search(answer.url))):
        page.locator(NOTIFY).select_option(label=which)


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
