"""How the view behaves in a real browser over a real server: never frozen, soon there, cheap for whom it watches.

Measured after JupyterLab's own start. ``TORCHDIST_BENCH_PART`` (0 to 1) has everything smaller, while one works on it.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from playwright.sync_api import Locator, Page, expect

import jupyter_torchdist
from jupyter_torchdist.testing import FakeJob
from tests.benchmarks.report import Row, in_random_order, median
from tests.benchmarks.stage import STAMP, Stage
from tests.benchmarks.watching import (
    Usage,
    Watched,
    Watching,
    browser_gives_way,
    browser_page,
    settle,
    until_seen,
    watching,
)
from tests.browser.frontend import Jupyter, Notebook, jupyter

PART = float(os.environ.get("TORCHDIST_BENCH_PART", "1"))
RANKS, CURVES = 8, 20
LINES, POINTS, JOBS, PRINTED = (int(PART * whole) for whole in (125_000, 100_000, 1000, 100_000))
"""Lines and points are of each rank."""
LIVE = 10.0 * max(PART, 0.3)
"""Seconds before each of two tabs."""
PAINTS, PRINTS, SEARCHES = 9, 31, 5

WORDS = {"one line in a thousand": "checkpoint", "the oldest line of each rank": "needle"}

BEGIN = """\
%load_ext jupyter_torchdist
import os, pathlib
pathlib.Path({marks!r}, "kernel").write_text(str(os.getpid()))
"""

FULL = f"""%%distribute --ranks {RANKS}
import math, random
import jupyter_torchdist as td

rank = int(os.environ["RANK"])
names = [f"curve/{{name:02d}}" for name in range({CURVES})]

def say(i):
    note = " needle" if i == 0 else " checkpoint" if i % 1000 == 0 else ""
    print(f"rank {{rank}} step {{i:06d}} loss {{1 / (1 + i):.6f}}{{note}}")

def draw(i):
    td.log(step=i, **{{name: math.exp(-i / {POINTS}) + random.random() for name in names}})

def at_pace(seconds, updates, act):
    begun = time.monotonic()
    for update in range(updates):
        act(update)
        time.sleep(max(0.0, begun + (update + 1) * seconds / updates - time.monotonic()))

def wait_for(name):
    while not pathlib.Path(marks, name).exists():
        time.sleep(0.05)

for i in range({POINTS}):
    draw(i)
stamp("drawn")
wait_for("print")
each = {LINES} // 1000
at_pace({max(PART, 0.05) * 20}, 1000, lambda update: [say(update * each + i) for i in range(each)])
stamp("printed")
wait_for("live")
i = 0
while not pathlib.Path(marks, "stop").exists():
    say({LINES} + i)
    draw({POINTS} + i)
    i += 1
    time.sleep(0.02)
stamp(f"updates-{{i}}")
"""

PAINT = "%%distribute --ranks 2\ntime.sleep(0.5)"

PRINT = f"""%%distribute --ranks 2{{options}}
rank = int(os.environ["RANK"])
time.sleep(0.3)  # the view is there, and what the launch leaves to do is over
stamp("begin")
computed = time.thread_time()
for i in range({PRINTED}):
    print(f"rank {{{{rank}}}} step {{{{i:06d}}}} loss {{{{i * 0.001:.4f}}}}")
stamp("computed", time.thread_time() - computed)
stamp("end")
time.sleep(1)
"""


@dataclass
class Printed:
    """One run of ``PRINT``, in seconds: the slower rank's loop by the clock, and how much of it that rank computed."""

    took: float
    computed: float
    kernel: float
    """Of a core, from the key to the last line."""
    server: float

    @property
    def away(self) -> float:
        """The rank waited, for a core or for the disk."""
        return self.took - self.computed


def rows() -> Iterator[Row]:
    yield from bundle()
    yield from panel()
    yield from first_paint()
    yield from printing()
    yield from full_view("server")
    yield from full_view("kernel")


