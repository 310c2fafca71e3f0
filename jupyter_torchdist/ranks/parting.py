"""Keeps destroyed process groups alive for a while, because their destructor may deadlock.

``~ProcessGroupGloo`` joins the group's threads. A thread that has just finished a collective frees data of autograd,
and needs the GIL for that. If C++ has the last reference (DDP's reducer has one, and is freed with the model), the
destructor is called with the GIL held, and both wait forever. So this module keeps a reference: if Python has the last
reference, torch calls the destructor without the GIL.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import torch.distributed as dist

from ..torch_private.collectives import ranks_of_groups

LIMIT = 16
"""Largest number of groups kept: each has threads and sockets. A program may create and destroy hundreds."""

_PAUSE = 0.05
"""Seconds for which we release the GIL, so that the threads of a group can finish after its collectives."""

_PATIENCE = 1.0
"""Seconds to wait for destructors, which wait for collectives that were started but never waited for."""

_kept: list[Any] = []
"""Groups that user code has destroyed, the latest last."""


def install() -> None:
    """Let ``torch.distributed.destroy_process_group`` end communicators as usual, but keep the objects."""
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        groups = _groups(group)
        if _kept and len(_kept) + len(groups) > LIMIT:
            let_go()
        _kept.extend(groups)
        original(group)

    for module in (dist, dist.distributed_c10d):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


def let_go() -> None:
    """Free the kept groups with their ports, threads and files. Takes about a second at most."""
    groups = _taken()
    if groups:
        time.sleep(_PAUSE)
        _free(groups)


def end() -> None:
    """Free the kept groups at the end of the process, without a pause. Takes about a second at most."""
    _free(_taken())


def _groups(group: Any) -> list[Any]:
    """The groups that ``destroy_process_group(group)`` destroys."""
    if group is None or group is dist.group.WORLD:
        return [known for known, _ in ranks_of_groups()]
    return [group]


def _taken() -> list[Any]:
    groups = _kept[:]
    _kept.clear()
    return groups


def _free(groups: list[Any]) -> None:
    """Free groups in a thread: with a collective that other ranks do not join, the destructor waits for its timeout."""
    if groups:
        thread = threading.Thread(target=groups.clear, name="torchdist-parting", daemon=True)
        thread.start()
        thread.join(_PATIENCE)
