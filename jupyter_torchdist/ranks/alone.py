"""Detects ranks that train independent models: backward passes without communication. Writes one note about it.

This happens with a cell for one device without a strategy, and with a library that runs as if there was one process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from . import trainers
from .streams import flight

PASSES = 8
"""After so many backward passes without a collective, the note is written."""

_POINT_TO_POINT = ("send", "recv", "recv_anysource")
_OTHER_WAYS = ("horovod", "mpi4py")
_RECORDED = {"gloo", "nccl"}
"""Backends whose collectives the flight recorder records."""


class Alone:
    """Checks whether this rank has trained without the others.

    ``backwards``: returns the number of backward passes. ``consequence``: effect on the job's values. ``remedy``: what
    to do. ``patient``: the code mentions collectives, which may come at its end, so the note waits until then.
    """

    def __init__(
        self, backwards: Callable[[], int], say: Callable[[str], None], consequence: str, remedy: str, *, patient: bool
    ) -> None:
        self._backwards, self._say, self._patient = backwards, say, patient
        self._consequence, self._remedy = consequence, remedy
        self._lock, self._over = threading.Lock(), not _recorded()
        self._entered = _entered(flight.counts())
        self._patched: list[tuple[str, Any]] = []

    def begin(self) -> None:
        """From now on point-to-point operations count as communication, too. The recorder does not record them."""
        for name in () if self._over else _POINT_TO_POINT:
            original = getattr(dist.ProcessGroup, name)
            self._patched.append((name, original))
            setattr(dist.ProcessGroup, name, self._noting(original))

    def look(self, counts: dict[flight.Group, flight.Counts]) -> None:
        """Check while user code runs. May be called in any thread."""
        if not self._patient:
            self._decide(counts)

    def end(self) -> None:
        """Check at the end of user code, and remove the patches."""
        self._decide(flight.counts())
        self._over = True
        for name, original in self._patched:
            setattr(dist.ProcessGroup, name, original)

    def _decide(self, counts: dict[flight.Group, flight.Counts]) -> None:
        with self._lock:
            if self._over or not dist.is_initialized():  # the counts are gone with the process group
                return
            passes = self._backwards()
            if _entered(counts) > self._entered or _communicates_otherwise():
                self._over = True
            elif passes >= PASSES:
                self._over = True
                self._say(
                    f"{passes} backward passes and no collective: each of the {dist.get_world_size()} ranks trains a "
                    f"model of its own, {self._consequence}. {trainers.why_alone() or self._remedy}"
                )

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._over = True
            return original(*args, **kwargs)

        return call


def _entered(counts: dict[flight.Group, flight.Counts]) -> int:
    return sum(count.entered for count in counts.values())


def _recorded() -> bool:
    """Whether the recorder would record a collective."""
    if "0" in (os.environ.get("TORCH_FR_BUFFER_SIZE"), os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")):
        return False
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return {part.rpartition(":")[2] for part in dist.get_backend_config().split(",")} <= _RECORDED


def _communicates_otherwise() -> bool:
    rpc: Any = sys.modules.get("torch.distributed.rpc")
    called = getattr(rpc, "_is_current_rpc_agent_set", None)
    return bool(called and called()) or any(name in sys.modules for name in _OTHER_WAYS)