@dataclass
class Scene:
    """A Jupyter server over a stage of its own, and a page."""

    stage: Stage
    server: Jupyter
    page: Page

    @staticmethod
    @contextlib.contextmanager
    def open() -> Iterator[Scene]:
        with (
            Stage.open() as stage,
            mock.patch.dict(os.environ, stage.environ),
            jupyter(stage.root / "jupyter") as server,
            browser_page() as page,
        ):
            yield Scene(stage, server, page)

    def notebook(self, name: str, *cells: str) -> Notebook:
        """A notebook whose first two cells have run: the extension is loaded, everything is warm."""
        stamp = STAMP.format(marks=str(self.stage.marks)) + f"\nmarks = {str(self.stage.marks)!r}\n"
        first = BEGIN.format(marks=str(self.stage.marks)) + stamp
        path = self.server.write(name, first, "%%distribute --ranks 2\nstamp('warm')", *cells)
        notebook = Notebook.open(self.page, self.server, "lab", path)
        notebook.kernel_ready()
        notebook.run(0)
        self.wait_for("kernel")
        notebook.run(1)
        self.wait_for("warm-1")
        notebook.kernel_ready()
        time.sleep(3)  # JupyterLab goes on loading parts of itself
        return notebook

    def wait_for(self, mark: str, timeout: float = 300) -> Path:
        """Until somebody was there."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if found := list(self.stage.marks.glob(mark)):
                return found[0]
            time.sleep(0.05)
        raise AssertionError(f"nobody was at {mark!r} within {timeout:.0f} s")

    def wait_for_all(self, mark: str, ranks: int) -> None:
        for rank in range(ranks):
            self.wait_for(f"{mark}-{rank}")

    def signal(self, mark: str) -> None:
        """What the ranks wait for."""
        (self.stage.marks / mark).touch()

    @property
    def kernel(self) -> int:
        return int((self.stage.marks / "kernel").read_text())


# ---- small things


def bundle() -> Iterator[Row]:
    """What a widget's front end loads."""
    static = Path(jupyter_torchdist.__file__).parent / "static"
    size = sum(len(gzip.compress(file.read_bytes(), 9)) for file in static.iterdir())
    yield Row("browser", "widget bundle (script and style), gzipped", size / 1000, "kB", 200)


def panel() -> Iterator[Row]:
    """A click on the side bar's tab with many jobs."""
    took = []
    with Scene.open() as scene:
        now = time.time()
        for number in range(JOBS):
            state = ("succeeded", "failed", "cancelled")[number % 3]
            with FakeJob(scene.stage.home, now=now - number * 60, label=f"Cell In[{number}]") as job:
                job.rank(0).records({"t": now, "k": "log", "step": 1, "v": {"loss": 0.5}})
                job.running().ended(state, "rank 0 failed" if state == "failed" else "")
        page = scene.page
        for _ in range(SEARCHES):
            Notebook.open(page, scene.server, "lab", scene.server.write("panel.ipynb", "pass"))
            time.sleep(4)
            tab = page.get_by_role("tab", name="Distributed Jobs")
            seen = f"document.querySelectorAll('.td-row').length >= {min(JOBS, 200)} \
                && document.querySelector('.td-panel-count').textContent.startsWith('{JOBS} job') \
                && document.querySelector('.td-row').getBoundingClientRect().height > 0"
            took.append(until_seen(page, "pointerdown", seen, tab.click))
            tab.click()
    yield Row("browser", f"the panel with {JOBS:,} jobs opens", median(took), "ms", 500, samples=tuple(took))


# ---- short cells


def first_paint() -> Iterator[Row]:
    """From the key that runs a cell to the job's state on the screen."""
    paints = []
    with Scene.open() as scene:
        notebook = scene.notebook("paint.ipynb", PAINT)
        seen = "[...document.querySelectorAll('.td-view[data-connection=live]:not(.before)')]\
            .some(view => /starting|running|succeeded/.test(view.innerText))"
        for _ in range(PAINTS):
            scene.page.evaluate(
                "() => document.querySelectorAll('.td-view').forEach(view => view.classList.add('before'))"
            )
            focus(notebook, 2)
            paints.append(until_seen(scene.page, "keydown", seen, lambda: scene.page.keyboard.press("Control+Enter")))
            notebook.kernel_ready()
            time.sleep(0.5)
    yield Row(
        "browser", "Ctrl+Enter → the job's view with its state is on the screen", median(paints), "ms", 300,
        samples=tuple(paints),
    )  # fmt: skip


