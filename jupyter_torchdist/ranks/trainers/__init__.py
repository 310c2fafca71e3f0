"""Libraries that distribute a training by themselves, and libraries of metrics, in a rank: a file for each kind.

What a library is told here it learns right after its own import; without the library nothing is done. The names of a
library that are not in its documentation stand in its file, with the version in which they were seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...protocol.plan import Plan
from ..afterimport import after_import
from . import accelerate, lightning, metrics, transformers
from .base import TrainerRank

if TYPE_CHECKING:
    import torch


def install(
    plan: Plan,
    number: int,
    device: torch.device,
    log: Callable[[dict[str, Any], Any], None],
    say: Callable[[str], None],
) -> TrainerRank:
    """Prepare the libraries that are imported already, and the others for their import."""
    here = len(plan.node_of(number).ranks)
    rank = TrainerRank(number, plan.world_size, here, len(plan.nodes), device.type == "cpu", log, say)
    for library in (accelerate, transformers, lightning, metrics):
        after_import(library.changes(rank))
    return rank


def why_alone() -> str | None:
    """What to do if a library took the rank for the only process; None if no library did."""
    return accelerate.why_alone() or lightning.why_alone()
