"""How a job is shown while the cell waits for it: a live view, one updating picture, plain lines, or nothing.

The cell has one output with several MIME types; each front end shows the best one that it knows: the job type (our
JupyterLab extension asks the server), the widget (asks this kernel), the still picture as HTML and as text. The
waiting loop draws the picture, so that it appears under the waiting cell.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..protocol.feed import MIME_TYPE
from ..protocol.paths import JobPaths
from ..protocol.state import JobState
from ..store import logs, presence, tracking
from ..store.screen import Screen
from ..store.segments import Log
from ..store.tail import line_after
from ..verbs import ansi
from ..verbs.stream import Console
from .curves import Curves
from .rich import RichOutput
from .snapshot import LINES_OF_A_RANK, Line, Snapshot, as_html, as_text

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .widget import Live

FRAME = 0.15
"""Seconds between two updates of the picture; the first change after a quiet time is drawn at once."""
BESIDE = 0.5
"""Like ``FRAME``, if the front end may show the widget instead of the picture."""
BEHIND = 5.0
"""Like ``FRAME``, while a live view is open: then the picture only matters for the saved notebook."""
SHARE = 50
"""Drawing takes at most 1/``SHARE`` of the time: the picture of many ranks is drawn less often."""
LOOK = 0.05
"""Seconds between two checks for something new to draw."""
CLOCK = 1.0
"""Seconds after which an unchanged picture is drawn again, to update its elapsed time."""
TAIL = 16 * 1024
TEXT_LIMIT = 32_000_000
"""The largest number of characters that ``--watch text`` prints in one cell: the notebook stores all of them."""


class Watch(Protocol):
    """The interface that the cell's waiting loop calls."""

    def tick(self, state: JobState) -> None: ...

    def finish(self, state: JobState, remarks: tuple[str, ...]) -> None: ...


def is_notebook(ip: InteractiveShell) -> bool:
    """Whether the front end can update its output; a plain terminal cannot."""
    return getattr(ip, "kernel", None) is not None


def limit(ip: InteractiveShell) -> int | None:
    """The largest number of characters of lines below one cell; None for all."""
    return TEXT_LIMIT if is_notebook(ip) else None


def watch(ip: InteractiveShell, paths: JobPaths, how: str, rich: RichOutput, notes: tuple[str, ...] = ()) -> Watch:
    """The watch that ``--watch`` names; ``full`` and ``compact`` fall back to ``text`` in a plain terminal.

    ``notes`` are the notes of the capture.
    """
    if how == "off":
        return Silence(rich)
    if how == "text" or not is_notebook(ip):
        return Text(Console(paths, limit=limit(ip)), rich, notes)
    return Picture(ip, paths, rich, notes, full=how == "full")


def ready(ip: InteractiveShell) -> Any:
    """The module of the widget, if a widget can be shown, else None."""
    if not importlib.util.find_spec("anywidget") or getattr(ip, "kernel", None) is None:
        return None
    try:
        module = importlib.import_module(".widget", __package__)
    except ImportError:  # a dependency is missing: the other forms do not need it
        return None
    return module if module.possible(ip) else None


class Silence:
    """Shows nothing but the cell's result or exception."""

    def __init__(self, rich: RichOutput) -> None:
        self._rich = rich

    def tick(self, state: JobState) -> None:
        """Read rank 0's rich output, which contains the result."""
        self._rich.tick(state)

    def finish(self, state: JobState, remarks: tuple[str, ...]) -> None:
        """Read the last rich output and show nothing."""
        self._rich.tick(state)


class Text:
    """Plain lines with the rank in front, as they are written."""

    def __init__(self, console: Console, rich: RichOutput, notes: tuple[str, ...] = ()) -> None:
        self._console = console
        self._rich = rich
        for note in notes:
            print(f"note: {note}", flush=True)

    def tick(self, state: JobState) -> None:
        """Print the new lines, publish the new rich output."""
        self._console.tick(state)
        self._rich.tick(state)

    def finish(self, state: JobState, remarks: tuple[str, ...]) -> None:
        """Print the rest of the output, and remarks on the results."""
        self._console.finish(state, time.time())
        self._rich.tick(state)
        for remark in remarks:
            print(remark, flush=True)


