"""Changes of a job's state, one JSON line each. Readers ignore unknown kinds.

A process writes its own ``*.events`` file without ``seq`` and ``node``; the driver gives both when it takes
the line into the journal. User code can write into these files: an event of a file counts only if its data has the
types of ``KINDS``, and if the owner of the file may say it (``Source``).

===================  =====================================================================================
kind                 data
===================  =====================================================================================
job.submitted        world_size, nodes, name, label
job.driver           process (ProcessId): a driver took the job; another driver if the first one died
job.starting         attempt, fresh, restarts: how often the ranks were started again after a failure; world_size
job.launched         token, attempt: the launcher's name for its submission, if it has one
job.engine           state (queued, running, ended), position, reason: the launcher's report on its submission
job.stage            text: what the start of a job on hosts waits for; seconds, if it is over; percent, of the last one
job.running          every rank runs user code
job.stopping         reason (cancelled, failed, timed_out, lost), by
job.stalled          since (epoch), finding (``Finding``: who holds up whom, and where), ends (the job is ended because
                     of it): no rank makes progress
job.resumed          a rank makes progress again
job.note             text: something the user should read
job.ended            state (a final ``JobState.state``), reason (a sentence), first_failure (rank or None)
node.up              agent (ProcessId), restarts; of an attempt that the nodes began while no driver was connected also
                     attempt, without (the nodes that were missed), since, died (``wire/again.py``)
node.lost            reason
node.clock           ahead: seconds that the node's clock is ahead of the driver's, when a profile begins; within: the
                     largest error
launcher.started     process (ProcessId), attempt, restarts
launcher.rendezvous  address, port: where the first node's store listens
launcher.child       pid, code, why, stopped (by the engine itself; null if it does not report this): a rank's
                     process ended
launcher.ended       codes {pid: exit code}, error (text, empty when all is well)
node.missed          nodes, seconds: while no driver was connected, nothing was heard of these nodes for so long, so the
                     agent ends the ranks
node.expiring        reason: the engine will soon end what runs on the node, so the agent ends the ranks
node.ended           error: a check found no living process of the job on the node
rank.started         process (ProcessId), local_rank, restarts
rank.ready           user code begins; the process group is up
rank.proving         seconds (0: it goes on): the strategy follows the first steps, to prove that it may divide them
rank.waiting         operation, group, number, since, size, members (``Waiting``), counts: user code has been in one
                     collective for seconds
rank.resumed         this collective is over
rank.place           place: where its main thread is (empty: it did not answer), while ranks wait or on request;
                     begin, end: the bytes of its file of stacks that show it
rank.profiled        profile (``Profiled``): its part of a profile that a client asked for, or why it has none
rank.entered         counts {group: how many of its collectives this rank has entered}: while another rank waits
rank.failed          error (``ErrorRecord``)
rank.interrupted     user code was stopped by KeyboardInterrupt
rank.result          names, left ([name, reason]…), size: values of this rank are published
rank.ending          user code and all collective work of this rank are finished (for the agent only)
rank.done            user code and results are finished
rank.dropped         lines: output lost to a full disk
rank.exited          code (negative: a signal), why (the end of a sentence: ``was killed (SIGKILL)``),
                     state: done, failed, killed, or stopped (because of another rank, or on request)
===================  =====================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from . import codec
from .plan import Died
from .process import ProcessId
from .typed import Malformed, Record, decoder

DRIVER, AGENT, LAUNCHER, RANK = "driver", "agent", "launcher", "rank"
"""Who says what."""

INTERNAL = ("launcher.child", "rank.ending")
"""Events that only the agent needs; they are not written to the journal."""

STARTS = ("node.up", "launcher.started", "rank.started")
"""The first event of each file after a start of the ranks."""

FINAL_STATES = ("succeeded", "failed", "cancelled", "timed_out", "lost")


@dataclass(frozen=True)
class ErrorRecord(Record):
    """An exception of a rank as text, which does not need its class. ``frames`` run from outer to inner."""

    type: str
    module: str
    message: str
    text: str
    """The complete traceback with causes and notes, as Python prints it (the user's frames only)."""
    frames: tuple[tuple[str, int, str, str], ...] = ()
    """(file, line number that the user sees, function, source line)."""
    t: float = 0.0

    @property
    def title(self) -> str:
        """``ValueError: text``, the last line of a traceback."""
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True)
class Evidence(Record):
    """One line of a log. ``number`` counts from 1."""

    file: str
    number: int
    text: str


