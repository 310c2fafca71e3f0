"""A job that outlives its page, its kernel and its tab, with real ranks in JupyterLab and Notebook."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from jupyter_torchdist.protocol.process import processes_of_job
from jupyter_torchdist.store import catalog
from tests.browser.frontend import Jupyter, Notebook
from tests.browser.network import comes_to
from tests.browser.test_output import FRONT_ENDS
from tests.browser.test_panel import open_panel
from tests.leaks import wait_until

LOAD = "%load_ext jupyter_torchdist\nimport os\nprint('kernel', os.getpid())"

COUNTS = """\
%%distribute --ranks 2
import os, time
from pathlib import Path
for number in range(1, 10_000):
    print("line", number, "of", os.environ["RANK"], flush=True)
    time.sleep(0.1)
    if number > 20 and Path("enough").exists():
        break
"""
"""Ranks that print until the test says that it is enough."""

HANGS = """\
%%distribute --ranks 2
import time
print("asleep", flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.timeout(300)


def state_is(view: Locator, state: str) -> None:
    expect(view.locator(".td-header .td-state")).to_have_text(state, timeout=60_000)


def is_whole(notebook: Notebook, view: Locator) -> int:
    """Every line of both ranks is there once, in order; how many of each there are."""
    lines = [line for line in notebook.log_lines(view) if "] line " in line]  # not what a cancel leaves
    counts = set()
    for rank in (0, 1):
        own = [line.partition("] ")[2] for line in lines if line.startswith(f"[rank {rank}]")]
        assert own == [f"line {number} of {rank}" for number in range(1, len(own) + 1)]
        counts.add(len(own))
    assert len(lines) == sum(int(line.startswith("[rank")) for line in lines)
    return max(counts)


def kernel_of(notebook: Notebook) -> int:
    """The process that ran the first cell."""
    text = notebook.cell(0).locator(".jp-OutputArea-output").inner_text()
    return int(text.removeprefix("kernel "))


def end(server: Jupyter) -> None:
    """The ranks of ``COUNTS`` come to their end."""
    (server.root / "enough").touch()


def is_killed(notebook: Notebook) -> None:
    os.kill(kernel_of(notebook), signal.SIGKILL)


def is_restarted(notebook: Notebook) -> None:
    """By the menu, while its cell waits for the job."""
    notebook.page.evaluate("() => void window.jupyterapp.commands.execute('kernelmenu:restart')")
    notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
    expect(notebook.page.locator(".jp-Dialog")).to_have_count(0)


def goes_on(view: Locator) -> None:
    """Its clock and its lines, now and not when something is opened anew in a minute."""
    time = view.locator(".td-time")
    said, lines = time.inner_text(), last_line(view)
    expect(time).not_to_have_text(said, timeout=10_000)
    comes_to(view, lines + 1, timeout=10_000)


def last_line(view: Locator) -> int:
    """The number of rank 1's last line in sight."""
    return max(int(number) for number in re.findall(r"line (\d+) of 1", view.inner_text()))


def paste(notebook: Notebook, number: int, source: str) -> None:
    """Into an empty cell, which is run then."""
    notebook.cell(number).locator(".cm-content").click()
    expect(notebook.cell(number).locator(".cm-focused")).to_be_visible()
    notebook.page.keyboard.insert_text(source)
    notebook.run(number)


def ends_by_itself(server: Jupyter, view: Locator) -> str:
    end(server)
    return "succeeded"


def cancel(view: Locator) -> None:
    """By its button, which asks."""
    view.get_by_role("button", name="Cancel", exact=True).click()
    view.get_by_role("button", name="Cancel job").click()


def is_cancelled(server: Jupyter, view: Locator) -> str:
    """In the view: no kernel knows of the job any more."""
    cancel(view)
    return "cancelled"


@FRONT_ENDS
def test_the_interrupt_button_cancels(front_end: str, server: Jupyter, page: Page) -> None:
    notebook = Notebook.open(page, server, front_end, server.write("stop.ipynb", LOAD, HANGS))
    notebook.kernel_ready()
    notebook.run(0)
    notebook.run(1)
    view = notebook.view(1)
    state_is(view, "running")
    expect(view).to_contain_text("asleep")
    page.get_by_role("button", name="Interrupt the kernel").first.click()
    state_is(view, "cancelled")
    expect(notebook.cell(1)).to_contain_text("KeyboardInterrupt")
    notebook.kernel_ready()
    assert wait_until(lambda: {job.state for job in catalog.jobs()} == {"cancelled"})
    notebook.picture("interrupted")
    assert not notebook.errors


@pytest.mark.parametrize(
    ("front_end", "the_kernel", "ends"),
    [
        ("lab", is_killed, ends_by_itself),
        pytest.param("lab", is_restarted, ends_by_itself, marks=pytest.mark.soak),
        pytest.param("notebook", is_restarted, is_cancelled, marks=pytest.mark.soak),
    ],
)
def test_a_page_is_reloaded_a_second_one_opened_and_the_kernel_goes(
    front_end: str,
    the_kernel: Callable[[Notebook], None],
    ends: Callable[[Jupyter, Locator], str],
    server: Jupyter,
    page: Page,
    browser: Browser,
) -> None:
    path = server.write("life.ipynb", LOAD, COUNTS, "")
    notebook = Notebook.open(page, server, front_end, path)
    notebook.kernel_ready()
    notebook.run(0)
    notebook.run(1)
    state_is(notebook.view(1), "running")
    comes_to(notebook.view(1), 5)

    notebook.dismiss("Kernel Restarting")
    page.on("dialog", lambda dialog: dialog.accept())  # "changes may not be saved"
    page.reload()
    view = notebook.view(1)
    state_is(view, "running")
    comes_to(view, 10)
    goes_on(view)
    expect(view.locator(".td-left")).to_be_hidden()
    before = is_whole(notebook, view)

    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    other = Notebook.open(context.new_page(), server, front_end, path)
    other.dismiss("Kernel Restarting")
    state_is(other.view(1), "running")
    comes_to(other.view(1), before + 1)
    assert is_whole(other, other.view(1)) > before

    page.bring_to_front()
    the_kernel(notebook)
    goes_on(view)
    comes_to(view, before + 40)
    state_is(view, "running")
    expect(view.locator(".td-left")).to_contain_text("No cell waits for the results.")
    notebook.picture("unawaited")
    state = ends(server, view)
    for seen in (notebook, other):
        seen.page.bring_to_front()
        state_is(seen.view(1), state)
    assert is_whole(notebook, view) == is_whole(other, other.view(1)) > before
    notebook.picture("after-all")
    if state == "succeeded":
        brings_its_results(notebook, view)
    context.close()
    assert not [*notebook.errors, *other.errors]


def brings_its_results(notebook: Notebook, view: Locator) -> None:
    """By the words of the view, as they stand there."""
    command = view.locator(".td-left code").inner_text()
    paste(notebook, 2, f"{command}\nprint('the last is', number > 20)")
    expect(notebook.cell(2)).to_contain_text("the last is True")


def test_cancelled_in_the_view_run_again_from_the_panel_and_open_after_a_reload(server: Jupyter, page: Page) -> None:
    notebook = Notebook.open(page, server, "lab", server.write("cancel.ipynb", LOAD, HANGS))
    notebook.kernel_ready()
    notebook.run(0)
    notebook.run(1)
    view = notebook.view(1)
    expect(view).to_contain_text("asleep", timeout=60_000)
    cancel(view)
    state_is(view, "cancelled")
    notebook.kernel_ready()
    expect(notebook.cell(1)).to_contain_text("JobCancelled")
    expect(view.get_by_role("button", name="Cancel", exact=True)).to_be_hidden()
    notebook.picture("cancelled")
    cancelled = catalog.jobs()[0]
    assert wait_until(lambda: not processes_of_job(cancelled.job))

    open_panel(page)
    page.locator(".td-row").hover()
    page.get_by_role("button", name=re.compile("Run .* again")).click()
    tab = page.locator(".td-main .td-view")
    state_is(tab, "running")
    expect(page.locator(".td-row")).to_have_count(2)
    expect(tab).to_contain_text("asleep", timeout=60_000)

    layout_is_saved(server)
    # Not page.reload(): the notebook that is named in the address takes the front at some time after the layout is
    # restored, and would hide the tab from the mouse that has just found it.
    page.goto(f"{server.url}lab?token={server.token}")
    state_is(tab, "running")
    expect(tab).to_contain_text("asleep", timeout=60_000)
    page.get_by_role("tab", name="Cell In[2]").click()
    expect(tab).to_be_visible()
    cancel(tab)
    state_is(tab, "cancelled")
    notebook.picture("restored")
    assert not notebook.errors


def layout_is_saved(server: Jupyter) -> None:
    """JupyterLab has written down which tabs are open."""

    def saved() -> bool:
        return any("torchdist-jobs:" in file.read_text() for file in server.workspaces.glob("*.jupyterlab-workspace"))

    assert wait_until(saved)
