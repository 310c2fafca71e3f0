"""What ``doctor`` would say of the hosts of a job, from what its start knows anyway."""

from __future__ import annotations

from collections.abc import Sequence

from ..diagnosis import hosts
from ..protocol.plan import Inventory, Plan

_told: set[str] = set()
"""Notes of earlier jobs of this process: each is said once."""


def notes(plan: Plan, inventories: Sequence[Inventory]) -> list[str]:
    """``warning: box: /dev/shm has 0.1 GB; …``, of the plan's hosts; what an earlier job was told is left out."""
    names = {node.called for node in plan.nodes}
    used = [one for one in inventories if one.host in names]
    found = [
        f"{check.level}: {check.name} of {check.found}; {check.remedy}"
        for check in hosts.at_start(used, nccl=plan.backend == "nccl")
    ]
    new = [note for note in found if note not in _told]
    _told.update(new)
    return new
