"""What ``--plan`` prints."""

from __future__ import annotations

from ..client.submit import Request, prepare
from ..views import plan_tables, wording


def text(request: Request) -> str:
    """The plan, the memory that a strategy needs, and the receipt. No rank is started."""
    prepared = prepare(request)
    receipt = wording.indent(plan_tables.receipt_table(prepared.capture.receipt))
    notes = [f"note: {note}" for note in prepared.capture.notes]
    memory = prepared.memory()
    needed = [] if memory is None else [plan_tables.memory_table(memory)]
    return "\n\n".join([plan_tables.plan_table(prepared.plan), *needed, f"captured:\n{receipt}", *notes])
