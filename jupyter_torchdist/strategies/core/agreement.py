"""Checks of a model before it is distributed: it is the same on all ranks, and not distributed already."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...protocol.errors import StrategyError
from .context import ParallelContext
from .ownership import own_class

_WRAPPERS = (FSDPModule, Fsdp1, DistributedDataParallel)

T = TypeVar("T")
Line = tuple[str, str, str]
"""Kind and name of a parameter or buffer, and a text that must be equal on all ranks (shape, dtype, ties)."""


def check_untouched(model: nn.Module) -> None:
    """Raise ``StrategyError`` if a part of the model is already sharded or replicated."""
    for name, module in model.named_modules():
        if isinstance(module, _WRAPPERS) or type(module).__bases__[0].__module__.startswith("torch.distributed."):
            where = f"{type(model).__name__}.{name}" if name else type(model).__name__
            raise StrategyError(
                f"{where} is distributed already",
                "leave it to --strategy, or run your own distributed code with --strategy none",
            )


def of_every_rank(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """All-gather ``value`` over ``group`` (default: all ranks), in rank order. A collective call."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_not_scripted(modules: Iterable[nn.Module]) -> None:
    """Raise ``StrategyError`` for a torch.jit script: Python cannot reach its parts."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise StrategyError(
                f"{module.original_name} is a torch.jit script: its layers cannot be followed, nor its parameters "
                "replaced",
                "train the nn.Module itself (torch.compile makes it fast), and script what comes back",
            )


def check_grown(model: nn.Module, divided: Collection[nn.Module], pending: Collection[Tensor]) -> None:
    """Raise ``StrategyError`` for layers that were added to a model after a part of the model was ``divided``."""
    if not any(module in divided for module in model.modules()):
        return
    late = [name for name, parameter in model.named_parameters() if parameter in pending]
    raise StrategyError(
        f"{', '.join(late[:3])} came into the {own_class(model).__name__} after it had been divided among the ranks",
        "train it with its new layers in the next cell (between cells a model is whole), or use --strategy ddp",
    )


def check_not_reused(model: nn.Module, divided: Collection[nn.Module]) -> None:
    """Raise ``StrategyError`` for a model with layers that were sharded as a part of another model."""
    if any(module in divided for module in model.modules()):
        return
    reused = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if reused:
        raise StrategyError(
            f"{reused[0]} of {type(model).__name__} is sharded already, as a part of another model",
            "use --strategy ddp, or train the new model in the next cell (between cells models are whole)",
        )


def same_on_all_ranks(model: nn.Module, context: ParallelContext, group: dist.ProcessGroup | None = None) -> None:
    """Compare names, shapes, types, ties and ``requires_grad`` across ranks; all ranks call it before sharding.

    Raises ``StrategyError`` on every rank, with the first difference from the first rank. If all ranks agree, the
    cost is one collective of 32 bytes. ``group`` is all ranks by default.
    """
    lines = _lines(model)
    digest = hashlib.sha256(repr(lines).encode()).digest()
    mine = torch.tensor([*digest], dtype=torch.uint8, device=context.device)
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, mine, group=group)
    if all(torch.equal(others[0], other) for other in others):
        return
    first, *models = of_every_rank((dist.get_rank(), lines), group)
    rank, other = next((rank, theirs) for rank, theirs in models if theirs != first[1])
    raise StrategyError(
        f"the ranks built different models: {_difference(*first, rank, other)}",
        "what a cell builds must not depend on the rank, the time or random numbers",
    )


def _lines(model: nn.Module) -> list[Line]:
    first: dict[int, str] = {}
    lines: list[Line] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(parameter), name)
        note = "" if parameter.requires_grad else ", frozen"
        note += "" if tied == name else f", tied to {tied}"
        lines.append(("parameter", name, _of(parameter) + note))
    lines += [("buffer", name, _of(buffer)) for name, buffer in model.named_buffers(remove_duplicate=False)]
    return lines


def _of(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _difference(one: int, ours: Sequence[Line], other: int, theirs: Sequence[Line]) -> str:
    for mine, its in zip(ours, theirs, strict=False):
        if mine != its:
            if mine[:2] == its[:2]:
                return f"{mine[0]} {mine[1]} is {mine[2]} on rank {one} and {its[2]} on rank {other}"
            return f"{mine[0]} {mine[1]} of rank {one} stands where rank {other} has {its[0]} {its[1]}"
    longer, rank, lacking = (ours, one, other) if len(ours) > len(theirs) else (theirs, other, one)
    kind, name, _ = longer[min(len(ours), len(theirs))]
    return f"{kind} {name} of rank {rank} is missing on rank {lacking}"