class Picture:
    """One output that is updated while the job runs and shows the last state afterwards."""

    def __init__(
        self, ip: InteractiveShell, paths: JobPaths, rich: RichOutput, notes: tuple[str, ...] = (), full: bool = False
    ) -> None:
        """``full``: with the MIME types of the live views."""
        self._publisher: Any = ip.display_pub
        self._paths = paths
        self._rich = rich
        self._notes = notes
        self._tails = Tails(paths)
        self._curves = Curves(paths)
        self._job = {MIME_TYPE: {"job": paths.job, "host": socket.gethostname()}} if full else {}
        module = ready(ip) if full else None
        self._live: Live | None = module.Live(ip.kernel, paths, self._without_widget) if module else None  # type: ignore[attr-defined]
        self._id = f"torchdist-{paths.job}"
        self._published = False
        self._drawn = self._looked = 0.0
        self._cost = 0.0
        """Seconds that the last drawing took."""
        self._lock = threading.Lock()
        """Held while the output is updated: another thread may remove the widget, which must not reappear."""
        self._seen: object = None
        self._stage: object = None
        self._last: dict[str, Any] = {}

    def tick(self, state: JobState) -> None:
        """Draw changes, but not more often than the front end needs; draw a new stage of the job at once."""
        if self._rich.tick(state):
            self._published = False
            self._draw(state)
        stage = (bool(state.failures()), state.state if self._job else "")
        now = time.monotonic()
        waited = now - self._drawn
        if stage == self._stage and now - self._looked < LOOK:
            return
        self._looked = now
        if self._live:
            self._live.tick()
        if stage == self._stage and waited < self._frame():
            return
        seen = (state.seq, self._tails.poll(), self._curves.poll())
        if seen != self._seen or waited > CLOCK:
            self._seen, self._stage = seen, stage
            self._draw(state)

    def finish(self, state: JobState, remarks: tuple[str, ...]) -> None:
        """Draw the still picture that is saved with the notebook."""
        self._rich.tick(state)
        self._tails.poll()
        self._curves.read_to_end()
        self._draw(state, remarks)

    def _frame(self) -> float:
        least = BESIDE if self._live else FRAME
        if self._job and presence.watched(self._paths):
            least = BEHIND
        return max(least, SHARE * self._cost)

    def _draw(self, state: JobState, remarks: tuple[str, ...] = ()) -> None:
        began = time.monotonic()
        curves, said = self._curves, (*tracking.lines(self._paths), *self._notes, *remarks)
        snapshot = Snapshot(state, time.time(), self._tails.lines(), curves.last, curves.progress, said, curves.traces)
        text = as_text(snapshot)
        picture = {**self._job, "text/html": as_html(snapshot), "text/plain": text}
        if self._live:
            self._live.show({**self._job.get(MIME_TYPE, {}), "state": state.state, "text": text})
        with self._lock:
            self._last = picture
            self._publish({**picture, **(self._live.forms if self._live else {})}, self._published)
            self._published = True
        self._drawn = time.monotonic()
        self._cost = self._drawn - began

    def _publish(self, bundle: dict[str, Any], update: bool) -> None:
        self._publisher.publish(bundle, transient={"display_id": self._id}, update=update)

    def _without_widget(self) -> None:
        """Publish the output without the widget, which is about to close; front ends then show the picture."""
        with self._lock:
            if self._last:
                self._publish(self._last, True)


class Tails:
    """The last lines of each rank, read again only if the file's size changed."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._known: dict[Path, tuple[int, logs.LogFile, list[Line]]] = {}

    def poll(self) -> tuple[int, ...]:
        """Read files that changed. Returns the files' sizes in bytes, which differ if a line may have changed."""
        sizes = []
        for file in logs.files(self._paths):
            size = file.path.stat().st_size
            sizes.append(size)
            known = self._known.get(file.path)
            if size and (known is None or known[0] != size):
                self._known[file.path] = (size, file, _last_lines(Log(file, self._paths), size))
        return tuple(sizes)

    def lines(self) -> dict[int, list[Line]]:
        """Rank -> lines by time: of stderr at most half if stdout has enough."""
        streams: dict[int, dict[str, list[Line]]] = {}
        for _, file, lines in self._known.values():
            streams.setdefault(file.rank, {})[file.stream] = lines
        found = {}
        for rank, by_stream in streams.items():
            errors, out = by_stream.get("err", []), by_stream.get("out", [])
            kept = errors[-max(LINES_OF_A_RANK // 2, LINES_OF_A_RANK - len(out)) :]
            first = max(0, len(out) - (LINES_OF_A_RANK - len(kept)))
            found[rank] = sorted([*out[first:], *kept], key=lambda line: line[0])
        return found


def _last_lines(log: Log, size: int) -> list[Line]:
    start = line_after(log, max(0, size - TAIL))
    screen = Screen()
    found: list[Line] = []
    for segment in log.segments(start, log.read(start, size), rest=True):
        text = screen.write(logs.decode(segment.data))
        found += [(segment.t or 0.0, ansi.fold(line)) for line in text.split("\n")[:-1]]
    newest = log.written(size) or 0.0
    found += [(newest, ansi.fold(line)) for line in screen.end().removesuffix("\n").split("\n") if line]
    return found[-LINES_OF_A_RANK:]
