"""One job on this node: its launcher and its ranks. Makes sure that no process of it is left at the end."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from ..protocol import codec
from ..protocol.eventreader import EventReader, reader_of
from ..protocol.events import Event, ProfileRequest
from ..protocol.hosts import BRING, bytes_of
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.process import ProcessId, exit_in_words, job_token, processes_of_job
from ..protocol.wire.beats import Part
from ..ranks.eventfile import EventFile
from .out_of_memory import OutOfMemory
from .progress import Progress, Quiet
from .shipping.replica import Written, discard, written
from .stacks import Endings, Stack, Stacks
from .unattended.vigil import Vigil

REPORT_SECONDS = 1.0
"""Seconds between two reports of how long the ranks have made no progress."""

ENGINE_KILL_SECONDS = 1.0
"""When a rank fails, the engine sends SIGTERM to the others. A SIGKILL sooner than this is not from the engine."""

ANSWER_SECONDS = 2.0
"""How long the end of a job waits for a zygote that has not answered a fork request."""

LOOK_SECONDS = 0.02
"""Seconds between two scans of ``/proc`` for the remaining processes of a job."""

UNKILLABLE_SECONDS = 30.0
"""A process that SIGKILL has not ended after this time waits in the kernel for a device or a file server."""


@dataclass
class NodeJob:
    """States: starting (no launcher yet), running, ending (on request, or the launcher is gone), ended."""

    paths: JobPaths
    node: str
    ranks: tuple[int, ...]
    attempt: int = 1
    adopt: bool = False
    """Read the existing event files from their beginning, not only what is appended from now on."""
    shared: bool = True
    """Whether the driver sees this directory itself. If not, it is a replica."""
    state: str = "starting"
    launcher: ProcessId | None = None
    expected: bool = False
    """A zygote was asked to fork the launcher and has not answered: the launcher may appear at any moment."""
    processes: dict[int, ProcessId] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    """Exit code by rank, once the launcher has reported it."""
    told: set[int] = field(default_factory=set)
    """Ranks whose exit was recorded."""
    spoke: set[int] = field(default_factory=set)
    """Ranks that reported themselves how their code ended."""
    failed: bool = False
    kill_at: float = 0.0

    def __post_init__(self) -> None:
        self.files = self.paths.node(self.node)
        self.files.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.paths.results.mkdir(mode=0o700, exist_ok=True)
        self.events = EventFile(self.files.agent_events)
        self.files.profile_requests.touch(mode=0o600)  # ranks watch it
        self.files.launcher_log.touch(mode=0o600)  # where there is no room for it, nobody would hear why
        self._launcher_tail = self._tail(self.files.launcher_events)
        self._rank_tails = {rank: self._tail(self.files.rank_events(rank)) for rank in self.ranks}
        self._pids: dict[int, int] = {}
        self._unmatched: dict[int, tuple[int, bool | None]] = {}
        self._memory = OutOfMemory()
        self._stacks = Stacks(self.files)
        self._endings = Endings(self.files, self._stacks, lambda text: self.events.write("job.note", text=text))
        self._progress = Progress(self.files, self.ranks)
        self._report_at = 0.0
        self._error = ""
        self._now = self._began = time.monotonic()
        self._failed_at = 0.0
        self._look_at = 0.0
        self._terminated: set[ProcessId] = set()
        self._done: set[int] = set()
        self.endpoint: tuple[str, int] | None = None
        """Where the ranks meet, if the launcher of this node has said so."""
        self.watch: Vigil | None = None
        if self.adopt:
            self._recall()

    def _recall(self) -> None:
        """What an earlier agent has said of this attempt, and need not be said again."""
        reader = self._tail(self.files.agent_events)
        while events := reader.read():
            for event in events:
                if event.kind == "node.up":
                    self.told.clear()
                elif event.kind == "rank.exited" and event.rank is not None:
                    self.told.add(event.rank)
                elif event.kind == "node.ended" and event.data["attempt"] == self.attempt:
                    self.state = "ended"

    @cached_property
    def plan(self) -> Plan:
        return Plan.from_json(codec.loads(self.paths.plan.read_bytes()))

    def overdue(self, now: float) -> str:
        """Why the attempt ends although no driver says so; empty if it goes on."""
        limit = self.plan.timeout
        return f"ran longer than --timeout {limit:g} s\n" if limit and now - self._began > limit else ""

    @property
    def may_restart(self) -> bool:
        """Whether the driver may start another attempt."""
        return self.attempt <= self.plan.restarts

    @property
    def _limit(self) -> int:
        """Bytes of files that go to the notebook; none from a node that shares the driver's disk or has no files."""
        if self.shared or not self.paths.plan.exists():
            return -1
        own = next(node for node in self.plan.nodes if node.name == self.node)
        return bytes_of(own.reach.bring or BRING)

    @cached_property
    def written(self) -> Written:
        """What the cell wrote in the job's own work directory. Looked at once, after the job's end."""
        return written(self.paths.work, self._limit)

    def event_files(self) -> list[Path]:
        """The files in which launcher and ranks write events for the agent."""
        return [tail.path for tail in (self._launcher_tail, *self._rank_tails.values())]

    def _tail(self, path: Path) -> EventReader:
        reader = reader_of(self.files, self.ranks, path.name)
        assert reader is not None
        reader.offset = 0 if self.adopt or not path.exists() else path.stat().st_size
        return reader

    # -- looking

    def poll(self, now: float, strays: Callable[[], Sequence[ProcessId]] = tuple, why: str = "") -> bool:
        """Read new events of launcher and ranks, and continue ending the job. Returns whether anything changed.

        ``strays`` finds processes that only their parent shows to be the job's. ``why`` the launcher is gone, if it is.
        """
        if self.state == "ended":
            return False
        self._now = now
        self.events.flush()
        changed = self._read_launcher() | self._read_ranks()
        self._endings.turn(self.processes, now)
        self._stacks.turn(now)
        if self.going and self.launcher is not None and not self.launcher.alive():
            self._read_launcher()
            self._read_ranks()
            self.end(0.3, now, why)
        if self.state == "ending":
            self._go_on_ending(now, strays)
            return True
        return changed

    def _read_launcher(self) -> bool:
        events = self._launcher_tail.read()
        for event in events:
            self._take_launcher(event)
        self._match_codes()
        return bool(events)

    def _take_launcher(self, event: Event) -> None:
        if event.kind == "launcher.started" and event.data.get("attempt", 1) == self.attempt:
            self.launcher = ProcessId.from_json(event.data["process"])
            if self.state == "starting":
                self.state = "running"
        elif event.kind == "launcher.rendezvous":
            self.endpoint = event.data["address"], event.data["port"]
        elif event.kind == "launcher.child":
            self._unmatched[event.data["pid"]] = event.data["code"], event.data.get("stopped")
        elif event.kind == "launcher.ended" and event.data.get("error"):
            self._error = str(event.data["error"])

    def _read_ranks(self) -> bool:
        changed = [self._read_rank(rank) for rank in self.ranks]
        if any(changed):
            self._match_codes()
        return any(changed)

    def _read_rank(self, rank: int) -> bool:
        events = self._rank_tails[rank].read()
        for event in events:
            self._take_rank(rank, event)
        return bool(events)

    def _take_rank(self, rank: int, event: Event) -> None:
        if event.kind in ("rank.waiting", "rank.resumed"):
            self._progress.waits(rank, event.kind == "rank.waiting")
        elif event.kind != "rank.entered":
            self._progress.lives(rank, self._now)
        if event.kind == "rank.started":
            self.processes[rank] = ProcessId.from_json(event.data["process"])
            self._pids[self.processes[rank].pid] = rank
        elif event.kind == "rank.ending":
            self._endings.began(rank, self._now)
        elif event.kind in ("rank.done", "rank.interrupted", "rank.failed"):
            self.spoke.add(rank)
            self._done |= {rank} if event.kind == "rank.done" else set()
            self._endings.over(rank)
            if event.kind == "rank.failed":
                self._note_failure()

    def _note_failure(self) -> None:
        if not self.failed:
            self.failed = True
            self._failed_at = self._now

    def _match_codes(self) -> None:
        """Record how ranks ended, as soon as both the exit code and the pid's rank are known."""
        for pid, (code, by_engine) in list(self._unmatched.items()):
            rank = self._pids.get(pid)
            if rank is not None:
                del self._unmatched[pid]
                self._tell_exit(rank, code, by_engine)

    def _tell_exit(self, rank: int, code: int, by_engine: bool | None) -> None:
        self.codes[rank] = code
        if rank in self.told:
            return
        self.told.add(rank)
        self._endings.over(rank)
        while self._read_rank(rank):  # events from before its exit
            continue
        stopped = self._was_stopped(code, by_engine)
        why = "was stopped" if stopped else exit_in_words(code) if code else ""
        if code == -signal.SIGKILL and not stopped:
            why += self._memory.words(self.processes[rank].pid if rank in self.processes else 0)
        if code == 0 and rank not in self.spoke:
            why = "exited with code 0 before its code had ended"
        state = "stopped" if stopped else ("done" if code == 0 else "failed" if code > 0 else "killed")
        if code != 0:
            self._note_failure()
        self.events.write("rank.exited", rank=rank, code=code, why=why, state=state)

    def _was_stopped(self, code: int, by_engine: bool | None) -> bool:
        """Whether a rank ended because of another rank, or because the job was to end.

        When a rank is killed, its peers lose their connections. They may report this before the killed rank is reaped.
        Where the engine does not tell which ranks it killed, the time since the first failure decides.
        """
        if self.state == "ending":
            return code in (-signal.SIGTERM, -signal.SIGKILL)
        if by_engine is not None:
            return by_engine
        if code == -signal.SIGKILL:
            return self.failed and self._now - self._failed_at >= ENGINE_KILL_SECONDS
        return code == -signal.SIGTERM and self.failed

    def measured(self, found: Mapping[int, bool]) -> None:
        """Whether each rank has worked since the last measurement."""
        for rank, works in found.items():
            self._progress.measured(rank, works, self._now)

    @property
    def going(self) -> bool:
        """Whether it goes on, and has not begun to end."""
        return self.state in ("starting", "running")

    @property
    def living(self) -> dict[int, ProcessId]:
        """Ranks that have started and whose exit was not recorded."""
        return {rank: process for rank, process in self.processes.items() if rank not in self.told}

    def quiet(self, now: float) -> list[Quiet]:
        """For each rank that is alive how long it has made no progress; empty if this was reported a moment ago."""
        if self.state != "running" or now < self._report_at:
            return []
        self._report_at = now + REPORT_SECONDS
        return self._progress.look(sorted(self.living), now)

    # -- the other nodes

    def vigil(self) -> Vigil | None:
        """Of a job of several nodes that goes on here without the driver's disk."""
        if self.watch is None and not self.shared and self.going:
            self.watch = Vigil(self.plan, self.node, self.attempt, self.events.write)
        return self.watch

    def hear(self, now: float, attended: bool) -> None:
        """Hear the other nodes. The job ends here when one is gone while no driver is connected to any node."""
        if self.watch is not None:
            grace = self.watch.turn(now, self._part, attended)
            if grace is not None:
                self.end(grace, now)

    def go_on_after(self, earlier: NodeJob) -> None:
        """This attempt follows an earlier one without a driver."""
        self.shared, self._began = False, earlier._began
        self.watch, earlier.watch = earlier.watch, None

    @property
    def speaks(self) -> bool:
        """Whether other nodes may still have to hear how this node's part stands."""
        return self.watch is not None and self.watch.speaks

    @property
    def _part(self) -> Part:
        if self.state != "ended":
            return "runs"
        return "done" if all(rank in self._done or self.codes.get(rank) == 0 for rank in self.ranks) else "short"

    # -- acting

    def signal(self, number: int) -> None:
        """Send a signal to every rank that has started, not to the launcher."""
        for process in self.processes.values():
            process.signal(number)

    def say_places(self) -> None:
        """Have every rank that is alive write its stacks; an event says where it is."""
        for rank, process in self.living.items():
            self._stacks.ask(rank, process, self._now, partial(self._say_place, rank))

    def ask_profile(self, request: ProfileRequest) -> None:
        """Have every rank profile its next steps; each answers with an event. Lost on a full disk."""
        with contextlib.suppress(OSError), open(self.files.profile_requests, "ab") as file:
            file.write((codec.dumps(request.to_json()) + "\n").encode("ascii"))

    def _say_place(self, rank: int, stack: Stack) -> None:
        self.events.write("rank.place", rank=rank, place=stack.place, begin=stack.begin, end=stack.end)

    def expire(self, reason: str, now: float) -> None:
        """End the job with its grace, before the engine ends it without one."""
        if self.going:
            self.events.write("node.expiring", reason=reason)
            self.end(self.plan.grace, now)

    def end(self, grace: float, now: float, error: str = "") -> None:
        """End every process of the job: SIGTERM now, SIGKILL after ``grace`` seconds. A later call may shorten that."""
        if self.state == "ended":
            return
        self._error += error
        if self.state != "ending":
            self.state = "ending"
            self.kill_at = now + grace
            if grace > 0 and self.launcher is not None:
                self.launcher.signal(signal.SIGTERM)
        self.kill_at = min(self.kill_at, now + grace)

    def _go_on_ending(self, now: float, strays: Callable[[], Sequence[ProcessId]]) -> None:
        if self.expected and now < self.kill_at + ANSWER_SECONDS:
            return
        if self.launcher is not None and self.launcher.alive() and now < self.kill_at:
            return
        if now < self._look_at:
            return
        leaders = [*self.processes.values(), *([self.launcher] if self.launcher else [])]
        began = time.monotonic()
        left = [*processes_of_job(job_token(self.paths.job, self.node), leaders), *strays()]
        self._look_at = now + max(LOOK_SECONDS, 3 * (time.monotonic() - began))
        for process in left:
            if now >= self.kill_at:
                process.signal(signal.SIGKILL)
            elif process not in self._terminated:
                self._terminated.add(process)
                process.signal(signal.SIGTERM)
        if left and now < self.kill_at + UNKILLABLE_SECONDS:
            return
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            self._error += f"process {pids} does not end: SIGKILL waits for a device or a file server in the kernel\n"
        while self._read_launcher() | self._read_ranks():
            continue
        self._tell_the_rest()
        if stays := self.written.told(socket.gethostname(), self._limit):
            self.events.write("job.note", text=stays)
        self.events.write("node.ended", attempt=self.attempt, error=self._error)
        self.state = "ended"

    def _tell_the_rest(self) -> None:
        for rank in sorted(self.living):
            self.told.add(rank)
            # The launcher is gone, so the exit code is unknown. An outcome that the rank reported has priority.
            self.events.write("rank.exited", rank=rank, code=-signal.SIGKILL, why="was stopped", state="stopped")

    def close(self, *, remove: bool = False, shipped: bool = False) -> None:
        """``remove``: delete the replica of the job, but no file that the cell wrote, unless it was ``shipped``."""
        self.events.close()
        if self.watch is not None:
            self.watch.close()
        if remove and shipped:
            self.written.discard()
        if remove:
            discard(self.paths)
