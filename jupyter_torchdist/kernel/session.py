"""What this kernel remembers between cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..client.job import Job

last: Job | None = None
"""``td.last``: the job that a cell of this kernel started or attached to last."""
