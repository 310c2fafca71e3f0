"""What the ranks of this node take: looked at every other second, in a thread, and written to each job's own file.

The thread asks ``/proc`` and NVML, which may take their time; it touches no file of a job. The agent's loop writes what
it found: a job that is over meanwhile, its directory removed perhaps, is left alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from ..protocol import codec
from ..protocol.gauges import Gauges, rounded
from ..protocol.nvml import Nvml
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.process import ProcessId
from .loads import LOOK_SECONDS, Load, Loads
from .nodejob import NodeJob
from .replica import publish_private

FIRST_SECONDS = 1.0
"""After the first rank of an idle node, until it is looked at: most cells that are shorter are not looked at at all."""


@dataclass(frozen=True)
class Subject:
    """One rank that is to be looked at, and its GPU (empty: it has none)."""

    job: str
    rank: int
    process: ProcessId
    gpu: str


Found = dict[Subject, Gauges]


class GaugeWatch:
    """The loop's side: which ranks there are, and what is written. Nothing waits for the thread."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[list[Subject] | None] = SimpleQueue()
        self._found: SimpleQueue[Found] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._looking = False
        self._due = 0.0
        self._boards: dict[str, Board] = {}

    def turn(self, jobs: Mapping[str, NodeJob], now: float) -> None:
        """Write what was found, and ask again when it is time."""
        with contextlib.suppress(Empty):
            self._write(self._found.get_nowait(), jobs)
            self._looking = False
        if self._looking or now < self._due:
            return
        subjects = [subject for name, job in jobs.items() for subject in self._living(name, job)]
        if not subjects:
            self._due = now + FIRST_SECONDS
            self._boards = {name: board for name, board in self._boards.items() if name in jobs}
            return
        self._due = now + LOOK_SECONDS
        self._ask(subjects)

    def close(self) -> None:
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(1.0)  # a driver that hangs may hold it for ever: it is a daemon

    def _ask(self, subjects: list[Subject]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchdist-gauges", daemon=True)
            self._thread.start()
        self._looking = True
        self._asked.put(subjects)

    def _run(self) -> None:
        look = Look()
        while (subjects := self._asked.get()) is not None:
            found: Found = {}
            with contextlib.suppress(Exception):  # this thread's edge: what cannot be looked at is not told
                found = look.at(subjects, time.monotonic())
            self._found.put(found)
        look.close()

    def _living(self, name: str, job: NodeJob) -> list[Subject]:
        if job.state == "ended":
            return []
        if name not in self._boards:
            self._boards[name] = Board(job.paths, job.node)
        gpus = self._boards[name].gpus
        living = [(rank, process) for rank, process in job.processes.items() if rank not in job.told]
        return [Subject(name, rank, process, gpus.get(rank, "")) for rank, process in living]

    def _write(self, found: Found, jobs: Mapping[str, NodeJob]) -> None:
        for name in {subject.job for subject in found}:
            job, board = jobs.get(name), self._boards.get(name)
            if job is not None and job.state != "ended" and board is not None:
                board.write({subject.rank: gauges for subject, gauges in found.items() if subject.job == name})


class Board:
    """One job's file: the latest of each rank, and the highest that was seen."""

    def __init__(self, paths: JobPaths, node: str) -> None:
        self._path = paths.node(node).gauges
        self._latest: dict[int, Gauges] = {}
        self.gpus: dict[int, str] = {}
        with contextlib.suppress(OSError, ValueError):
            self.gpus = Plan.from_json(codec.loads(paths.plan.read_bytes())).gpu_of_rank()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # another agent's, which is gone
            written = codec.loads(self._path.read_bytes())
            self._latest = {int(rank): Gauges.from_json(value) for rank, value in written.items()}

    def write(self, found: Mapping[int, Gauges]) -> None:
        """A full disk keeps what was written last."""
        latest = self._latest | {rank: gauges.after(self._latest.get(rank)) for rank, gauges in found.items()}
        if latest == self._latest:
            return
        self._latest = latest
        words = {str(rank): gauges.to_json() for rank, gauges in sorted(latest.items())}
        with contextlib.suppress(OSError):
            publish_private(self._path, codec.dumps(words).encode("ascii") + b"\n")


class Look:
    """The thread's side: ``/proc``, and NVML while a rank has a GPU."""

    def __init__(self) -> None:
        self._loads = Loads()
        self._nvml: Nvml | None = None
        self._alone: set[ProcessId] = set()
        """Ranks that NVML has told apart once: they hold what it says of them, or nothing."""

    def at(self, subjects: list[Subject], now: float) -> Found:
        """What each rank that is alive takes."""
        loads = self._loads.look([subject.process for subject in subjects], now)
        self._alone &= loads.keys()
        cards = self._cards({subject.gpu for subject in subjects if subject.gpu})
        found = {}
        for subject in subjects:
            if load := loads.get(subject.process):
                gauges = Gauges(None if load.cpu is None else rounded(load.cpu, 2), rounded(load.memory, 3))
                card = cards.get(subject.gpu)
                found[subject] = gauges if card is None else self._with(card, gauges, subject.process, load)
        return found

    def _cards(self, gpus: set[str]) -> dict[str, Card]:
        if not gpus:
            self.close()
            return {}
        try:
            self._nvml = self._nvml or Nvml()
        except OSError:
            return {}
        return {gpu: card for gpu in gpus if (card := Card.of(self._nvml, gpu))}

    def _with(self, card: Card, gauges: Gauges, process: ProcessId, load: Load) -> Gauges:
        """From inside a container NVML's process numbers may be the host's: then all that is in use is told."""
        own = [held for pid, held in card.processes.items() if pid in load.pids and held is not None]
        if own:
            self._alone.add(process)
        told = process in self._alone
        held = sum(own) if told else card.used
        return replace(
            gauges, gpu=card.use, gpu_memory=rounded(held, 3), gpu_total=rounded(card.total, 3), gpu_shared=not told
        )

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None


@dataclass(frozen=True)
class Card:
    """One GPU (or MIG instance) as NVML tells it now; sizes in bytes."""

    use: int | None
    used: int
    total: int
    processes: dict[int, int | None]

    @staticmethod
    def of(nvml: Nvml, uuid: str) -> Card | None:
        """None for one that is not there, or has fallen off its bus."""
        device = nvml.find(uuid)
        memory = nvml.memory(device) if device is not None else None
        if device is None or memory is None:
            return None
        return Card(nvml.utilisation(device), *memory, nvml.processes(device))