def focus(notebook: Notebook, cell: int) -> None:
    """JupyterLab makes a cell ready to be edited (for 0.1 s and more)."""
    notebook.cell(cell).locator(".cm-content").click()
    time.sleep(0.7)


def printing() -> Iterator[Row]:
    """Lines at full speed, under a view and without one.

    What a view can take from a rank is a core, so the time that the rank waited is compared, on top of what the loop
    computes. By the clock alone runs differ by a half, as the machine computes now faster, now slower: 21 medians of
    either side were 4 % apart in either direction.
    """
    with Scene.open() as scene:
        notebook = scene.notebook("lines.ipynb", PRINT.format(options=""), PRINT.format(options=" --watch off"))
        frozen: list[Watched] = []
        viewed: list[Printed] = []
        plain: list[Printed] = []
        for _ in range(PAINTS):
            with watching(scene.page) as watch:
                print_lines(scene, notebook, 2)
            frozen.append(seen_in(watch))
        with browser_gives_way() as way:
            in_random_order(
                PRINTS,
                lambda: viewed.append(print_lines(scene, notebook, 2, way.given())),
                lambda: plain.append(print_lines(scene, notebook, 3, way.given())),
            )
    loop = median([run.computed for run in viewed + plain])
    took = [median([run.took for run in runs]) for runs in (viewed, plain)]
    kernel, server = (1000 * median(times) for times in zip(*((run.kernel, run.server) for run in viewed), strict=True))
    yield Row(
        "browser", f"2 × {PRINTED:,} lines printed under an open view: the ranks' loop and what it waited",
        loop + median([run.away for run in viewed]), "s", 1.02, loop + median([run.away for run in plain]),
        "the same cell in the same notebook with --watch off: nothing is shown or read",
        samples=tuple(run.away for run in viewed), yardsticks=tuple(run.away for run in plain),
        note=f"the loop computes {loop:.3g} s (median of both sides); its samples are what a rank waited besides, for "
        f"a core or the disk; by the clock, medians, {took[0]:.3g} s and {took[1]:.3g} s; from the key to the last "
        f"line the kernel used {kernel:.0f} ms of a core and the server {server:.0f} ms; {way.words}",
    )  # fmt: skip
    yield never_frozen("…from the key to the last line", *frozen)


def print_lines(
    scene: Scene, notebook: Notebook, cell: int, meanwhile: contextlib.AbstractContextManager[None] | None = None
) -> Printed:
    """``meanwhile`` is in force while the lines are printed."""
    focus(notebook, cell)
    usages = [Usage(pid) for pid in (scene.kernel, scene.server.process.pid)]
    scene.page.keyboard.press("Control+Enter")
    with meanwhile or contextlib.nullcontext():
        scene.wait_for_all("end", 2)
    kernel, server = (usage.seconds for usage in usages)
    notebook.kernel_ready()
    ranks = zip(*(scene.stage.stamps(name) for name in ("begin", "end", "computed")), strict=True)
    took, computed = max((end - begin, computed) for begin, end, computed in ranks)
    return Printed(took, computed, kernel, server)


# ---- everything at once


