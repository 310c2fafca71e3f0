"""What a page and the processes behind it cost: tasks that froze it, from a key to what one sees, CPU time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright

from tests.browser.frontend import find_browser

PROBE = """
window.bench = {
  scripts: [], gaps: [], last: 0,
  clear() { this.scripts.length = this.gaps.length = this.last = 0; },
  /** Milliseconds from the latest `event` to the frame in which `seen()` is on the screen. */
  arm(event, seen) {
    let begun = Infinity;
    const note = event => { begun = event.timeStamp; };
    addEventListener(event, note, { capture: true });
    this.pending = new Promise((resolve, reject) => {
      const late = setTimeout(() => reject(new Error(`never seen: ${seen}`)), 60_000);
      const look = () => {
        if (begun === Infinity || !seen()) {
          requestAnimationFrame(look);
          return;
        }
        removeEventListener(event, note, { capture: true });
        clearTimeout(late);
        requestAnimationFrame(() => resolve(performance.now() - begun));
      };
      requestAnimationFrame(look);
    });
  }
};
new PerformanceObserver(list => {
  for (const frame of list.getEntries()) {
    const scripts = frame.scripts.filter(script => script.duration > 10);
    const name = script => `${script.sourceURL.split('/').pop().split('?')[0]} ${script.invoker} `
      + `${script.sourceFunctionName} ${Math.round(script.duration)} ms`;
    bench.scripts.push({ ms: frame.duration, layout: frame.startTime + frame.duration - frame.styleAndLayoutStart,
                         what: scripts.map(name).join(' + ') });
  }
}).observe({ type: 'long-animation-frame' });
const sample = now => {
  if (bench.last) {
    bench.gaps.push(now - bench.last);
  }
  bench.last = now;
  requestAnimationFrame(sample);
};
requestAnimationFrame(sample);
"""


LONG = 50.0
"""Milliseconds: a longer task delays what the user does (https://www.w3.org/TR/longtasks-1/)."""


@dataclass(frozen=True)
class Watched:
    """A stretch of a page's life. Milliseconds."""

    tasks: tuple[tuple[float, float], ...]
    """Of each task of a page's main thread: its processor time, and how long it was by the clock."""
    scripts: tuple[str, ...]
    """What ran in frames that took longer than 50 ms, the longest first."""
    gaps: tuple[float, ...]
    """Between two frames."""

    @property
    def long(self) -> list[float]:
        """Tasks of more than 50 ms of the processor's time, the longest first."""
        return sorted((busy for busy, _ in self.tasks if busy > LONG), reverse=True)

    @property
    def longest(self) -> float:
        return max((busy for busy, _ in self.tasks), default=0.0)

    def words(self) -> str:
        """For the note of a row."""
        gap = max(self.gaps, default=0.0)
        said = (
            f"longest distance between two frames {gap:.0f} ms, {1000 * len(self.gaps) / sum(self.gaps):.0f} a second"
        )
        waited = sorted((clock for _, clock in self.tasks if clock > LONG), reverse=True)
        said += f"; the longest task {self.longest:.0f} ms"
        if waited:
            said += f"; over 50 ms by the clock: {', '.join(f'{clock:.0f}' for clock in waited[:8])}"
        if self.scripts:
            said += f"; in the longest: {self.scripts[0]}"
        return said


@contextmanager
def browser_page() -> Iterator[Page]:
    """Debian's Chromium without a head, with the probe in every page."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=find_browser(), args=arguments)
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.add_init_script(PROBE)
        yield page
        browser.close()


@dataclass(frozen=True)
class Way:
    """How the browser can be made to give way; ``words`` say it."""

    words: str
    group: Path | None = None

    @contextmanager
    def given(self) -> Iterator[None]:
        """Within the block the browser takes only processor time that nobody else wants."""
        if self.group is None:
            yield
            return
        (self.group / "cpu.idle").write_text("1")
        try:
            yield
        finally:
            (self.group / "cpu.idle").write_text("0")


@contextmanager
def browser_gives_way() -> Iterator[Way]:
    """The browser can be made to take only time that nobody else wants, as if it were on another machine.

    A control group with ``cpu.idle`` (SCHED_IDLE for all in it, with whatever they start) does that; it is gone
    afterwards. Where none can be made, the browser gets the lowest weight there is: Linux shares time among sessions
    first (sched(7), autogroup), and the browser has several of its own.
    """
    group = _idle_group()
    if group is None:
        for process in _of_the_browser():
            with contextlib.suppress(psutil.Error, OSError):
                process.nice(19)
                Path(f"/proc/{process.pid}/autogroup").write_text("19")
        yield Way("the browser ran with nice 19, which still takes a little from everybody")
        return
    try:
        for process in _of_the_browser():
            _move(process.pid, group)
        words = "meanwhile the browser was given idle time only (a control group's cpu.idle), as if on another machine"
        yield Way(words, group)
    finally:
        while left := (group / "cgroup.procs").read_text().split():
            for pid in left:
                _move(int(pid), group.parent)
        group.rmdir()


def _of_the_browser() -> list[psutil.Process]:
    """Chromium, and Playwright's driver, which speaks to it."""
    named = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "chrom" in process.name() or process.name() == "node":
                named.append(process)
    return named


def _idle_group() -> Path | None:
    """A new control group below this process's own that has ``cpu.idle`` (cgroups(7)); None where there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        kind, wanted = ("cgroup", "cpu") if controllers else ("cgroup2", "")
        if wanted and wanted not in controllers.split(","):
            continue
        for mount in Path("/proc/mounts").read_text().splitlines():
            _, where, of, options, *_ = mount.split()
            if of != kind or (wanted and wanted not in options.split(",")):
                continue
            group = Path(where) / path.lstrip("/") / f"torchdist-bench-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                (group / "cpu.idle").write_text("0")
            except OSError:
                group.rmdir()
                continue
            return group
    return None


def _move(pid: int, group: Path) -> None:
    """The whole process, with its threads; one that has ended needs nothing."""
    with contextlib.suppress(OSError):
        (group / "cgroup.procs").write_text(str(pid))


@dataclass
class Watching:
    """``seen`` is there when the stretch has ended."""

    seen: Watched | None = None


@contextmanager
def watching(page: Page) -> Iterator[Watching]:
    """Watch the page within the block.

    Tasks come from the browser's own trace, with the processor's time of each: where ranks compute on all cores of this
    machine, a task also waits for a core, as it does not where the browser is on another.
    """
    browser = page.context.browser
    assert browser is not None
    events: list[dict[str, Any]] = []
    complete = threading.Event()
    line = browser.new_browser_cdp_session()
    line.on("Tracing.dataCollected", lambda part: events.extend(part["value"]))
    line.on("Tracing.tracingComplete", lambda _: complete.set())
    config = {"includedCategories": ["toplevel"], "excludedCategories": ["*"]}
    line.send("Tracing.start", {"transferMode": "ReportEvents", "traceConfig": config})
    page.evaluate("() => bench.clear()")
    watch = Watching()
    yield watch
    page.wait_for_timeout(100)  # observers are told a little later
    found = page.evaluate("() => ({ scripts: bench.scripts, gaps: bench.gaps })")
    line.send("Tracing.end")
    while not complete.is_set():
        page.wait_for_timeout(20)
    line.detach()
    frames = sorted(found["scripts"], key=lambda frame: frame["ms"], reverse=True)
    scripts = tuple(f"{frame['ms']:.0f} ms ({frame['layout']:.0f} of layout): {frame['what']}" for frame in frames)
    watch.seen = Watched(tuple(_tasks(events)), scripts, tuple(found["gaps"]))


def _tasks(events: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Of all pages' main threads, from a trace (the Trace Event Format: microseconds)."""
    mains = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    for event in events:
        if event["name"] == "ThreadControllerImpl::RunTask" and (event["pid"], event["tid"]) in mains:
            yield event.get("tdur", 0) / 1000, event.get("dur", 0) / 1000


def until_seen(page: Page, event: str, seen: str, act: Callable[[], object]) -> float:
    """Milliseconds from the last ``event`` of what ``act`` does to the frame in which ``seen`` (JavaScript) is true."""
    page.evaluate(f"() => bench.arm({event!r}, () => {seen})")
    act()
    return float(page.evaluate("() => bench.pending"))


def cpu(pid: int) -> float:
    """Seconds of CPU time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Usage:
    """CPU time of a process from now on."""

    pid: int

    def __post_init__(self) -> None:
        self._begun, self._before = time.monotonic(), cpu(self.pid)

    @property
    def seconds(self) -> float:
        return cpu(self.pid) - self._before

    @property
    def share(self) -> float:
        """Per cent of one core."""
        return 100 * self.seconds / (time.monotonic() - self._begun)


def settle(pids: list[int], share: float, timeout: float) -> float:
    """Wait until none of the processes uses more than ``share`` per cent of a core, for three seconds in a row.

    One may be a pause before the work has begun. Seconds until then.
    """
    begun, quiet = time.monotonic(), 0
    while quiet < 3 and time.monotonic() - begun < timeout:
        usages = [Usage(pid) for pid in pids]
        time.sleep(1.0)
        quiet = quiet + 1 if all(usage.share <= share for usage in usages) else 0
    return time.monotonic() - begun
