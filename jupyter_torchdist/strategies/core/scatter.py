"""Cuts a rank's rows out of a batch, and joins the rows of all ranks, differentiably.

Outside the forward of a distributed model, every rank computes the same (*replicated*). Inside, each rank computes its
own rows (*a part*). Gradients within a part are scaled by the number of ranks: DDP and FSDP take their mean over the
ranks, which is then the gradient of a single device. So where a gradient leaves a part for a replicated tensor, it is
averaged (``cut_rows``, ``averaged``). Where it enters a part, it is multiplied by the number of ranks (``join_rows``).
All functions are differentiable any number of times, and all ranks of ``group`` call them in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup


def rows_of(rank: int, ranks: int, total: int) -> slice:
    """The samples of ``rank``, of ``total`` samples; the first ranks may have one more."""
    each, more = divmod(total, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


@dataclass(frozen=True)
class BatchShard:
    """``total`` samples divided among the ranks of ``group`` as evenly as possible; ``each``: rows per sample."""

    total: int
    group: Group
    each: int = 1

    @property
    def ranks(self) -> int:
        return int(self.group.size())

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each rank; the first ranks may have one sample more."""
        samples, more = divmod(self.total, self.ranks)
        return [self.each * (samples + (rank < more)) for rank in range(self.ranks)]

    @property
    def weight(self) -> float:
        """This rank's fraction of all samples."""
        mine: slice[int, int, None] = self.mine
        return float(mine.stop - mine.start) / (self.each * self.total)

    @property
    def mine(self) -> slice:
        """This rank's rows."""
        samples = rows_of(int(self.group.rank()), self.ranks, self.total)
        return slice(self.each * samples.start, self.each * samples.stop)


def cut_rows(whole: torch.Tensor, rows: BatchShard, dim: int = 0) -> torch.Tensor:
    """This rank's part of a replicated tensor. Backward: joins the parts' gradients, divided by the number of ranks."""
    part: torch.Tensor = _Cut.apply(whole, rows, dim)  # type: ignore[no-untyped-call]
    return part


def join_rows(part: torch.Tensor, rows: BatchShard, dim: int = 0, *, exact: bool = True) -> torch.Tensor:
    """The ranks' parts as one replicated tensor. Backward: this rank's rows, times the number of ranks.

    ``exact`` false: the incoming gradient may differ between ranks, and is averaged first.
    """
    whole: torch.Tensor = _Join.apply(part, rows, dim, exact)  # type: ignore[no-untyped-call]
    return whole


def averaged(value: torch.Tensor, group: Group) -> torch.Tensor:
    """The mean over the ranks of tensors of one shape. Backward: the mean of the gradients."""
    mean: torch.Tensor = _Mean.apply(value, group)  # type: ignore[no-untyped-call]
    return mean


def weighted(value: torch.Tensor, weight: float | torch.Tensor, group: Group) -> torch.Tensor:
    """``Σ weight_r · value_r`` over the ranks, a replicated tensor."""
    return averaged(weighed(value, weight * group.size()), group)


def weighed(value: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    """``weight · value``. A mean over no targets is 0 / 0 with weight 0: the result is 0."""
    product = value * weight
    return torch.where(weight == 0, 0.0, product) if isinstance(weight, torch.Tensor) else product


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: BatchShard, dim: int) -> torch.Tensor:
        ctx.rows, ctx.dim = rows, dim
        return whole.narrow(dim, rows.mine.start, rows.mine.stop - rows.mine.start).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return join_rows(grads[0], ctx.rows, ctx.dim) / ctx.rows.ranks, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: BatchShard, dim: int, exact: bool) -> torch.Tensor:
        ctx.rows, ctx.dim, ctx.exact = rows, dim, exact
        return _gathered(part, rows, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole = grads[0] if ctx.exact else averaged(grads[0], ctx.rows.group)
        return cut_rows(whole, ctx.rows, ctx.dim) * ctx.rows.ranks, None, None, None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        total = value.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total / group.size()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return averaged(grads[0], ctx.group), None


def _gathered(part: torch.Tensor, rows: BatchShard, dim: int) -> torch.Tensor:
    """All-gather parts of uneven sizes: padded to the largest, booleans as bytes, which every backend supports."""
    front = part.detach().movedim(dim, 0)
    most = max(rows.sizes)
    if len(front) < most:
        front = torch.cat([front, front.new_zeros(most - len(front), *front.shape[1:])])
    front = front.contiguous()
    sent = front.view(torch.uint8) if front.dtype == torch.bool else front
    sent = torch.view_as_real(sent) if sent.is_complex() else sent
    received = [torch.empty_like(sent) for _ in range(rows.ranks)]
    dist.all_gather(received, sent, group=rows.group)
    if front.is_complex():
        received = [torch.view_as_complex(block) for block in received]
    blocks = [block.view(front.dtype)[:size] for block, size in zip(received, rows.sizes, strict=True)]
    # Never a view: user code may change the outputs of its model in place.
    return torch.cat([block.movedim(0, dim) for block in blocks], dim)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``change`` to the tensors in ``value``: rebuilds containers, named tuples and dataclasses only."""
    return map_parts(value, torch.Tensor, change)


def map_parts(
    value: Any, kind: type, change: Callable[[Any], Any], others: Callable[[Any], Any] = lambda other: other
) -> Any:
    """As ``map_tensors``, for objects of ``kind``; ``others`` gets the objects that are neither that nor containers."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_parts(item, kind, change, others) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_parts(item, kind, change, others) for item in value)
    if isinstance(value, dict):
        changed = {key: map_parts(item, kind, change, others) for key, item in value.items()}
        return changed if type(value) is dict else _like(value, changed)
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        fields = value.__dataclass_fields__
        return _like(value, {name: map_parts(getattr(value, name), kind, change, others) for name in fields})
    return others(value)


def to_device(value: Any, device: torch.device) -> Any:
    """Move CPU tensors in ``value`` to ``device``, if it is a GPU."""
    if device.type == "cpu":
        return value
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True) if not tensor.is_cuda else tensor)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that ``map_tensors`` would change, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def map_others(value: Any, change: Callable[[Any], Any]) -> Any:
    """As ``map_tensors``, for objects that are neither tensors nor containers."""
    return map_parts(value, torch.Tensor, lambda tensor: tensor, change)


def others_in(value: Any) -> list[Any]:
    """The objects that ``map_others`` would change."""
    found: list[Any] = []
    map_others(value, found.append)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for item in value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            _collect(getattr(value, name), found)


def _like(value: Any, items: dict[str, Any]) -> Any:
    """A copy of a mapping or dataclass with other items (the outputs of Transformers are both at once)."""
    other = copy.copy(value)
    for name, item in items.items():
        if isinstance(other, dict):
            other[name] = item
        else:
            object.__setattr__(other, name, item)
    return other
