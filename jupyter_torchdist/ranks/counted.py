"""Objects of libraries that counted the processes when they were made, in the notebook: one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

_KINDS = (
    ("transformers.training_args", "TrainingArguments"),
    ("transformers.trainer", "Trainer"),
    ("accelerate.accelerator", "Accelerator"),
)


def note(names: Mapping[str, Any], world_size: int) -> str:
    """A line that names such objects among ``names``; empty if there are none, or if one process is right."""
    found = dict(_found(names)) if world_size > 1 else {}
    if not found:
        return ""
    one = len(found) == 1
    words = ", ".join(f"{name} ({kind})" for name, kind in found.items())
    return (
        f"{words} {'was' if one else 'were'} made in an earlier cell, for one process: each rank trains alone with "
        f"{'it' if one else 'them'}. Make {'it' if one else 'them'} in this cell"
    )


def _found(names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kinds = tuple(
        getattr(sys.modules[module], name) for module, name in _KINDS if hasattr(sys.modules.get(module), name)
    )
    for name, value in names.items():
        if kinds and issubclass(type(value), kinds):
            yield name, type(value).__name__
