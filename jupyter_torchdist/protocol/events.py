"""Changes of a job's state, one JSON line each. Readers ignore unknown kinds.

A process writes its own ``*.events`` file without ``seq`` and ``node``; the driver adds both when it copies the line
into the journal.

===================  =====================================================================================
kind                 data
===================  =====================================================================================
job.submitted        world_size, nodes, name, label
job.driver           process (ProcessId): a driver took the job; another driver if the first one died
job.starting         attempt, fresh
job.launched         token, attempt: the launcher's name for its submission, if it has one
job.engine           state (queued, running, ended), position, reason: the launcher's report on its submission
job.running          every rank runs user code
job.stopping         reason (cancelled, failed, timed_out, lost), by
job.note             text: something the user should read
job.ended            state (a final ``JobState.state``), reason (a sentence), first_failure (rank or None)
node.up              inventory, agent (ProcessId)
node.lost            reason
launcher.started     process (ProcessId)
launcher.rendezvous  address, port: where the first node's store listens
launcher.child       pid, code, why, stopped (by the engine itself; null if it does not report this): a rank's
                     process ended
launcher.ended       codes {pid: exit code}, error (text, empty when all is well)
node.ended           error: a check found no living process of the job on the node
rank.started         process (ProcessId), local_rank
rank.ready           user code begins; the process group is up
rank.waiting         operation, group, number, since, size, members (``Waiting``), counts: user code has been in one
                     collective for seconds
rank.resumed         this collective is over
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

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import codec


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

    @staticmethod
    def from_json(value: dict[str, Any]) -> Event:
        rest = {key: item for key, item in value.items() if key not in ("kind", "t", "node", "rank", "seq")}
        return Event(
            kind=str(value["kind"]),
            t=float(value.get("t") or 0.0),
            node=value.get("node"),
            rank=value.get("rank"),
            seq=int(value.get("seq") or 0),
            data=rest,
        )


def parse_lines(data: bytes) -> tuple[list[Event], int]:
    """Events of the complete lines in ``data``, and the number of bytes of these lines. Damaged lines are skipped."""
    end = data.rfind(b"\n") + 1
    return list(_events(data[:end])), end


def _events(data: bytes) -> Iterator[Event]:
    for line in data.splitlines():
        try:
            yield Event.from_json(codec.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


@dataclass(frozen=True)
class ErrorRecord:
    """An exception of a rank as text, which does not need its class. ``frames`` run from outer to inner."""

    type: str
    module: str
    message: str
    text: str
    """The complete traceback with causes and notes, as Python prints it (the user's frames only)."""
    frames: tuple[tuple[str, int, str, str], ...] = ()
    """(file, line number that the user sees, function, source line)."""
    t: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "module": self.module,
            "message": self.message,
            "text": self.text,
            "frames": [list(frame) for frame in self.frames],
            "t": self.t,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> ErrorRecord:
        frames = tuple((str(f[0]), int(f[1]), str(f[2]), str(f[3])) for f in value.get("frames", ()))
        kind, module, message, text = (str(value[key]) for key in ("type", "module", "message", "text"))
        return ErrorRecord(kind, module, message, text, frames, float(value["t"]))

    @property
    def title(self) -> str:
        """``ValueError: text``, the last line of a traceback."""
        return f"{self.type}: {self.message}" if self.message else self.type
