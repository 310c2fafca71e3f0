"""How a job is shown while the cell waits for it: one updating picture, plain lines, or nothing.

Everything is drawn from the waiting loop: no thread, so none is left, and output lands under the cell that waits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..protocol.paths import JobPaths
from ..protocol.state import JobState
from ..store import logs, metrics
from ..verbs import ansi
from ..verbs.stream import Console
from .rich import RichOutput
from .snapshot import LINES_OF_A_RANK, Progress, Snapshot, as_html, as_text

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

FRAME = 0.15
"""Seconds between two updates of the picture; the first change after a quiet time is drawn at once."""
CLOCK = 1.0
"""Seconds after which a picture in which nothing changed is drawn again, for its elapsed time."""
TAIL = 16 * 1024
TEXT_LIMIT = 32_000_000
"""Characters that ``--watch text`` prints at the most into one cell, as the notebook stores every one of them."""


class Watch(Protocol):
    """What the cell's waiting loop calls."""

    def tick(self, state: JobState) -> None: ...

    def finish(self, state: JobState, remarks: tuple[str, ...]) -> None: ...


def is_notebook(ip: InteractiveShell) -> bool:
    """Whether the front end can replace what it has shown; a plain terminal cannot."""
    return getattr(ip, "kernel", None) is not None


def watch(ip: InteractiveShell, paths: JobPaths, how: str, rich: RichOutput, notes: tuple[str, ...] = ()) -> Watch:
    """The watch that ``--watch`` names; ``compact`` falls back to ``text`` in a plain terminal.

    ``notes`` is what there was to say about the capture.
    """
    if how == "off":
        return Silence(rich)
    if how == "text" or not is_notebook(ip):
        return Text(paths, rich, TEXT_LIMIT if is_notebook(ip) else None, notes)
    return Picture(ip, paths, rich, notes)


class Silence:
    """Shows nothing; the result and the exception are the cell's own."""

    def __init__(self, rich: RichOutput) -> None:
        self._rich = rich

    def tick(self, state: JobState) -> None:
        """Take rank 0's rich output in, for the result among it."""
        self._rich.tick(state)

    def finish(self, state: JobState, remarks: tuple[str, ...]) -> None:
        """Nothing is said."""
        self._rich.tick(state)


class Text:
    """Plain lines with the rank in front, as they are written."""

    def __init__(self, paths: JobPaths, rich: RichOutput, limit: int | None, notes: tuple[str, ...] = ()) -> None:
        self._console = Console(paths, limit=limit)
        self._rich = rich
        for note in notes:
            print(f"note: {note}", flush=True)

    def tick(self, state: JobState) -> None:
        """Print the new lines, publish the new rich output."""
        self._console.tick(state)
        self._rich.tick(state)

    def finish(self, state: JobState, remarks: tuple[str, ...]) -> None:
        """Print what is left, and what there is to say about the results."""
        self._console.finish(state, time.time())
        self._rich.tick(state)
        for remark in remarks:
            print(remark, flush=True)


class Picture:
    """One output that is replaced as the job goes, and stays as it was at the end."""

    def __init__(self, ip: InteractiveShell, paths: JobPaths, rich: RichOutput, notes: tuple[str, ...] = ()) -> None:
        self._ip = ip
        self._rich = rich
        self._notes = notes
        self._tails = Tails(paths)
        self._curves = Curves(paths)
        self._id = f"torchdist-{paths.job}"
        self._published = False
        self._drawn = 0.0
        self._seen: object = None
        self._failed = False

    def tick(self, state: JobState) -> None:
        """Draw when something changed, but no more often than every ``FRAME`` seconds; a failure at once."""
        if self._rich.tick(state):
            self._published = False
            self._draw(state)
        now = time.monotonic()
        failed = bool(state.failures())
        waited = now - self._drawn
        if waited < FRAME and not (failed and not self._failed):
            return
        seen = (state.seq, self._tails.poll(), self._curves.poll(state))
        if seen != self._seen or waited > CLOCK:
            self._seen, self._failed = seen, failed
            self._draw(state)

    def finish(self, state: JobState, remarks: tuple[str, ...]) -> None:
        """The still picture that is saved with the notebook."""
        self._rich.tick(state)
        self._tails.poll()
        self._curves.poll(state)
        self._draw(state, remarks)

    def _draw(self, state: JobState, remarks: tuple[str, ...] = ()) -> None:
        lines = self._tails.lines()
        said = (*self._notes, *remarks)
        snapshot = Snapshot(state, time.time(), lines, self._curves.last, self._curves.progress, said)
        self._ip.display_pub.publish(
            {"text/html": as_html(snapshot), "text/plain": as_text(snapshot)},
            transient={"display_id": self._id},
            update=self._published,
        )
        self._published = True
        self._drawn = time.monotonic()


class Tails:
    """The last lines of each rank, read again only where a file grew."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._known: dict[Path, tuple[int, logs.LogFile, list[str]]] = {}

    def poll(self) -> tuple[int, ...]:
        """Read what changed; the files' sizes in bytes, which differ whenever a line may."""
        sizes = []
        for file in logs.files(self._paths):
            size = file.path.stat().st_size
            sizes.append(size)
            known = self._known.get(file.path)
            if size and (known is None or known[0] != size):
                self._known[file.path] = (size, file, _last_lines(file.path))
        return tuple(sizes)

    def lines(self) -> dict[int, list[str]]:
        """Rank -> lines, oldest first: stdout's, then stderr's (at most half of them)."""
        streams: dict[int, dict[str, list[str]]] = {}
        for _, file, lines in self._known.values():
            streams.setdefault(file.rank, {})[file.stream] = lines
        found = {}
        for rank, by_stream in streams.items():
            errors, out = by_stream.get("err", []), by_stream.get("out", [])
            kept = errors[-max(LINES_OF_A_RANK // 2, LINES_OF_A_RANK - len(out)) :]
            found[rank] = [*out[-(LINES_OF_A_RANK - len(kept)) :], *kept] if len(kept) < LINES_OF_A_RANK else kept
        return found


def _last_lines(path: Path) -> list[str]:
    text = logs.tail(path, LINES_OF_A_RANK, TAIL)
    return [ansi.fold(line) for line in text.rstrip("\n").split("\n")]


class Curves:
    """The last value of each curve, and the job's progress: rank 0's where it reports one, else the lowest rank's."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._offsets: dict[int, int] = {}
        self._values: dict[str, tuple[int, float]] = {}
        self._progress: tuple[int, Progress] | None = None

    @property
    def last(self) -> dict[str, float]:
        """Curve -> its last value, in the order in which the curves appeared."""
        return {name: value for name, (_, value) in self._values.items()}

    @property
    def progress(self) -> Progress | None:
        """The bar, if any rank has one."""
        return self._progress[1] if self._progress else None

    def poll(self, state: JobState) -> int:
        """Take new records in; a number that grows with them."""
        for rank in metrics.files(self._paths):
            records, self._offsets[rank] = metrics.read(self._paths, rank, self._offsets.get(rank, 0))
            for record in records:
                self._take(rank, record)
        return sum(self._offsets.values())

    def _take(self, rank: int, record: metrics.Record) -> None:
        if record.get("k") == "log":
            for name, value in record.get("v", {}).items():
                if isinstance(value, (int, float)) and rank <= self._values.get(name, (rank, 0.0))[0]:
                    self._values[name] = (rank, float(value))
        elif record.get("k") == "progress" and (self._progress is None or rank <= self._progress[0]):
            total = record.get("total")
            bar = Progress(float(record.get("n", 0)), float(total) if total else None, str(record.get("desc", "")))
            self._progress = (rank, bar)