@dataclass(frozen=True)
class Finding(Record):
    """A cause. ``sentence`` is what a person reads first; ``rank`` and ``node`` are None where no log tells."""

    code: str
    severity: str
    """``fault`` or ``warning``."""
    rank: int | None
    node: str | None
    sentence: str
    cause: str
    remedy: str
    evidence: tuple[Evidence, ...]

    @property
    def advice(self) -> str:
        """What happened, and what to do."""
        return f"{self.sentence}\n  → {self.remedy}"


@dataclass(frozen=True)
class ProfileRequest(Record):
    """What a client asks of all ranks: to profile ``steps`` steps within so many seconds."""

    id: str
    steps: int
    within: float


MOST_STEPS = 1000
"""Of a profile: a rank keeps all that happens in them in its memory."""


def steps(text: str) -> int:
    """How many steps an option asks to profile. Raises ``ValueError`` with what it may be."""
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MOST_STEPS):
        raise ValueError(f"a whole number from 1 to {MOST_STEPS}")
    return int(text)


@dataclass(frozen=True)
class Profiled(Record):
    """One rank's part of a profile. Times are seconds a step; ``steps`` is 0 if it has none."""

    id: str
    asked: int
    """How many steps were asked for."""
    problem: str = ""
    """Why it has fewer."""
    steps: int = 0
    unit: str = ""
    """What ended a step: ``optimizer.step()``."""
    origin: int = 0
    """From when its timeline counts, in microseconds since the epoch."""
    size: int = 0
    """Bytes of its file."""
    step: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    overlap: float = 0.0
    """Communication during which it computes."""
    loading: float = 0.0
    """Waiting for a ``DataLoader``."""
    idle: float = 0.0
    """None of these."""


@dataclass(frozen=True)
class Kind:
    """Who may say an event of this kind, and the types of its data: ``needed``, and what may be left out."""

    by: tuple[str, ...]
    needed: Mapping[str, Any] = field(default_factory=dict)
    may: Mapping[str, Any] = field(default_factory=dict)

    def checked(self, data: dict[str, Any]) -> dict[str, Any]:
        """``data`` with the declared types; fields of a newer version pass. Raises ``Malformed``."""
        if missing := [name for name in self.needed if name not in data]:
            raise Malformed(f"{missing[0]} is missing")
        for name, kind in (*self.needed.items(), *self.may.items()):
            if name in data:
                decoder(kind)(data[name])
        return data


_COUNTS = dict[str, int]
_FAILURE = int | None
_WAITING = {"operation": str, "group": str, "number": int, "since": float, "counts": _COUNTS}
_NAMES, _PAIRS = tuple[str, ...], tuple[tuple[str, str], ...]

KINDS: dict[str, Kind] = {
    "job.submitted": Kind((DRIVER,), may={"world_size": int, "job": str, "name": str | None, "label": str}),
    "job.driver": Kind((DRIVER,), {"process": ProcessId}),
    "job.starting": Kind((DRIVER,), may={"attempt": int, "restarts": int, "world_size": int}),
    "job.launched": Kind((DRIVER,), may={"token": dict[str, Any], "attempt": int}),
    "job.engine": Kind((DRIVER,), {"state": str}, {"position": int | None, "reason": str}),
    "job.stage": Kind((DRIVER,), {"text": str}, {"seconds": float, "percent": int}),
    "job.running": Kind((DRIVER,)),
    "job.stopping": Kind((DRIVER,), may={"reason": str}),
    "job.stalled": Kind((DRIVER,), {"since": float, "finding": Finding, "ends": bool}),
    "job.resumed": Kind((DRIVER,)),
    "job.note": Kind((DRIVER, AGENT, RANK), may={"text": str}),
    "job.ended": Kind(
        (DRIVER,),
        may={
            "state": Literal[FINAL_STATES],
            "reason": str,
            "first_failure": _FAILURE,
            "findings": tuple[Finding, ...],
        },
    ),
    "node.up": Kind(
        (AGENT,),
        may={"agent": ProcessId, "restarts": int, "attempt": int, "without": _NAMES, "since": float, "died": Died},
    ),
    "node.lost": Kind((DRIVER,), may={"reason": str}),
    "node.clock": Kind((DRIVER,), {"ahead": float, "within": float}),
    "node.missed": Kind((AGENT,), {"nodes": tuple[str, ...], "seconds": float}),
    "node.expiring": Kind((AGENT,), {"reason": str}),
    "node.ended": Kind((AGENT,), may={"attempt": int, "error": str}),
    "launcher.started": Kind((LAUNCHER,), {"process": ProcessId}, {"attempt": int, "restarts": int}),
    "launcher.rendezvous": Kind((LAUNCHER,), {"address": str, "port": int}),
    "launcher.child": Kind((LAUNCHER,), {"pid": int, "code": int}, {"why": str, "stopped": bool | None}),
    "launcher.ended": Kind((LAUNCHER,), may={"codes": dict[str, int], "error": str, "attempt": int}),
    "rank.started": Kind((RANK,), {"process": ProcessId}, {"local_rank": int, "restarts": int}),
    "rank.ready": Kind((RANK,)),
    "rank.waiting": Kind((RANK,), _WAITING, {"size": int, "members": tuple[int, ...] | None}),
    "rank.resumed": Kind((RANK,)),
    "rank.entered": Kind((RANK,), {"counts": _COUNTS}),
    "rank.profiled": Kind((RANK,), {"profile": Profiled}),
    "rank.place": Kind((AGENT,), {"place": str}, {"begin": int, "end": int}),
    "rank.failed": Kind((RANK,), {"error": ErrorRecord}),
    "rank.interrupted": Kind((RANK,)),
    "rank.result": Kind((RANK,), may={"names": _NAMES, "left": _PAIRS, "size": int}),
    "rank.ending": Kind((RANK,)),
    "rank.proving": Kind((RANK,), {"seconds": float}),
    "rank.done": Kind((RANK,)),
    "rank.dropped": Kind((RANK,), {"lines": int}),
    "rank.exited": Kind((AGENT,), {"code": int}, {"why": str, "state": Literal["done", "failed", "killed", "stopped"]}),
}


