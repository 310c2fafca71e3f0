"""What this kernel remembers between cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ..client.job import Job

last: Job | None = None
"""``td.last``: the job that a cell of this kernel started or attached to last."""


def somebody_is_there(ip: InteractiveShell) -> bool:
    """Whether ``input()`` would be answered: programs that run notebooks declare that it would not."""
    parent: Any = getattr(ip, "get_parent", dict)() or {}
    return bool(parent.get("content", {}).get("allow_stdin"))
