"""What ranks, disks and other users may bring: nothing executes, nothing deceives, the page lives on and says why.

Each case has tests of its own further in (``test_feed_*``, the server's routes, vitest); here they meet a real page.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook
from tests.browser.test_output import an_output

MARKUP = "<script>window.hacked = 'script'</script><img src=x onerror=\"window.hacked = 'image'\">"

STILL = (
    f"<p>the still picture</p>{MARKUP}<svg onload=\"window.hacked = 'svg'\"></svg>"
    "<a href=\"javascript:window.hacked = 'link'\">a link</a>"
    "<iframe srcdoc=\"<script>parent.hacked = 'frame'</script>\"></iframe><p>its end</p>"
)
"""What somebody may have put into a saved notebook in place of the picture of a job."""

NUMBERS: list[Any] = [
    1.0,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    5e-324,
    "two",
    None,
    [1, 2],
    {"re": 1, "im": 2},
]


def a_log(step: Any, **values: Any) -> dict[str, Any]:
    return {"t": time.time(), "k": "log", "step": step, "v": values}


def bring_tab(view: Locator, name: str) -> Locator:
    view.get_by_role("tab", name=name).click()
    panel = view.get_by_role("tabpanel", name=name)
    expect(panel).to_be_visible()
    return panel


def lines_of(view: Locator) -> Locator:
    return bring_tab(view, "Logs").locator(".td-log-text")


@pytest.fixture
def hostile_job(home: Any) -> Any:
    """A job that runs, with markup wherever a user's words can stand."""
    source, named = f"# {MARKUP}\npass\n", Options(ranks=2, name=MARKUP)
    with FakeJob(now=time.time(), options=named, label=f"Cell In[1] {MARKUP}", source=source) as job:
        yield job.running()


def writes_hostile_output(job: FakeJob) -> None:
    job.rank(0).prints(
        f"{MARKUP}\nmoved \x1b[2J\x1b[10;10H\x1b[?1049h\x1b]0;another title\x07\x1b]8;;file:///\x07here\n"
    )
    job.rank(0).prints("nul \x00 byte, \u202edesrever\u202c\n")
    job.rank(1).prints(b"half " + "😀".encode()[:2])
    names = {MARKUP: 1.0, **{f"curve {number}": float(number) for number in range(5000)}}
    job.rank(0).records(
        *(a_log(step, odd=value) for step, value in enumerate(NUMBERS)),
        *(a_log(step, backwards=1.0) for step in (5, 4, -3, 2**70, "ten", None, 0.5)),
        a_log(0, **names),
        {"t": time.time(), "k": "progress", "desc": MARKUP, "n": math.nan, "total": math.inf},
    )


def test_what_ranks_write_is_text_and_numbers_are_any(server: Jupyter, page: Page, hostile_job: FakeJob) -> None:
    job = hostile_job
    writes_hostile_output(job)
    path = server.write("hostile.ipynb", "pass", outputs={0: [an_output(job.spec.job, html="")]})
    notebook = Notebook.open(page, server, "lab", path)
    view = notebook.view(0)
    expect(view).to_contain_text("running", timeout=20_000)

    lines = lines_of(view)
    expect(lines.filter(has_text=MARKUP)).to_have_count(1)
    expect(lines.filter(has_text="moved here")).to_have_count(1)
    expect(lines.filter(has_text="\\x00")).to_contain_text("nul \\x00 byte, \\u202edesrever\\u202c")
    expect(lines.filter(has_text="half")).to_have_count(1)
    job.rank(1).prints("😀".encode()[2:] + b" whole\n")
    expect(lines.filter(has_text="half 😀 whole")).to_have_count(1)

    curves = bring_tab(view, "Curves")
    expect(curves.get_by_role("listitem").first).to_be_visible()
    expect(curves).to_contain_text("the first 1000 are shown")
    for name in ("odd", "backwards", "script"):
        curves.get_by_label("Filter curves by name").fill(name)
        expect(curves.get_by_role("listitem")).to_have_count(1)
        expect(curves.locator("canvas")).to_be_visible()
    notebook.picture("curves")

    job.rank(0).prints(b"x" * 10_000_000 + b"\nafter the long line\n")
    lines = lines_of(view)
    expect(lines.filter(has_text="after the long line")).to_be_visible(timeout=30_000)
    expect(lines.filter(has_text="in all")).not_to_have_count(0)
    view.get_by_role("button", name="regular expression").click()
    for pattern in ("(x|xx)+!", "x.*x.*x.*=.*"):  # JavaScript's own would be at each of them for years
        view.get_by_label("search the lines").fill(pattern)
        expect(view.get_by_role("group", name="search")).to_contain_text("0 hits")
        expect(view.get_by_role("group", name="search")).not_to_contain_text("searching", timeout=30_000)
    view.get_by_label("search the lines").fill("")

    job.now = time.time()
    job.rank(1).failed(ValueError(MARKUP))
    job.ended("failed", MARKUP, 1)
    expect(view).to_contain_text("failed")
    for tab in ("Ranks", "Communication", "Receipt"):
        bring_tab(view, tab)
    page.get_by_role("tab", name="Distributed Jobs").click()
    page.locator(".td-row-open").click()
    expect(page.locator(".td-main")).to_contain_text(MARKUP)
    notebook.picture("all")
    assert page.evaluate("() => window.hacked") is None
    assert page.locator(":is(.td-view, .td-row) :is(img, script, iframe)").count() == 0
    assert "another title" not in page.title()
    assert not notebook.errors