def full_view(door: str) -> Iterator[Row]:
    """A million lines, sixteen million points, then 50 updates a second of each rank, before two tabs.

    ``door``: who feeds the view. The kernel does where the server does not see the job's files.
    """
    with Scene.open() as scene:
        cells = [FULL]
        if door == "kernel":
            cells[0:0] = [f"os.environ['TORCHDIST_HOME'] = {str(scene.stage.root / 'elsewhere')!r}"]
        notebook = scene.notebook("full.ipynb", *cells)
        if door == "kernel":
            notebook.run(2)
            notebook.kernel_ready()
        cell = len(cells) + 1
        notebook.run(cell)
        view = notebook.view(cell).locator("visible=true")
        expect(view).to_contain_text("running", timeout=60_000)
        scene.wait_for_all("drawn", RANKS)
        caught_up = settle([scene.kernel, scene.server.process.pid], 8, 120)
        print(f"    all curves read after {caught_up:.0f} s more", flush=True)
        view.get_by_role("tab", name="Logs").click()
        time.sleep(1)
        with watching(scene.page) as watch:
            scene.signal("print")
            scene.wait_for_all("printed", RANKS)
            time.sleep(1)
        yield never_frozen(f"{RANKS * LINES:,} lines in 20 s into an open view, fed by the {door}", seen_in(watch))
        yield from searches(notebook, view, f"that the browser holds, fed by the {door}")
        yield from live(scene, view, door)
        scene.signal("stop")
        notebook.kernel_ready()
        time.sleep(1)
        scene.page.keyboard.press("Control+s")
        time.sleep(3)
        size = (scene.server.root / "full.ipynb").stat().st_size / 1000
        yield Row("browser", f"…the saved notebook, fed by the {door}", size, "kB", 300)
        if door == "server":
            scene.page.reload()
            scene.page.wait_for_selector(".td-view[data-connection='live']", timeout=60_000)
            time.sleep(5)
            # JupyterLab hides cells far away.
            notebook.cell(cell).evaluate("cell => cell.scrollIntoView({ block: 'end' })")
            again = notebook.view(cell).locator("visible=true")
            click(again.get_by_role("tab", name="Logs"))
            time.sleep(2)
            yield from searches(notebook, again, "most of which are on disk alone, after a reload")


def live(scene: Scene, view: Locator, door: str) -> Iterator[Row]:
    """Before the logs, where all ranks, one and all again are chosen, and before the curves."""
    page = scene.page
    scene.signal("live")
    time.sleep(1)
    seen: list[Watched] = []
    shares: list[str] = []
    kernel = server = 0.0
    for tab in ("Logs", "Curves"):
        click(view.get_by_role("tab", name=tab))
        time.sleep(1)
        with watching(page) as watch:
            usages = Usage(scene.kernel), Usage(scene.server.process.pid)
            for part in (view.get_by_label("rank 3"), view.get_by_label("All: all ranks")) if tab == "Logs" else ():
                click(part)
                time.sleep(LIVE / 4)
            time.sleep(LIVE / 2 if tab == "Logs" else LIVE)
            kernel_share, server_share = (usage.share for usage in usages)
        seen.append(seen_in(watch))
        kernel, server = max(kernel, kernel_share), max(server, server_share)
        shares.append(f"{tab}: kernel {kernel_share:.1f} %, server {server_share:.1f} %")
    about = f"50 updates/s of {RANKS} ranks ({CURVES} curves of {POINTS:,} points each), fed by the {door}"
    yield never_frozen(about, *seen)
    yield Row(
        "browser",
        f"…the kernel meanwhile, where the view is fed by the {door}",
        kernel,
        "% of a core",
        10,
        note="; ".join(shares),
    )


def searches(notebook: Notebook, view: Locator, where: str) -> Iterator[Row]:
    """From the last key to the number of hits, which grows while the search goes on."""
    page = notebook.page
    box = view.get_by_label("search the lines")
    seen = "[...document.querySelectorAll(\".td-logs-group[aria-label='search'] .td-logs-said\")].some(said => \
        /^[1-9].* (hit|of )/.test(said.textContent))"
    for kind, word in WORDS.items():
        took = []
        for _ in range(SEARCHES):
            box.click()
            took.append(until_seen(page, "keydown", seen, lambda word=word: page.keyboard.type(word)))  # type: ignore[misc]
            page.keyboard.press("Escape")
            time.sleep(0.3)
        yield Row(
            "browser", f"search over {RANKS * LINES:,} lines {where} ({kind}): last key → first hits",
            median(took), "ms", 200, samples=tuple(took),
        )  # fmt: skip


def click(element: Locator) -> None:
    """Without a pointer: JupyterLab has work of its own with one."""
    element.evaluate("element => element.click()")


def seen_in(watch: Watching) -> Watched:
    assert watch.seen is not None
    return watch.seen


def never_frozen(when: str, *stretches: Watched) -> Row:
    """No task of more than 50 ms of the processor's time, of anybody's."""
    tasks = [task for stretch in stretches for task in stretch.long]
    worst = max(stretches, key=lambda stretch: stretch.longest)
    return Row("browser", f"{when}: tasks over 50 ms", len(tasks), "tasks", 0, note=worst.words())
