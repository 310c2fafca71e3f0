"""CPU, memory and GPU use of this node's ranks: measured every 2 seconds in a thread, written to a file per job.

The thread reads ``/proc`` and NVML, which may be slow, and touches no file of a job. The agent's loop writes the
results. It skips a job that has ended in the meantime, since the job's directory may be removed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from ..protocol import codec
from ..protocol.disk import read_plain
from ..protocol.gauges import NETWORK, Gauges, Traffic, rounded
from ..protocol.machine.interfaces import Interfaces
from ..protocol.machine.nvml import Nvml
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.process import ProcessId
from ..ranks.streams import pace
from .loads import LOOK_SECONDS, Load, Loads
from .nodejob import NodeJob
from .shipping.replica import publish_private

FIRST_SECONDS = 1.0
"""The longest delay until the first rank of an idle node is measured. Most shorter cells are never measured."""


@dataclass(frozen=True)
class Subject:
    """One rank to measure, and its GPU (empty: it has none)."""

    job: str
    rank: int
    process: ProcessId
    gpu: str


@dataclass(frozen=True)
class Seen:
    """What was measured of one rank, and whether it works (None: not known yet)."""

    gauges: Gauges
    works: bool | None


Found = dict[Subject, Seen]
Network = dict[str, Traffic]
"""By interface of this host."""


class GaugeWatch:
    """The side of the agent's loop: it lists the ranks and writes the results. It never waits for the thread."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[list[Subject] | None] = SimpleQueue()
        self._found: SimpleQueue[tuple[Found, Network]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._looking = False
        self._due = 0.0
        self._boards: dict[str, Board] = {}

    def turn(self, jobs: Mapping[str, NodeJob], now: float) -> None:
        """Write new results, and ask the thread again when it is time."""
        with contextlib.suppress(Empty):
            self._write(*self._found.get_nowait(), jobs)
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
            self._thread.join(1.0)  # a GPU driver that hangs may block it forever: it is a daemon

    def _ask(self, subjects: list[Subject]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchdist-gauges", daemon=True)
            self._thread.start()
        self._looking = True
        self._asked.put(subjects)

    def _run(self) -> None:
        look, interfaces = Look(), Interfaces()
        while (subjects := self._asked.get()) is not None:
            found: Found = {}
            network: Network = {}
            with contextlib.suppress(Exception):  # top level of this thread: failed measurements are dropped
                network = interfaces.look(time.monotonic())
                found = look.at(subjects, time.monotonic())
            self._found.put((found, network))
        look.close()

    def _living(self, name: str, job: NodeJob) -> list[Subject]:
        if job.state == "ended":
            return []
        if name not in self._boards:
            self._boards[name] = Board(job.paths, job.node)
        gpus = self._boards[name].gpus
        return [Subject(name, rank, process, gpus.get(rank, "")) for rank, process in job.living.items()]

    def _write(self, found: Found, network: Network, jobs: Mapping[str, NodeJob]) -> None:
        for name in {subject.job for subject in found}:
            job, board = jobs.get(name), self._boards.get(name)
            if job is not None and job.state != "ended" and board is not None:
                its = {subject.rank: seen for subject, seen in found.items() if subject.job == name}
                paces = pace.read(job.files.pace, job.ranks)
                gauges = {rank: replace(seen.gauges, **paces.get(rank, {})) for rank, seen in its.items()}
                board.write(gauges, network)
                job.measured({rank: seen.works for rank, seen in its.items() if seen.works is not None})


class Board:
    """One job's file: the latest values of each rank, and the highest so far; what goes over the host's network."""

    def __init__(self, paths: JobPaths, node: str) -> None:
        self._path = paths.node(node).gauges
        self._latest: dict[int, Gauges] = {}
        self._network: Network = {}
        self.gpus: dict[int, str] = {}
        with contextlib.suppress(OSError, ValueError):
            self.gpus = Plan.from_json(codec.loads(read_plain(paths.plan))).gpu_of_rank()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # from an earlier agent
            written = codec.loads(read_plain(self._path))
            self._latest = {int(rank): Gauges.from_json(value) for rank, value in written.items() if rank != NETWORK}

    def write(self, found: Mapping[int, Gauges], network: Network | None = None) -> None:
        """Replace the file if a value changed. When the disk is full, the old file remains."""
        latest = self._latest | {rank: gauges.after(self._latest.get(rank)) for rank, gauges in found.items()}
        if latest == self._latest and (network or {}) == self._network:
            return
        self._latest, self._network = latest, network or {}
        words: dict[str, object] = {str(rank): gauges.to_json() for rank, gauges in sorted(latest.items())}
        words[NETWORK] = {name: traffic.to_json() for name, traffic in self._network.items()}
        with contextlib.suppress(OSError):
            publish_private(self._path, codec.dumps(words).encode("ascii") + b"\n")


class Look:
    """The side of the thread: reads ``/proc``, and NVML while a rank has a GPU."""

    def __init__(self) -> None:
        self._loads = Loads()
        self._nvml: Nvml | None = None
        self._alone: set[ProcessId] = set()
        """Ranks whose processes NVML has listed once: from then on NVML's memory per process is used for them."""
        self._first: dict[ProcessId, Card] = {}
        self._before: dict[str, tuple[float, Card]] = {}

    def at(self, subjects: list[Subject], now: float) -> Found:
        """The values of each rank that is alive."""
        loads = self._loads.look([subject.process for subject in subjects], now)
        self._alone &= loads.keys()
        self._first = {process: card for process, card in self._first.items() if process in loads}
        cards = self._cards({subject.gpu for subject in subjects if subject.gpu})
        xids = self._nvml.xids() if self._nvml is not None else {}
        rates = {gpu: self._over_nvlink(gpu, card, now) for gpu, card in cards.items()}
        found = {}
        for subject in subjects:
            if load := loads.get(subject.process):
                cpu = None if load.cpu is None else rounded(load.cpu, 2)
                gauges = Gauges(cpu, rounded(load.memory, 3))
                card = cards.get(subject.gpu)
                if card is not None:
                    gauges = self._with(card, gauges, subject.process, load)
                    received, sent = rates[subject.gpu]
                    gauges = replace(gauges, nvlink_received=received, nvlink_sent=sent)
                gauges = replace(gauges, gpu_xid=xids.get(subject.gpu))  # told of a card that is gone, too
                found[subject] = Seen(gauges, load.works)
        return found

    def _cards(self, gpus: set[str]) -> dict[str, Card]:
        if not gpus:
            self.close()
            return {}
        try:
            self._nvml = self._nvml or Nvml()
        except OSError:
            return {}
        return {gpu: card for gpu in gpus if (card := Card.of(self._nvml, gpu, new=gpu not in self._before))}

    def _over_nvlink(self, gpu: str, card: Card, now: float) -> tuple[int, int] | tuple[None, None]:
        """Received and sent since the look before, in bytes per second."""
        earlier, before = self._before.get(gpu, (now, card))
        self._before[gpu] = now, card
        if card.nvlink is None or before.nvlink is None or now <= earlier:
            return None, None
        received, sent = (after - then for after, then in zip(card.nvlink, before.nvlink, strict=True))
        return rounded(max(received, 0) / (now - earlier), 2), rounded(max(sent, 0) / (now - earlier), 2)

    def _with(self, card: Card, gauges: Gauges, process: ProcessId, load: Load) -> Gauges:
        """Add the GPU's values. In a container NVML may report the host's pids: then all memory in use is reported."""
        own = [held for pid, held in card.processes.items() if pid in load.pids and held is not None]
        if own:
            self._alone.add(process)
        told = process in self._alone
        held = sum(own) if told else card.used
        first = self._first.setdefault(process, card)
        return replace(
            gauges,
            gpu=card.use,
            gpu_memory=rounded(held, 3),
            gpu_total=rounded(card.total, 3),
            gpu_shared=not told,
            gpu_clock=card.clock,
            gpu_temperature=card.temperature,
            gpu_slowed=card.slowed,
            gpu_errors=_more(card.errors, first.errors),
            nvlink_errors=_more(card.nvlink_errors, first.nvlink_errors),
        )

    def close(self) -> None:
        self._before.clear()
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None


@dataclass(frozen=True)
class Card:
    """What NVML reports about one GPU (or MIG instance) now; sizes in bytes."""

    use: int | None
    used: int
    total: int
    processes: dict[int, int | None]
    clock: int | None
    temperature: int | None
    slowed: str
    errors: int | None
    nvlink: tuple[int, int] | None
    """Received and sent, since the driver was loaded."""
    nvlink_errors: int | None

    @staticmethod
    def of(nvml: Nvml, uuid: str, new: bool) -> Card | None:
        """None when the GPU is not there, or has fallen off the bus. ``new``: its errors are not watched yet."""
        device = nvml.find(uuid)
        memory = nvml.memory(device) if device is not None else None
        if device is None or memory is None:
            return None
        if new:
            nvml.watch(device)
        known = nvml.utilisation(device), *memory, nvml.processes(device)
        health = nvml.slowed(device), nvml.memory_errors(device), nvml.nvlink(device), nvml.nvlink_errors(device)
        return Card(*known, nvml.clock(device), nvml.temperature(device), *health)


def _more(now: int | None, first: int | None) -> int | None:
    return None if now is None or first is None else max(now - first, 0)
