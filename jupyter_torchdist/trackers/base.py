"""A tracker: one destination of runs. A package adds one with the entry point group ``jupyter_torchdist.trackers``.

``delivery`` calls it from one thread of a process of its own. Everything that it is given is in the job's files, so any
exception may be raised at any time: the call comes again later, also in another process and after the notebook's end.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..protocol.errors import OptionError

FINISHED, FAILED, KILLED = "finished", "failed", "killed"
"""How a run ends."""


@dataclass(frozen=True)
class Run:
    """What is known of a job before it runs. There is one run for each job, whatever the number of its nodes."""

    job: str
    name: str
    started: float
    """Seconds since the epoch."""
    params: dict[str, str | int | float | bool] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    source: str = ""
    """The label of the cell or script."""
    commit: str = ""
    """Of the source's git repository; empty without one."""


@dataclass(frozen=True)
class Point:
    """One value of a curve. ``t`` in seconds since the epoch."""

    name: str
    value: float
    step: int
    t: float


@dataclass(frozen=True)
class Opened:
    """A run at its destination."""

    link: str
    """What a person opens: an address, or a directory. Without the name and password of the address."""
    place: str
    """What ``open`` needs to find the run from another directory or shell. Without secrets."""
    fresh: bool
    """Whether the destination has nothing of the run yet: all points are written from the beginning."""
    later: str = ""
    """The command that delivers what is left when time is up; empty for ``torchdist track JOB``."""


class Refused(Exception):
    """The destination will never take one of these points. It is passed over, and counted."""


class Tracker(Protocol):
    """A destination. Made without arguments, by the name of its entry point."""

    def check(self, environ: Mapping[str, str]) -> None:
        """Called before a job is launched, in the notebook. It imports nothing that takes long.

        Raises ``OptionError`` if no job with these variables could be tracked, such as a missing package.
        """

    def open(self, run: Run, place: str) -> Opened:
        """Find the run of this job, or begin it. ``place`` is empty, or what an earlier ``open`` returned."""

    def log(self, points: Sequence[Point]) -> None:
        """Write points, at most ``delivery.POINTS``. They may come twice. Raises ``Refused``."""

    def tag(self, tags: Mapping[str, str]) -> None:
        """Add tags, or replace them."""

    def file(self, path: Path, name: str) -> None:
        """Add a file under ``name`` (with slashes)."""

    def close(self, state: str, ended: float) -> None:
        """End the run, as ``state`` (``FINISHED``, ``FAILED`` or ``KILLED``) at ``ended`` (seconds since the epoch).

        When this returns the destination has everything.
        """


def needs(module: str, tracker: str) -> None:
    """Raises ``OptionError`` if a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise OptionError(
            f"the tracker {tracker} needs the package {module}, which is not installed in {sys.executable}",
            f"{sys.executable} -m pip install 'jupyter_torchdist[{tracker}]'",
        )
