"""Starts the launchers of jobs: as a fork of a warm process, or in a new interpreter."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ..protocol.process import ProcessId, processes_of_job
from ..protocol.wire.assignment import Assignment
from ..protocol.wire.channel import Channel
from . import warm
from .nodejob import NodeJob

FORK_DOUBT_SECONDS = 0.3
"""When a zygote dies, a launcher that it forked just before writes its first event within this time."""


class Starts:
    """``jobs`` are the agent's. A job that is to be started is one of them."""

    def __init__(
        self,
        log: Path,
        jobs: Mapping[str, NodeJob],
        register: Callable[[Channel, Callable[[], None]], None],
        unregister: Callable[[Channel], None],
    ) -> None:
        self._jobs = jobs
        self.orders: dict[str, Assignment] = {}
        """By which the jobs were started here."""
        self.pool = warm.WarmPool(log, register, unregister, self._on_forked, self._on_fork_failed)
        self._fresh: dict[int, subprocess.Popen[bytes]] = {}
        self._unforked: list[tuple[float, Assignment]] = []
        self._retried: set[str] = set()
        self._forked = False

    def start(self, assignment: Assignment, *, doubt: bool) -> None:
        """``doubt``: an agent that died may have started it, and its launcher may be on the way."""
        job = self._jobs[assignment.job]
        self.orders[assignment.job] = assignment
        if doubt:
            job.expected = True
            self._on_fork_failed(assignment)
        elif assignment.fresh:
            self._start_fresh(assignment)
        else:
            job.expected = True
            self.pool.launch(assignment)

    def withdraw(self, job: NodeJob) -> None:
        """Do not start what waits for a warm process."""
        if self.pool.withdraw(job.paths.job):
            job.expected = False

    def forget(self, job: str) -> None:
        self._retried.discard(job)
        self.orders.pop(job, None)

    @property
    def pids(self) -> set[int]:
        """Processes that ``reap`` takes care of."""
        return {zygote.process.pid for zygote in self.pool.zygotes.values()} | set(self._fresh)

    def reap(self) -> None:
        for process in [*self._fresh.values(), *(zygote.process for zygote in self.pool.zygotes.values())]:
            process.poll()
        self._fresh = {pid: process for pid, process in self._fresh.items() if process.returncode is None}

    def turn(self, now: float) -> bool:
        """Go on with what is due. Returns whether a launcher was forked since the last turn."""
        self.pool.flush()
        self._start_unforked(now)
        self.pool.retire(now)
        forked, self._forked = self._forked, False
        return forked

    def _start_fresh(self, assignment: Assignment) -> None:
        process = warm.start_fresh(assignment, assignment.node_paths.launcher_log)
        self._fresh[process.pid] = process
        self._jobs[assignment.job].launcher = ProcessId.of(process.pid)

    def _on_forked(self, name: str, pid: int, ticks: int) -> None:
        launcher = replace(ProcessId.mine(), pid=pid, ticks=ticks)
        job = self._jobs.get(name)
        if job is None or job.state in ("ending", "ended"):
            launcher.signal(signal.SIGKILL)  # the job was ended while its launcher was on the way
        if job is not None:
            job.expected = False
            job.launcher = launcher
            self._forked = True

    def _on_fork_failed(self, assignment: Assignment) -> None:
        """The zygote died. Wait until a launcher that it may have forked has had time to write its first event."""
        self._unforked.append((time.monotonic() + FORK_DOUBT_SECONDS, assignment))

    def _start_unforked(self, now: float) -> None:
        """Retry jobs whose zygote died before it forked: first with another zygote, then with a new interpreter."""
        for due, assignment in [item for item in self._unforked if item[0] <= now]:
            self._unforked.remove((due, assignment))
            job = self._jobs.get(assignment.job)
            if job is None:
                continue
            if job.state != "starting" or processes_of_job(assignment.token):
                job.expected = False
            elif assignment.job not in self._retried and not assignment.fresh:
                self._retried.add(assignment.job)
                self.pool.launch(assignment)
            else:
                job.expected = False
                if not assignment.fresh:
                    text = "warm processes fail on this machine, so the ranks start in new interpreters"
                    job.events.write("job.note", text=text)
                try:
                    self._start_fresh(replace(assignment, fresh=True))
                except OSError as error:
                    job.events.write("job.note", text=f"no new interpreter can be started: {error}")
                    job.end(0.0, now)
