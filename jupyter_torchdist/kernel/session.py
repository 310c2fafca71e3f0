"""What this kernel remembers between cells, and what its front end has told it."""

from __future__ import annotations

import os
from pathlib import Path
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


def notebook(ip: InteractiveShell) -> str:
    """The notebook's path from the front end; empty if it gives none (a plain terminal, nbclient)."""
    told = os.environ.get("JPY_SESSION_NAME") or ip.user_ns.get("__vsc_ipynb_file__") or ""
    return told if isinstance(told, str) else ""


def notebook_directory(ip: InteractiveShell) -> Path:
    """The directory of the notebook, else the directory in which the shell was started."""
    folder = os.path.dirname(notebook(ip))
    return Path(folder if folder and os.path.isdir(folder) else getattr(ip, "starting_dir", "") or os.getcwd())
