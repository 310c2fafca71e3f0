"""Expressions composed at random of what losses are made of: each a list of small steps over a pool of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .losses import Batch, Net

Step = tuple[str, int, int, int]
"""Which operation, on which two tensors of the pool, with which small number."""

Operation = Callable[[Tensor, Tensor, int], Tensor]

OPERATIONS: dict[str, Operation] = {
    "add": lambda a, b, k: a + b,
    "sub": lambda a, b, k: a - b,
    "mul": lambda a, b, k: a * b,
    "div": lambda a, b, k: a / (b.abs() + 0.5),
    "div_plainly": lambda a, b, k: a / b,
    "share": lambda a, b, k: a / b.detach().abs().sum(),
    "share_of_mean": lambda a, b, k: a / b.detach().abs().mean(),
    "ratio": lambda a, b, k: a.sum() / b.detach().exp().sum(),
    "ratio_of_items": lambda a, b, k: a.sum() / b.detach().exp().sum().item(),
    "ratio_floored": lambda a, b, k: a.sum() / (b.detach() > 0).sum().clamp(min=1),
    "scale": lambda a, b, k: a * (0.5 + k),
    "scale_by_whole": lambda a, b, k: a / (k + 1),
    "shift": lambda a, b, k: a + 0.25 * k,
    "shift_from": lambda a, b, k: k - a,
    "over_size": lambda a, b, k: a / a.size(0),
    "over_numel": lambda a, b, k: a.sum() / a.numel(),
    "over_other_size": lambda a, b, k: a / b.size(k % b.dim()),
    "over_len": lambda a, b, k: a.sum() / len(b),
    "tanh": lambda a, b, k: a.tanh(),
    "square": lambda a, b, k: a.pow(2),
    "root": lambda a, b, k: (a.pow(2) + 1).sqrt(),
    "relu": lambda a, b, k: a.relu(),
    "abs": lambda a, b, k: a.abs(),
    "exp": lambda a, b, k: a.tanh().exp(),
    "sum": lambda a, b, k: a.sum(),
    "sum_along": lambda a, b, k: a.sum(k % a.dim()),
    "sum_kept": lambda a, b, k: a.sum(k % a.dim(), keepdim=True),
    "mean": lambda a, b, k: a.mean(),
    "mean_along": lambda a, b, k: a.mean(k % a.dim()),
    "mean_kept": lambda a, b, k: a.mean(k % a.dim(), keepdim=True),
    "max_along": lambda a, b, k: a.amax(k % a.dim()),
    "logsumexp": lambda a, b, k: a.logsumexp(k % a.dim()),
    "softmax": lambda a, b, k: a.softmax(k % a.dim()),
    "norm": lambda a, b, k: a.norm(dim=k % a.dim()),
    "cumsum": lambda a, b, k: a.cumsum(k % a.dim()),
    "sort": lambda a, b, k: a.sort(k % a.dim()).values,
    "var": lambda a, b, k: a.var(k % a.dim(), correction=0),
    "layer_norm": lambda a, b, k: F.layer_norm(a, a.shape[-1:]),
    "normalise": lambda a, b, k: F.normalize(a, dim=k % a.dim()),
    "transpose": lambda a, b, k: a.transpose(0, k % a.dim()),
    "flatten": lambda a, b, k: a.flatten(0, min(1, a.dim() - 1)),
    "flatten_all": lambda a, b, k: a.flatten(),
    "unsqueeze": lambda a, b, k: a.unsqueeze(k % (a.dim() + 1)),
    "squeeze": lambda a, b, k: a.squeeze(),
    "view_halves": lambda a, b, k: a.reshape(*a.shape[:-1], 2, -1),
    "view_like": lambda a, b, k: a.reshape(b.shape),
    "expand_as": lambda a, b, k: a.expand_as(b),
    "repeat": lambda a, b, k: a.repeat(k % 2 + 1, *[1] * (a.dim() - 1)),
    "select": lambda a, b, k: a.select(k % a.dim(), 0),
    "slice": lambda a, b, k: a[: k + 1],
    "slice_last": lambda a, b, k: a[..., : k + 1],
    "slice_stepped": lambda a, b, k: a[::2],
    "chunk": lambda a, b, k: a.chunk(2, dim=k % a.dim())[0],
    "flip": lambda a, b, k: a.flip(k % a.dim()),
    "roll": lambda a, b, k: a.roll(1, k % a.dim()),
    "cat": lambda a, b, k: torch.cat([a, b], k % a.dim()),
    "stack": lambda a, b, k: torch.stack([a, b], k % (a.dim() + 1)),
    "matmul": lambda a, b, k: a @ b,
    "matmul_transposed": lambda a, b, k: a @ b.transpose(-1, -2),
    "transposed_matmul": lambda a, b, k: a.transpose(-1, -2) @ b,
    "einsum": lambda a, b, k: torch.einsum("i...,i...->...", a, b),
    "outer": lambda a, b, k: a[:, None] * b[None],
    "cdist": lambda a, b, k: torch.cdist(a, b),
    "where": lambda a, b, k: torch.where(b > 0, a, 0.1 * a),
    "mask": lambda a, b, k: a * (b > 0),
    "masked_fill": lambda a, b, k: a.masked_fill(b > 0, 0.5),
    "select_by_mask": lambda a, b, k: a[b > 0],
    "select_by_row": lambda a, b, k: a[b.flatten(1).sum(1) > 0],
    "masked_select": lambda a, b, k: a.masked_select(b > 0),
    "nonzero": lambda a, b, k: a[(b.flatten(1).sum(1) > 0).nonzero()[:, 0]],
    "gather": lambda a, b, k: a.gather(-1, (b > 0).long()),
    "gather_first": lambda a, b, k: a.gather(0, (b > 0).long()),
    "pick": lambda a, b, k: a[torch.arange(len(a)), (b.flatten(1)[:, 0] > 0).long()],
    "pick_first": lambda a, b, k: a[torch.arange(k + 1)],
    "index_select": lambda a, b, k: a.index_select(k % a.dim(), torch.tensor([0, 1])),
    "by_sorting": lambda a, b, k: a[_order(b)],
    "sorted": lambda a, b, k: a.flatten(1).sum(1).sort().values,
    "sorted_back": lambda a, b, k: (a[_order(b)] * b[_order(b)])[_order(b).argsort()],
    "back_of_another": lambda a, b, k: a[_order(b)][_order(a).argsort()],
    "beside_sorted": lambda a, b, k: a + a[_order(b)],
    "largest_half": lambda a, b, k: a.flatten(1).sum(1).sort(descending=True).values[: len(a) // 2],
    "ranks": lambda a, b, k: a.flatten(1).sum(1) * _order(b).argsort(),
    "gaps": lambda a, b, k: a.flatten(1).sum(1).sort().values.diff(),
    "arange": lambda a, b, k: a * torch.arange(a.size(k % a.dim())),
    "ones": lambda a, b, k: a * torch.ones(a.size(0)),
    "ones_like": lambda a, b, k: torch.ones_like(a) * b,
    "share_of_ones": lambda a, b, k: a / torch.ones(a.size(0)).sum(),
    "share_of_ones_like": lambda a, b, k: a.sum() / torch.ones_like(a).sum(),
    "detach": lambda a, b, k: a.detach(),
    "clone_in_place": lambda a, b, k: a.clone().mul_(2).add_(b),
    "write_column": lambda a, b, k: _write_column(a, b, k),
    "write_into_zeros": lambda a, b, k: _write_column(torch.zeros_like(a.detach()) + 0, b, k),
    "fill_rows": lambda a, b, k: a.clone().masked_fill_(b > 0, 0.0),
    "mse": lambda a, b, k: F.mse_loss(a, b, reduction=_reduction(k)),
    "huber": lambda a, b, k: F.huber_loss(a, b, reduction=_reduction(k)),
    "bce": lambda a, b, k: F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction=_reduction(k)),
    "kl": lambda a, b, k: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction=_reduction(k, "batchmean")),
    "cross_entropy": lambda a, b, k: F.cross_entropy(a, _classes(a, b), reduction=_reduction(k)),
    "cross_entropy_ignoring": lambda a, b, k: F.cross_entropy(
        a, _classes(a, b), ignore_index=0, reduction=_reduction(k)
    ),
    "cross_entropy_weighted": lambda a, b, k: F.cross_entropy(
        a, _classes(a, b), torch.arange(1.0, a.size(1) + 1).double(), reduction=_reduction(k)
    ),
    "cosine": lambda a, b, k: F.cosine_similarity(a, b, dim=-1),
    "triplet": lambda a, b, k: F.triplet_margin_loss(a, b, a * b, reduction=_reduction(k)),
    "read_number": lambda a, b, k: a * b.detach().mean().item(),
}


def _order(b: Tensor) -> Tensor:
    return b.flatten(1).sum(1).argsort()


def _reduction(k: int, mean: str = "mean") -> Any:
    return ("none", mean, "sum")[k % 3]


def _classes(a: Tensor, b: Tensor) -> Tensor:
    """A class for each sample, out of b's values."""
    return (b.flatten(1).sum(1) > 0).long() + (b.flatten(1)[:, 0] > 0).long() * (a.size(1) > 2)


def _write_column(a: Tensor, b: Tensor, k: int) -> Tensor:
    buffer = a.clone()
    buffer[..., k % a.size(-1)] = b[..., 0]
    return buffer


@dataclass(frozen=True)
class Expression:
    """``steps`` one after the other; the loss is the last tensor, made a scalar by ``ending``."""

    steps: Sequence[Step]
    ending: str

    def __call__(self, net: Net, batch: Batch) -> Tensor:
        pool = [net.a(batch.x), batch.t, batch.w, net.b(batch.x), batch.sequence[:, :2], net.a.weight, net.a.bias]
        for name, one, other, number in self.steps:
            # The newest tensors are the likelier operands.
            pool.append(OPERATIONS[name](pool[-1 - one % len(pool)], pool[-1 - other % len(pool)], number))
        loss = pool[-1]
        return loss if loss.dim() == 0 else ENDINGS[self.ending](loss)


ENDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda loss: loss.mean(),
    "sum": lambda loss: loss.sum(),
    "mean_of_squares": lambda loss: loss.pow(2).mean(),
    "sum_over_size": lambda loss: loss.sum() / loss.size(0),
    "sum_over_numel": lambda loss: loss.sum() / loss.numel(),
}
