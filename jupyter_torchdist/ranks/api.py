"""``import jupyter_torchdist as td``: the API for code on a rank.

``td.rank``, ``td.local_rank``, ``td.world_size``, ``td.local_world_size``, ``td.node_rank``, ``td.device`` and
``td.is_main`` are read from torchrun's environment at each access. ``td.mesh`` is the ``DeviceMesh`` of the job's
strategy, or None. ``td.dp_rank``, ``td.tp_rank``, ``td.cp_rank`` and ``td.pp_rank`` are this rank's coordinates in it.
(Without a strategy, ``dp_rank`` is the rank.) The same code works in one plain process without the magic: it is rank 0
of 1, and ``log`` and ``progress`` write nothing.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ..strategies.core import rank_context
from .streams.metrics import Recorder

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    is_main: bool
    mesh: DeviceMesh | None
    dp_rank: int
    tp_rank: int
    cp_rank: int
    pp_rank: int

T = TypeVar("T")

__all__ = [
    "barrier",
    "cp_rank",
    "device",
    "dp_rank",
    "gather",
    "is_main",
    "local_rank",
    "local_world_size",
    "log",
    "mesh",
    "node_rank",
    "pp_rank",
    "print",
    "progress",
    "rank",
    "tp_rank",
    "world_size",
]

_recorder = Recorder()


def use(recorder: Recorder) -> None:
    """Called by the worker: set the recorder for ``log`` and ``progress``."""
    global _recorder
    _recorder = recorder


def _number(variable: str, alone: int) -> int:
    return int(os.environ.get(variable, alone))


def _device() -> torch.device:
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", _number("LOCAL_RANK", 0) % max(1, torch.cuda.device_count()))
    return torch.device("cpu")


def _mesh() -> DeviceMesh | None:
    mine = rank_context.current
    return mine.context.mesh if mine is not None and mine.has_mesh else None


def _place(dimension: str, without_mesh: Callable[[], int] = lambda: 0) -> Callable[[], int]:
    def number() -> int:
        found = None if rank_context.current is None else rank_context.current.place(dimension)
        return without_mesh() if found is None else found

    return number


_VALUES: dict[str, Callable[[], Any]] = {
    "rank": lambda: _number("RANK", 0),
    "local_rank": lambda: _number("LOCAL_RANK", 0),
    "world_size": lambda: _number("WORLD_SIZE", 1),
    "local_world_size": lambda: _number("LOCAL_WORLD_SIZE", 1),
    "node_rank": lambda: _number("GROUP_RANK", 0),
    "device": _device,
    "is_main": lambda: _number("RANK", 0) == 0,
    "mesh": _mesh,
    "dp_rank": _place("dp", lambda: _number("RANK", 0)),
    "tp_rank": _place("tp"),
    "cp_rank": _place("cp"),
    "pp_rank": _place("pp"),
}


def __getattr__(name: str) -> Any:
    if name in _VALUES:
        return _VALUES[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def log(*, step: int | None = None, **scalars: Any) -> None:
    """Draw scalars: one curve per name. Accepts numbers, and tensors and arrays with one element.

    A tensor on a GPU is read without waiting for it. A value that is not a number is left out, with one warning.
    ``step`` is the position on the x axis. Without it, points are drawn in the order of the calls.
    """
    _recorder.log(scalars, step)


def progress(iterable: Iterable[T], total: int | None = None, desc: str = "") -> Iterator[T]:
    """The items of ``iterable``, with a progress bar in the notebook: one bar for all ranks of the job."""
    return _recorder.progress(iterable, total, desc)


def print(*values: object, all: bool = False, **options: Any) -> None:
    """``print`` on rank 0 only, or with ``all`` on all ranks, with the rank in front."""
    number = _VALUES["rank"]()
    if all:
        builtins.print(f"[rank {number}]", *values, **options)
    elif number == 0:
        builtins.print(*values, **options)


def barrier() -> None:
    """Wait until every rank has called it."""
    if _distributed():
        import torch.distributed

        torch.distributed.barrier()


def gather(value: T) -> list[T]:
    """``value`` of every rank, in order of rank, on every rank. The values are pickled."""
    if not _distributed():
        return [value]
    import torch.distributed

    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _distributed() -> bool:
    if _number("WORLD_SIZE", 1) == 1 and "RANK" not in os.environ:
        return False
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_initialized()
