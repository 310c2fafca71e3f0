"""What ``--plan`` gives."""

from __future__ import annotations

from ..client.submit import Request, prepare
from ..views import plan_tables, wording
from .schema import Planned


def answer(request: Request) -> Planned:
    """The plan, the memory that a strategy needs, and the receipt. No rank is started."""
    prepared = prepare(request)
    return Planned(prepared.plan, prepared.memory(), prepared.capture.receipt, prepared.capture.notes)


def text(request: Request) -> str:
    """``answer`` for a cell."""
    return text_of(answer(request))


def text_of(planned: Planned) -> str:
    """The plan, its memory, the receipt and the notes."""
    receipt = wording.indent(plan_tables.receipt_table(planned.captured))
    notes = [f"note: {note}" for note in planned.notes]
    return "\n\n".join([tables(planned), f"captured:\n{receipt}", *notes])


def tables(planned: Planned) -> str:
    """The plan and its memory."""
    needed = [] if planned.memory is None else [plan_tables.memory_table(planned.memory)]
    return "\n\n".join([plan_tables.plan_table(planned.plan), *needed])
