"""The widget: what VS Code, Colab and a JupyterLab without our extension show."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from jupyter_torchdist.store import catalog
from tests.browser import webview
from tests.browser.frontend import Jupyter, Notebook, jupyter
from tests.browser.test_access import check
from tests.browser.webview import Webview, ended
from tests.leaks import wait_until

BULK = 600_000
"""Characters that a rank prints first: more than a view is given when it opens."""

CELL = """\
%%distribute --ranks 2 --grace 2s
import os, time
import jupyter_torchdist as td
rank = int(os.environ["RANK"])
print("needle of rank", rank)
for line in range({bulk} // 100):
    print("x" * 99)
for step in range({steps}):
    print("step", step, "of rank", rank, flush=True)
    td.log(step=step, loss=1 / (step + 1))
    time.sleep(0.1)
"""
STEP = re.compile(r"step \d+ of rank 1")
LONG, SHORT = CELL.format(bulk=BULK, steps=3000), CELL.format(bulk=BULK, steps=5)


@pytest.fixture(scope="module")
def lasting_server(
    browser: Browser, lasting_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Jupyter]:
    """A server whose JupyterLab has not our extension, and which has the page that stands for VS Code."""
    directory, static = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("static")
    config = directory / "config" / "labconfig"
    config.mkdir(parents=True)
    (config / "page_config.json").write_text(json.dumps({"disabledExtensions": {"jupyter-torchdist": True}}))
    with jupyter(directory, webview.build(static)) as started:
        yield started


def cancel(view: Locator, away: Callable[[], object] = lambda: None) -> None:
    """``away`` is done while the question is open, which does not close it."""
    view.get_by_role("button", name="Cancel", exact=True).click()
    away()
    view.get_by_role("button", name="Cancel job", exact=True).click()


def find(view: Locator, words: str) -> None:
    """Search in the log; what is found is brought into sight: by itself, where it was printed before the search."""
    view.get_by_role("tab", name="Logs").click()
    view.get_by_label("search the lines").fill(words)
    expect(view.get_by_role("group", name="search").get_by_role("status")).to_contain_text(
        re.compile("1 (of 1|hit)"), timeout=60_000
    )
    view.get_by_label("search the lines").press("Enter")
    expect(view.get_by_role("row").filter(has_text=words).first).to_be_visible(timeout=60_000)


def answers_while_the_cell_blocks(
    notebook: Webview | Notebook,
    view: Locator,
    again: Callable[[], object],
    away: Callable[[], object] = lambda: None,
) -> None:
    """Live lines, a view that opens in the middle, a question that only the kernel can answer, curves, cancel."""
    view.get_by_role("tab", name="Logs").click()
    expect(view).to_contain_text(STEP, timeout=30_000)
    again()
    view.get_by_role("tab", name="Logs").click()
    expect(view).to_contain_text(STEP, timeout=60_000)
    notebook.picture("running")
    find(view, "needle of rank 1")
    notebook.picture("search")
    view.get_by_role("tab", name="Curves").click()
    expect(view.locator("canvas").first).to_be_visible()
    notebook.picture("curves")
    assert catalog.jobs()[0].state == "running"
    cancel(view, away)
    expect(view).to_contain_text("cancelled", timeout=60_000)
    notebook.picture("cancelled")


def test_vscode_and_a_kernel_that_dies_in_it(server: Jupyter, page: Page) -> None:
    notebook = Webview(page, server, "dark")
    kernel = int(notebook.value("import os; print(os.getpid())"))
    cell = notebook.run(LONG)
    view = cell.locator(".td-view")
    expect(view).to_have_css("color", "rgb(204, 204, 204)", timeout=30_000)
    expect(view.locator(".td-header .td-state[data-tone=running]")).to_have_css(
        "color", "rgb(108, 176, 255)", timeout=30_000
    )
    check(page, "a page like VS Code's", ".td-view")
    answers_while_the_cell_blocks(notebook, view, lambda: page.evaluate("notebook.again()"))
    ended(cell)

    view = notebook.run(LONG).locator(".td-view")
    view.get_by_role("tab", name="Logs").click()
    expect(view).to_contain_text(STEP, timeout=30_000)
    job = max(summary.job for summary in catalog.jobs())
    os.kill(kernel, signal.SIGKILL)
    said = view.locator(".td-connection")
    expect(said).to_contain_text("The kernel does not answer", timeout=30_000)
    expect(said).to_contain_text(f"torchdist cancel {job}")
    expect(view).to_contain_text(STEP)
    notebook.picture("dead")
    subprocess.run([Path(sys.executable).parent / "torchdist", "cancel", job], check=True)
    assert wait_until(lambda: {summary.state for summary in catalog.jobs()} == {"cancelled"})
    assert not notebook.errors


def test_colab_has_no_buffers(server: Jupyter, page: Page) -> None:
    notebook = Webview(page, server, colab=True)
    cell = notebook.run(SHORT)
    view = cell.locator(".td-view")
    expect(view).to_contain_text("succeeded", timeout=30_000)
    find(view, "step 4 of rank 1")
    view.get_by_label("download a whole file").select_option("1.out")
    name = f"{catalog.jobs()[0].job}-1.out.txt"
    page.wait_for_function("name => name in notebook.saved", arg=name, timeout=30_000)
    check(page, "a page like Colab's", ".td-view")
    lines = page.evaluate("name => notebook.saved[name]", name).splitlines()
    steps = [f"step {step} of rank 1" for step in range(5)]
    assert lines == ["needle of rank 1", *["x" * 99] * (BULK // 100), *steps]
    ended(cell)
    assert not notebook.errors


def test_lab_without_our_extension(server: Jupyter, page: Page) -> None:
    path = server.write("widget.ipynb", "%load_ext jupyter_torchdist", LONG)
    notebook = Notebook.open(page, server, "lab", path)
    notebook.kernel_ready()
    notebook.run(0)
    notebook.run(1)
    view = notebook.view(1)
    expect(view).to_contain_text("running", timeout=30_000)

    answers_while_the_cell_blocks(notebook, view, lambda: None, lambda: the_output_is_drawn_anew(notebook.cell(1)))
    expect(notebook.cell(1).locator(".jp-InputPrompt").first).not_to_have_text("[*]:", timeout=60_000)

    page.get_by_role("button", name="Save and create checkpoint").first.click()
    assert wait_until(lambda: "cancelled" in saved_picture(server.root / path))
    page.reload()
    expect(view).to_contain_text("cancelled", timeout=60_000)
    find(view, "needle of rank 0")
    notebook.picture("reloaded")
    assert not notebook.errors


def the_output_is_drawn_anew(cell: Locator) -> None:
    """JupyterLab makes another place for the widget with the next picture; what stands in it is the same view."""
    place = cell.locator(".td-output-view").evaluate_handle("view => view.parentElement")
    cell.page.wait_for_function("place => !place.isConnected", arg=place, timeout=30_000)
    expect(cell.locator(".td-view")).to_contain_text("Cancel this job?")
    expect(cell.get_by_role("tab", name="Curves")).to_have_attribute("aria-selected", "true")


def saved_picture(path: Path) -> str:
    """The still picture of the second cell, as the notebook has it; empty while that is being written."""
    try:
        outputs = nbformat.read(path, 4).cells[1].outputs
    except nbformat.reader.NotJSONError:
        return ""
    return "".join(output.data["text/html"] for output in outputs if output.output_type == "display_data")