@dataclass(frozen=True)
class Event:
    """One change. ``t`` is in seconds since the epoch, on the clock of the process that wrote it."""

    kind: str
    t: float
    node: str | None = None
    rank: int | None = None
    seq: int = 0
    data: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        value: dict[str, Any] = {"seq": self.seq, "t": self.t, "node": self.node, "rank": self.rank, "kind": self.kind}
        return (codec.dumps({**value, **self.data}) + "\n").encode("ascii")

    @property
    def key(self) -> tuple[float, str, str | None, int | None]:
        """What tells whether a node's event is in the journal already. Words that recur are kept once."""
        return self.t, sys.intern(self.kind), self.node and sys.intern(self.node), self.rank

    @staticmethod
    def from_json(value: Any) -> Event:
        """Raises ``Malformed``."""
        head = decoder(_Head)(value)
        data = {key: item for key, item in value.items() if key not in _HEAD}
        kind = KINDS.get(head.kind)
        return Event(head.kind, head.t, head.node, head.rank, head.seq, kind.checked(data) if kind else data)


@dataclass(frozen=True)
class _Head:
    """What every event has."""

    kind: str
    t: float = 0.0
    node: str | None = None
    rank: int | None = None
    seq: int = 0


_HEAD = frozenset(_Head.__dataclass_fields__)


@dataclass(frozen=True)
class Source:
    """The owner of an ``*.events`` file: ``by`` is AGENT, LAUNCHER or RANK, ``ranks`` those that it speaks of."""

    by: str
    ranks: frozenset[int] = frozenset()

    def may_say(self, event: Event) -> bool:
        """A kind that this version does not know is let through: a newer one wrote it."""
        kind = KINDS.get(event.kind)
        owned = event.rank in self.ranks if event.rank is not None else self.by != RANK
        return owned and (kind is None or self.by in kind.by)


@dataclass(frozen=True)
class Parsed:
    """Events of whole lines, how many bytes those lines took, and how many of them were refused."""

    events: list[Event]
    taken: int
    refused: int = 0
    ahead: Event | None = None
    """With which a later start of the ranks begins. It and what follows were not taken."""


def parse_lines(data: bytes, source: Source | None = None, restarts: int | None = None) -> Parsed:
    """The whole lines in ``data``, of a file that ``source`` owns. Damaged lines are passed over, and counted.

    ``restarts``: how often the ranks were started again, for lines up to a later start; None: all lines.
    """
    end = data.rfind(b"\n") + 1
    events: list[Event] = []
    refused = taken = 0
    for line in data[:end].split(b"\n")[:-1]:
        try:
            event = Event.from_json(codec.loads(line))
        except ValueError:
            refused, taken = refused + 1, taken + len(line) + 1
            continue
        if restarts is not None and event.kind in STARTS and event.data.get("restarts", 0) > restarts:
            return Parsed(events, taken, refused, event)
        taken += len(line) + 1
        if source is None or source.may_say(event):
            events.append(event)
        else:
            refused += 1
    return Parsed(events, end, refused)
