"""The live view when the network, or the server, goes away and comes back."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Locator, Page, expect

from jupyter_torchdist.store.jobdir import taken_requests
from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook, jupyter
from tests.browser.network import Line, Talker, comes_to, free_port, line_to, talking
from tests.browser.test_life import cancel
from tests.browser.test_output import an_output
from tests.leaks import wait_until

BASE = "/user/someone/"
"""Where a server stands behind JupyterHub's proxy."""

CUT = 30.0
"""Seconds."""

LOST = "was lost"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def talker(running_job: FakeJob) -> Iterator[Talker]:
    with talking(running_job) as talker:
        yield talker


def remember_what_is_said(view: Locator) -> None:
    """What the view says of its connection, from now on; a short break is over before a test would see it."""
    view.evaluate(
        """view => {
            const said = (view.said = []);
            const bar = view.querySelector('.td-connection');
            new MutationObserver(() => said.push(bar.textContent)).observe(bar, {childList: true, subtree: true});
        }"""
    )


def what_was_said(view: Locator) -> str:
    return "\n".join(view.evaluate("view => view.said"))


def is_up_to_date(view: Locator, talker: Talker) -> None:
    """The view shows a line that was not written when this was called."""
    comes_to(view, talker.count + 1)


def lines_of(notebook: Notebook, view: Locator, rank: int) -> list[str]:
    said = [line.partition("] ") for line in notebook.log_lines(view)]
    return [text for who, _, text in said if who == f"[rank {rank}"]


def ends_whole(notebook: Notebook, view: Locator, job: FakeJob, talker: Talker) -> None:
    """The job ends; every line is there once, in order."""
    talker.stop()
    job.now = time.time()
    job.ended()
    expect(view.locator(".td-header .td-state")).to_have_text("succeeded", timeout=60_000)
    for rank in range(2):
        expect(view).to_contain_text(talker.said(rank)[-1])
        assert lines_of(notebook, view, rank) == talker.said(rank)
    expect(view.locator(".td-connection")).to_be_hidden()


@pytest.mark.soak
def test_behind_a_hub_the_view_outlives_resets_and_a_server_that_was_killed(
    page: Page, tmp_path: Path, running_job: FakeJob, talker: Talker
) -> None:
    job, port = running_job.spec.job, free_port()
    with jupyter(tmp_path / "jupyter", base_url=BASE, port=port) as server, line_to(server) as line:
        path = server.write("hub.ipynb", "pass", outputs={0: [an_output(job)]})
        notebook = Notebook.open(page, line.through(server), "lab", path)
        notebook.dismiss("Server Connection Error")
        view = notebook.view(0)
        is_up_to_date(view, talker)
        the_panel_and_the_download_work(page, view, talker)

        remember_what_is_said(view)
        line.reset()
        is_up_to_date(view, talker)
        assert LOST in what_was_said(view)

        server.process.kill()
        server.process.wait()
        # Its socket may not have been open again: requests stood in for it.
        gone = re.compile(f"{LOST}|server does not answer")
        expect(view.locator(".td-connection")).to_contain_text(gone, timeout=60_000)
        expect(page.locator(".td-panel-trouble")).to_be_visible()
        with jupyter(tmp_path / "jupyter", base_url=BASE, port=port):
            is_up_to_date(view, talker)
            expect(page.locator(".td-panel-trouble")).to_be_hidden(timeout=60_000)
            ends_whole(notebook, view, running_job, talker)
            expect(page.locator(".td-row")).to_contain_text("succeeded")
            notebook.picture("after-all")
    assert not notebook.errors


def the_panel_and_the_download_work(page: Page, view: Locator, talker: Talker) -> None:
    page.get_by_role("tab", name="Distributed Jobs").click()
    expect(page.locator(".td-row")).to_contain_text("running")
    with page.expect_download() as download:
        view.get_by_label("download a whole file").select_option("1.out")
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines
    assert lines == talker.said(1)[: len(lines)]


@pytest.mark.soak
def test_a_network_that_is_cut_for_half_a_minute(
    server: Jupyter, page: Page, running_job: FakeJob, talker: Talker
) -> None:
    path = server.write("cut.ipynb", "pass", outputs={0: [an_output(running_job.spec.job)]})
    with line_to(server) as line:
        notebook = Notebook.open(page, line.through(server), "lab", path)
        notebook.dismiss("Server Connection Error")
        view = notebook.view(0)
        is_up_to_date(view, talker)
        is_cut(line, view, notebook)
        is_up_to_date(view, talker)
        ends_whole(notebook, view, running_job, talker)
    assert not notebook.errors


def a_silent_kernel(server: Jupyter) -> str:
    """Name of a kernel that starts and says nothing, as one does whose imports take a minute."""
    spec = server.directory / "data" / "kernels" / "silent" / "kernel.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Silent", "language": "python"}))
    return spec.parent.name


def test_a_view_does_not_wait_for_a_kernel_that_is_starting(
    server: Jupyter, page: Page, running_job: FakeJob, talker: Talker
) -> None:
    """Chromium opens one socket after the other, and the kernel's takes as long as the kernel: up to a minute."""
    heard: set[str] = set()
    page.on("websocket", lambda socket: socket.on("framereceived", lambda _: heard.add(urlsplit(socket.url).path)))
    path = server.write("slow.ipynb", "pass", kernel=a_silent_kernel(server))
    with page.expect_websocket(lambda socket: "/channels" in socket.url):
        notebook = Notebook.open(page, server, "lab", path)
    page.get_by_role("tab", name="Distributed Jobs").click()
    page.get_by_role("button", name="Open Cell In[7]").click()
    view = page.locator(".td-main .td-view")
    is_up_to_date(view, talker)
    expect(view.locator(".td-header .td-state")).to_have_text("running")
    notebook.picture("a-kernel-starts")
    cancel(view)
    assert wait_until(lambda: [asked.kind for asked in taken_requests(running_job.paths)] == ["interrupt"])
    assert not [path for path in heard if path.endswith(("/channels", f"{running_job.spec.job}/feed"))], heard


def is_cut(line: Line, view: Locator, notebook: Notebook) -> None:
    """The whole time; the view finds it out by itself."""
    with line.cut():
        end = time.monotonic() + CUT
        expect(view.locator(".td-connection")).to_contain_text(LOST, timeout=1000 * CUT)
        notebook.picture("away")
        notebook.page.wait_for_timeout(max(0.0, 1000 * (end - time.monotonic())))
