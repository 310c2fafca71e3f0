"""Whether a job still has a driver: the state in a file does not tell whether the process that wrote it is alive."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..protocol.errors import StoreError
from ..protocol.paths import JobPaths
from ..protocol.process import ProcessId, boot_id
from ..protocol.state import JobState
from ..protocol.typed import Malformed, Record
from . import journal
from .files import publish_json, read_json

BEAT = 5.0
"""Seconds between two heartbeats of a driver."""

SILENCE = 60.0
"""Seconds without a heartbeat after which a driver on another host counts as unreachable."""


@dataclass(frozen=True)
class Driver(Record):
    """A job's driver. ``beat``: time of its last heartbeat, in seconds since the epoch on its own clock."""

    process: ProcessId
    beat: float


def publish_driver(paths: JobPaths, process: ProcessId, beat: float) -> None:
    """Write the driver's heartbeat. Raises ``StoreError``."""
    publish_json(paths.driver, Driver(process, beat).to_json())


def driver_of(paths: JobPaths) -> Driver | None:
    """The job's driver. None if no driver has taken the job yet, or its file is damaged."""
    try:
        return Driver.from_json(read_json(paths.driver))
    except (StoreError, Malformed):
        return None


def effective_state(paths: JobPaths, state: JobState | None = None, now: float | None = None) -> str:
    """The job's state, or ``orphaned`` (its driver is dead: attach one) or ``unreachable`` (another host is silent).

    ``now`` is in seconds since the epoch. Raises ``JobNotFound``.
    """
    state = state or journal.state(paths)
    if state.final:
        return state.state
    now = time.time() if now is None else now
    driver = _latest(driver_of(paths), state)
    if driver is None:
        # No job waits so long for its driver. abs(): the clock may have been set back since.
        return "orphaned" if abs(now - state.submitted) > SILENCE else state.state
    if driver.process.here:
        return state.state if driver.process.alive() else "orphaned"
    if now - driver.beat <= SILENCE:
        return state.state
    return "orphaned" if _before_reboot(driver.process) else "unreachable"


def _latest(beating: Driver | None, state: JobState) -> Driver | None:
    """The driver named in the journal: a new driver writes this before its first heartbeat."""
    if state.driver is None:
        return beating
    try:
        process = ProcessId.from_json(state.driver)
    except Malformed:
        return beating
    return Driver(process, beating.beat if beating else state.submitted)


def _before_reboot(process: ProcessId) -> bool:
    mine = ProcessId.mine()
    return process.host == mine.host and bool(process.boot) and process.boot != boot_id()
