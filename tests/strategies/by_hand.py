"""What a cell reads of shards, and writes to parts of them, is one device's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from jupyter_torchdist.strategies.core.patches import Patches
from jupyter_torchdist.strategies.sharded.dtensor_dispatch import ByHand
from jupyter_torchdist.torch_private.dtensors import dtensor_dispatches_subclasses

from .ranks import context, refusal

NAMES = {"torch": torch, "nn": nn, "F": F}
SHAPES = ((11, 8), (8, 8), (1, 3), (11,), (1,))
READS = """
p.norm() | p.norm(p=1) | p.norm(float('inf')) | p.norm(dim=0) | p.std() | p.mean(0) | p.var(0, correction=0)
p.prod() | p.abs().max() | p.min() | p.max(dim=0).values | p.amax(0) | p.aminmax().max | p.argmax() | p.argmin(0)
p.median() | p.flatten().quantile(.5) | p.quantile(.3, dim=0) | torch.histc(p, 4) | p.unique()
p.kthvalue(1, dim=0).values | p.sort(0).values | p.argsort(0) | p.flatten().topk(1).values | p.flatten()[::3]
p.flatten()[torch.tensor([0, -1])] | (p.abs() < .01).sum() | torch.count_nonzero(p) | p.nonzero() | p[p > 0]
torch.where(p > 0)[0] | torch.isfinite(p).all() | p.cumsum(0) | p.flip(0) | p.roll(1, 0) | p.diff(dim=0)
p.softmax(0) | p.logsumexp(0) | p.repeat_interleave(2, 0) | p @ torch.ones(p.shape[-1]) | torch.cat([p, p.clone()])
torch.stack([p, p]).mean(0) | torch.cat([p.flatten(), torch.ones(2)]) | p.view(-1, 1) | p[0] | p[-1:]
p.chunk(3)[0] | p.split(2)[0] | p.unbind(0)[0] | p.T | p.unsqueeze(0).expand(3, *p.shape) | (p @ p.T).trace()
p.tril() | p.diagonal() | torch.linalg.matrix_norm(p, 2) | torch.linalg.svdvals(p) | torch.cdist(p, p)
p.renorm(2, 0, .1) | p.index_select(0, torch.tensor([0])) | p.gather(0, torch.zeros_like(p[:1]).long())
p.take(torch.tensor([0])) | F.cosine_similarity(p[0], p[-1], dim=0) | F.normalize(p, dim=1)
nn.utils.parameters_to_vector([p, p]).sum() | p.allclose(p)
"""
_REFUSED = {"F.cosine_similarity(p[0], p[-1], dim=0)"}
"""By torch 2.10 and 2.11, in their own words: it writes to a norm of which each rank has a part."""
WRITES = """
p[0].zero_() | p[0] = 1 | p[-1] = torch.ones(p.shape[1:]) | p[:4] *= 2 | p.data[2:].mul_(2) | p[..., 0] = 3
p[0] += p[-1] | p.chunk(2)[-1].mul_(.5) | p.split(3)[0].neg_() | p.narrow(0, 0, 1).add_(1)
p.unbind(0)[0].fill_(1) | p.flatten()[-1] = 2 | p.view(-1)[:2].copy_(torch.arange(2.)[:p.numel()])
p[1:5][1:3].mul_(2); p[0:].add_(1) | nn.init.zeros_(p[:2]) | p[torch.tensor([0, -1])] = 0 | p[p > .3] = 0
p[[0, -1]] = p[[-1, 0]] | p.index_fill_(0, torch.tensor([0]), 3.)
p.index_copy_(0, torch.tensor([0]), torch.ones_like(p[:1]))
p.index_add_(0, torch.tensor([0]), torch.ones(1, *p.shape[1:])) | p.masked_fill_(p > .5, 0.) | p.T[..., 0].mul_(2)
p.tril_() | p.renorm_(2, 0, .5) | p.fill_diagonal_(.5) | p.diagonal().add_(1) | p.detach()[0].mul_(2)
torch._foreach_mul_([p[:1], p[1:]], 2.) | p.scatter_(0, torch.zeros_like(p[:1]).long(), 9.)
"""


def listed(text: str) -> list[str]:
    return [one.strip() for line in text.strip().splitlines() for one in line.split(" | ")]


@contextmanager
def by_hand() -> Iterator[Any]:
    """Handlers are installed; gives the mesh."""
    how, patches = context(), Patches()
    ByHand(how.plan).install(patches)
    try:
        yield how.mesh["dp_shard"]
    finally:
        patches.undo()


def cases() -> Iterator[tuple[torch.Tensor, int]]:
    """A tensor, and the dimension along which it is sharded."""
    for shape in SHAPES:
        torch.manual_seed(0)
        for dim in range(len(shape)):
            yield torch.randn(shape), dim


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def done(code: str, p: torch.Tensor) -> torch.Tensor | None:
    """``p`` after ``code``; None where one device cannot do that with this shape."""
    try:
        exec(code, NAMES | {"p": p})
    except (RuntimeError, IndexError):
        return None
    return p


def read(code: str, p: torch.Tensor) -> Any:
    try:
        return eval(code, NAMES | {"p": p})
    except (RuntimeError, IndexError):
        return None


@torch.no_grad()
def check_what_is_read_is_the_wholes() -> None:
    with by_hand() as mesh:
        for full, dim in cases():
            for code in listed(READS):
                if code in _REFUSED and not dtensor_dispatches_subclasses():
                    continue
                if (expected := read(code, full.clone())) is not None:
                    found = eval(code, NAMES | {"p": sharded(full, mesh, dim)})
                    torch.testing.assert_close(whole(found), expected, equal_nan=True, msg=f"{code} of {full.shape}")


@torch.no_grad()
def check_what_is_written_to_a_part_is_the_wholes() -> None:
    with by_hand() as mesh:
        for full, dim in cases():
            for code in listed(WRITES):
                if (expected := done(code, full.clone())) is not None:
                    parameter = sharded(full, mesh, dim)
                    exec(code, NAMES | {"p": parameter})
                    assert isinstance(parameter, DTensor)
                    assert parameter.placements == (Shard(dim),)
                    torch.testing.assert_close(whole(parameter), expected, msg=f"{code} of {full.shape} by {dim}")


def sharded(full: torch.Tensor, mesh: Any, dim: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(full.clone(), mesh, [Shard(dim)], src_data_rank=None))


@torch.no_grad()
def check_a_kept_part_follows_the_whole() -> None:
    with by_hand() as mesh:
        parameter = sharded(torch.ones(5, 3), mesh, 0)
        row, rows = parameter[0], parameter[:3]
        parameter.mul_(2)
        assert row.sum() == 6
        rows[0].mul_(2)
        assert whole(row).tolist() == [4.0] * 3
        assert rows.sum() == 24
        assert whole(parameter).sum() == 36


def check_a_gradient_flows_through_a_part() -> None:
    with by_hand() as mesh:
        parameter = sharded(torch.ones(5, 3), mesh, 0)
        (parameter[0] * 2).sum().backward()
        assert parameter.grad is not None
        assert whole(parameter.grad).tolist() == [[2.0] * 3, *[[0.0] * 3] * 4]


@torch.no_grad()
def check_a_sum_of_several_ranks_is_not_written_to() -> None:
    with by_hand() as mesh:
        total = sharded(torch.ones(4, 4), mesh, 0).sum(0)
        assert total.placements[0].is_partial()  # type: ignore[attr-defined]
        assert "the tensor is a sum whose terms are on several ranks" in refusal(
            lambda: total.index_fill_(0, torch.tensor([0]), 3.0)
        )
