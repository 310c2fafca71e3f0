"""Whose turn it is on the GPUs of this machine: the first of the jobs that could take the same GPUs takes them.

It takes them as soon as enough are free. The jobs' places are files (``protocol/machine/tickets.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planning.topology import free_of, occupants
from ..protocol.machine import tickets
from ..protocol.plan import Gpu


@dataclass(frozen=True)
class Turn:
    """``gpus`` if it is the job's turn; else its place in the queue, from 1, and why it waits."""

    gpus: tuple[str, ...] = ()
    position: int = 1
    reason: str = ""


def turn(job: str, present: Sequence[Gpu]) -> Turn | None:
    """Whether it is the job's turn on the machine's GPUs; None if the job has no place any more."""
    known = tickets.counting()
    asked = next((ticket.asked for ticket in known if ticket.asked.job == job), None)
    if asked is None:
        return None
    first = tickets.ahead(job, asked.gpus, known)
    mine = tuple(gpu for gpu in present if gpu.uuid in asked.gpus)
    busy = {gpu: ticket.whose for ticket in known if ticket.asked.job != job for gpu in ticket.granted}
    free = free_of(mine, busy, set(asked.own))
    if not first and len(free) >= asked.count:
        chosen = sorted(sorted(free, key=lambda gpu: not gpu.idle)[: asked.count], key=lambda gpu: gpu.index)
        return Turn(tuple(gpu.uuid for gpu in chosen))
    words = [f"after job {first[-1].whose}"] if first else []
    words += [f"{len(free)} free, {asked.count} wanted", occupants(mine, busy, set(asked.own))]
    return Turn((), len(first) + 1, "; ".join(filter(None, words)))
