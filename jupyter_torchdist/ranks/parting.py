"""Process groups that were destroyed live on for a while, because their destructor may hang for good.

``~ProcessGroupGloo`` joins the group's threads. One of them that has just finished a collective frees what autograd
noted for it, and needs the GIL for that. When the last reference is C++'s (DDP's reducer has one, and goes with the
model), the destructor is called with the GIL held: neither goes on. So a reference is kept here: when the last one is
Python's, torch calls the destructor without the GIL.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import torch.distributed as dist

from ..torch_private.collectives import ranks_of_groups

LIMIT = 16
"""So many groups are kept: each has threads and sockets. A program may make and destroy hundreds."""

_PAUSE = 0.05
"""Seconds without the GIL in which the threads of a group get it, once its collectives are over."""

_PATIENCE = 1.0
"""Seconds for destructors: they wait for collectives that were begun and never waited for."""

_kept: list[Any] = []
"""Groups that user code has destroyed, the latest last."""


def install() -> None:
    """From here on ``torch.distributed.destroy_process_group`` ends communicators as ever, and keeps the objects."""
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
    """Free what is kept, so that ports, threads and files of it can be had again. Takes seconds at most."""
    groups = _taken()
    if groups:
        time.sleep(_PAUSE)
        _free(groups)


def end() -> None:
    """All groups are destroyed, and this process frees nothing more: no pause. Takes seconds at most."""
    _free(_taken())


def _groups(group: Any) -> list[Any]:
    """The groups that ``destroy_process_group(group)`` ends."""
    if group is None or group is dist.group.WORLD:
        return [known for known, _ in ranks_of_groups()]
    return [group]


def _taken() -> list[Any]:
    groups = _kept[:]
    _kept.clear()
    return groups


def _free(groups: list[Any]) -> None:
    """In a thread, as the destructor of a group with a collective that nobody joins waits for its time limit."""
    if groups:
        thread = threading.Thread(target=groups.clear, name="torchdist-parting", daemon=True)
        thread.start()
        thread.join(_PATIENCE)
