"""How far each tracker of a job is: one file for each, which only its process (``trackers/``) writes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ..protocol.errors import StoreError
from ..protocol.paths import JobPaths, is_safe
from ..protocol.process import ProcessId
from ..protocol.typed import Malformed, Record
from .files import private, publish_json, read_json


@dataclass(frozen=True)
class Tracking(Record):
    """The run of a job at one tracker. Everything before ``at`` is delivered."""

    tracker: str
    process: ProcessId | None = None
    """The process that delivers, or delivered at last."""
    link: str = ""
    place: str = ""
    """What the tracker needs to find the run again."""
    at: dict[str, int] = field(default_factory=dict)
    """By file: offset of the next byte."""
    counts: dict[str, int] = field(default_factory=dict)
    """By curve: the next step, where the cell gives none."""
    sent: int = 0
    """How many points were delivered."""
    refused: int = 0
    """How many points the tracker will never take."""
    files: tuple[str, ...] = ()
    """The artifacts that were delivered."""
    trouble: str = ""
    """Why nothing can be delivered now; empty if all is well."""
    since: float = 0.0
    """Since when (seconds since the epoch)."""
    closed: bool = False
    """Whether the run has ended, with everything delivered."""
    later: str = ""
    """The command that delivers the rest."""

    @property
    def lives(self) -> bool:
        """Whether a process delivers. One on another machine is taken to live."""
        return self.process is not None and (self.process.alive() or not self.process.here)

    @property
    def said(self) -> str:
        """What does not go well; empty if all does."""
        if self.closed:
            return ""
        if self.trouble and self.lives:
            return f"{self.trouble}; nothing is lost, it is tried again"
        if self.process is None or self.lives:
            return "" if self.link else "its run begins"
        why = f": {self.trouble}" if self.trouble else ""
        return f"not everything is delivered{why}; `{self.later}` delivers the rest"

    @property
    def line(self) -> str:
        """``mlflow: http://…``, and what does not go well."""
        return f"{self.tracker}: {' · '.join(filter(None, [self.link, self.said]))}"


def publish(paths: JobPaths, tracking: Tracking) -> None:
    """Raises ``StoreError``."""
    private(paths.tracking)
    publish_json(paths.tracked(tracking.tracker), tracking.to_json())


def of(paths: JobPaths, tracker: str) -> Tracking:
    """How far a tracker is; at the beginning if there is no file, or a damaged one."""
    try:
        return Tracking.from_json(read_json(paths.tracked(tracker)))
    except (StoreError, Malformed):
        return Tracking(tracker)


def read(paths: JobPaths) -> list[Tracking]:
    """All trackers whose processes were started: each has a log."""
    try:
        names = sorted(name[:-4] for name in os.listdir(paths.tracking) if name.endswith(".log"))
    except OSError:
        return []
    return [of(paths, name) for name in names if is_safe(name)]


def lines(paths: JobPaths) -> tuple[str, ...]:
    """One sentence for each tracker that has begun."""
    return tuple(tracking.line for tracking in read(paths))