def test_jobs_that_are_old_damaged_deleted_or_somebody_elses(server: Jupyter, page: Page, home: Any) -> None:
    old, damaged, deleted = (FakeJob(now=time.time(), label=f"Cell In[{number}]") for number in (1, 2, 3))
    old.tell("job.dreamt", about="sheep").running().tell("rank.levitated", "node0", 0, height=3)
    old.rank(0).prints("a line of an old job\n")
    for job in (damaged.running(), deleted.running()):
        job.close()
    damaged.paths.spec.write_text("{")
    outputs = {number: [an_output(job.spec.job, STILL)] for number, job in enumerate((old, damaged, deleted))}
    sockets: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    notebook = Notebook.open(page, server, "lab", server.write("odd.ipynb", "1", "2", "3", outputs=outputs))

    expect(notebook.view(0)).to_contain_text("running", timeout=20_000)
    expect(lines_of(notebook.view(0))).to_have_text("a line of an old job")

    expect(notebook.view(1)).to_contain_text("spec.json is damaged")
    expect(notebook.view(1)).to_contain_text("the still picture")
    expect(notebook.view(1)).to_contain_text("its end")
    expect(notebook.view(1).locator(".td-still img")).to_have_count(1)  # sanitised, not left out
    assert page.evaluate("() => window.hacked") is None
    assert notebook.view(1).locator("script, iframe, [onerror], [onload], [href^='javascript:']").count() == 0
    expect(notebook.view(1)).to_have_attribute("data-connection", "gone")

    expect(notebook.view(2)).to_contain_text("running")
    page.evaluate("job => window.jupyterapp.commands.execute('torchdist:open-job', {job})", deleted.spec.job)
    tab = page.locator(".td-main .td-view")
    expect(tab).to_contain_text("running")
    # As ``%dist rm`` does: renamed first, as an open view may be writing its mark.
    deleted.paths.root.rename(deleted.paths.root.with_name(".deleted"))
    for view in (tab, notebook.view(2)):
        expect(view).to_have_attribute("data-connection", "gone")
        expect(view).to_contain_text("What is below is what this page still has.")
    notebook.picture("gone")
    asked = len(sockets)

    # What another user's page would say to this server.
    page.context.clear_cookies()
    page.evaluate("() => Object.assign(window.jupyterapp.serviceManager.serverSettings, {token: 'of-another-user'})")
    page.evaluate("job => window.jupyterapp.commands.execute('torchdist:open-job', {job})", old.spec.job)
    refused = page.locator(".td-main .td-view").last
    expect(refused).to_have_attribute("data-connection", "gone")
    expect(refused).to_contain_text("sign in again")
    expect(refused).not_to_contain_text("a line of an old job")
    notebook.picture("refused")
    later = " ".join(sockets[asked:])
    for job in (damaged, deleted):
        assert job.spec.job not in later, "what is gone is not asked for again"
    old.close()
    assert not notebook.errors
