"""Directories of ``--sync`` on their way to a node: only files that differ there go, as blobs do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..protocol.paths import safe_name
from ..protocol.plan import Plan
from ..protocol.trees import tree


def synced(plan: Plan) -> dict[str, Any]:
    """What a node is to compare with what it has. Raises ``OptionError`` when a directory has changed for the worse."""
    if not plan.sync:
        return {}
    return {"trees": [tree(path, plan.cwd, again=False).to_json() for path in plan.sync], "cwd": plan.cwd}


_NAME = re.compile(r"sync-(\d+)-(\d+)")


def is_synced(name: str) -> bool:
    """Whether it is a node's name of such a file, and no digest."""
    return _NAME.fullmatch(name) is not None


def source(plan: Plan, blobs: Path, name: str) -> Path:
    """The file that a node calls ``sync-0-17``, or the blob with this digest."""
    if not (found := _NAME.fullmatch(name)):
        return blobs / safe_name(name)
    path = plan.sync[int(found[1])]
    return Path(path, tree(path, plan.cwd, again=False).files[int(found[2])].name)
