"""One job on this node: its launcher, its ranks, and the certainty that nothing of it is left at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..protocol.paths import JobPaths
from ..protocol.process import ProcessId, exit_in_words, job_token, processes_of_job, stat_fields
from .eventfile import EventFile
from .outofmemory import OutOfMemory
from .tail import EventTail

STALL_SECONDS = 10.0
"""A rank before its first user line that neither writes nor computes for so long hangs."""


@dataclass
class NodeJob:
    """States: starting (no launcher yet), running, ending (told to, or the launcher is gone), ended."""

    paths: JobPaths
    node: str
    ranks: tuple[int, ...]
    attempt: int = 1
    adopt: bool = False
    """Take up what earlier processes left, instead of beginning where their files end."""
    state: str = "starting"
    launcher: ProcessId | None = None
    processes: dict[int, ProcessId] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    """Exit code by rank, once the launcher told it."""
    told: set[int] = field(default_factory=set)
    """Ranks whose exit was written down."""
    ready: set[int] = field(default_factory=set)
    failed: bool = False
    ending_since: float = 0.0
    kill_at: float = 0.0
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.files = self.paths.node(self.node)
        self.files.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.paths.results.mkdir(mode=0o700, exist_ok=True)
        self.events = EventFile(self.files.agent_events)
        self._launcher_tail = self._tail(self.files.launcher_events)
        self._rank_tails = {rank: self._tail(self.files.rank_events(rank)) for rank in self.ranks}
        self._pids: dict[int, int] = {}
        self._unmatched: dict[int, int] = {}
        self._memory = OutOfMemory()
        self._last_change = time.monotonic()
        self._last_ticks = (0, time.monotonic())
        self._error = ""

    def _tail(self, path: Path) -> EventTail:
        return EventTail(path, 0 if self.adopt or not path.exists() else path.stat().st_size)

    # -- looking

    def poll(self, now: float) -> bool:
        """Take in what launcher and ranks wrote, and go on with an end. Whether anything changed."""
        if self.state == "ended":
            return False
        changed = self._read_launcher() | self._read_ranks()
        if changed:
            self._last_change = now
        if self.state in ("starting", "running") and self.launcher is not None and not self.launcher.alive():
            self._read_launcher()
            self._read_ranks()
            self.end(0.3, now)
        if self.state == "ending":
            self._go_on_ending(now)
            return True
        return changed

    def _read_launcher(self) -> bool:
        events = self._launcher_tail.read()
        for event in events:
            if event.kind == "launcher.started" and event.data.get("attempt", 1) == self.attempt:
                self.launcher = ProcessId.from_json(event.data["process"])
                if self.state == "starting":
                    self.state = "running"
            elif event.kind == "launcher.child":
                self._unmatched[event.data["pid"]] = event.data["code"]
            elif event.kind == "launcher.ended" and event.data.get("error"):
                self._error = event.data["error"]
        self._match_codes()
        return bool(events)

    def _read_ranks(self) -> bool:
        changed = False
        for rank, tail in self._rank_tails.items():
            for event in tail.read():
                changed = True
                if event.kind == "rank.started":
                    self.processes[rank] = ProcessId.from_json(event.data["process"])
                    self._pids[self.processes[rank].pid] = rank
                elif event.kind == "rank.ready":
                    self.ready.add(rank)
                elif event.kind == "rank.failed":
                    self.failed = True
        if changed:
            self._match_codes()
        return changed

    def _match_codes(self) -> None:
        """Write down how ranks ended, as soon as both the code and whose it is are known."""
        for pid, code in list(self._unmatched.items()):
            rank = self._pids.get(pid)
            if rank is not None:
                del self._unmatched[pid]
                self._tell_exit(rank, code)

    def _tell_exit(self, rank: int, code: int) -> None:
        if rank in self.told:
            return
        self.told.add(rank)
        self.codes[rank] = code
        stopped = code in (-signal.SIGTERM, -signal.SIGKILL) and (self.failed or self.state == "ending")
        why = "was stopped" if stopped else exit_in_words(code)
        if code == -signal.SIGKILL and not stopped:
            why += self._memory.words(self.processes[rank].pid if rank in self.processes else 0)
        state = "stopped" if stopped else ("done" if code == 0 else "failed" if code > 0 else "killed")
        if code != 0:
            self.failed = True
        self.events.write("rank.exited", rank=rank, code=code, why=why, state=state)

    def stalled(self, now: float) -> bool:
        """Whether ranks before their first user line hang: no word and no processor time for a while."""
        if self.state != "running" or self.ready >= set(self.ranks) or now - self._last_change < STALL_SECONDS:
            return False
        ticks = sum(self._ticks(process) for process in self.processes.values())
        if ticks != self._last_ticks[0]:
            self._last_ticks = (ticks, now)
        return now - self._last_ticks[1] > STALL_SECONDS / 2

    @staticmethod
    def _ticks(process: ProcessId) -> int:
        try:
            fields = stat_fields(process.pid)
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12])

    # -- acting

    def signal(self, number: int) -> None:
        """To every rank that has begun; the launcher is not a rank."""
        for process in self.processes.values():
            process.signal(number)

    def dump_stacks(self) -> None:
        self.signal(signal.SIGUSR1)

    def end(self, grace: float, now: float) -> None:
        """End every process of the job: SIGTERM now, SIGKILL after ``grace`` seconds. May be called again, sooner."""
        if self.state == "ended":
            return
        if self.state != "ending":
            self.state = "ending"
            self.ending_since = now
            self.kill_at = now + grace
            if grace > 0 and self.launcher is not None:
                self.launcher.signal(signal.SIGTERM)
        self.kill_at = min(self.kill_at, now + grace)

    def _go_on_ending(self, now: float) -> None:
        if self.launcher is not None and self.launcher.alive() and now < self.kill_at:
            return
        leaders = [*self.processes.values(), *([self.launcher] if self.launcher else [])]
        left = processes_of_job(job_token(self.paths.job, self.node), leaders)
        number = signal.SIGKILL if now >= self.kill_at else signal.SIGTERM
        for process in left:
            process.signal(number)
        if left:
            return
        self._read_launcher()
        self._read_ranks()
        self._tell_the_rest()
        self.events.write("node.ended", attempt=self.attempt, error=self._error)
        self.state = "ended"
        self.ended_at = now

    def _tell_the_rest(self) -> None:
        for rank in self.ranks:
            if rank not in self.told and rank in self.processes:
                self.told.add(rank)
                # Nobody saw its exit code: its launcher is gone. What the rank said of itself stands before this.
                self.events.write("rank.exited", rank=rank, code=-signal.SIGKILL, why="was stopped", state="stopped")

    def close(self, *, remove: bool = False) -> None:
        self.events.close()
        if remove:
            shutil.rmtree(self.paths.root, ignore_errors=True)


def replica(root: Path, job: str) -> JobPaths:
    """The job's directory on a node without the driver's disk."""
    paths = JobPaths(root / "jobs" / job)
    for folder in (paths.root, paths.nodes, paths.results):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return paths


def reap() -> dict[int, int]:
    """Exit codes of children that ended: our own, and orphans that came to us as their subreaper."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended
