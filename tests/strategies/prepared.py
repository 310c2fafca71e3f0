"""Jobs in which things are prepared, on the ranks of a test: what they train, held against one device."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import jupyter_torchdist as td
from jupyter_torchdist.strategies.core import rank_context
from jupyter_torchdist.strategies.core.context import ParallelContext

from .languages import LENGTH, WORDS, Language
from .models import CASES, loss_of
from .ranks import CLOSE, assert_close, context

Prepare = Callable[..., Any]
Result = tuple[nn.Module, torch.optim.Optimizer, list[float]]


def ddp(**options: Any) -> ParallelContext:
    return context({"dp_replicate": dist.get_world_size()}, **options)


def fsdp(**options: Any) -> ParallelContext:
    return context({"dp_shard": dist.get_world_size()}, **options)


@contextmanager
def job(how: ParallelContext) -> Iterator[rank_context.RankContext]:
    """As a rank of a job with this strategy; at its end everything is plain again."""
    words = {"dp_shard": "fsdp", "dp_replicate": "ddp"}
    name = "+".join(words.get(one, one) for one in how.plan.degrees)
    mine, outer = rank_context.RankContext(replace(how.plan, name=name), how.device, how.say), rank_context.current
    vars(mine)["context"] = replace(how, plan=replace(how.plan, name=name))
    rank_context.take(mine)
    try:
        yield mine
        if mine.prepared is not None:
            mine.prepared.finish()
    finally:
        if mine.prepared is not None:
            mine.prepared.abandon()
        rank_context.take(outer)


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def alone(*things: Any) -> Any:
    """What ``td.prepare`` is in one plain process."""
    return things[0] if len(things) == 1 else things


class Noted(TensorDataset):
    """Notes which samples it was asked for."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.asked = array("q")  # a loop that changes a list has whole batches

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return tuple(tensor[index] for tensor in self.tensors)


def data(name: str, samples: int) -> Noted:
    torch.manual_seed(7)
    batches = [(CASES[name].inputs(), CASES[name].targets()) for _ in range(-(-samples // 8))]
    return Noted(*(torch.cat(parts)[:samples] for parts in zip(*batches, strict=True)))


def train(
    prepare: Prepare, name: str, samples: int = 21, *, optimizer_last: bool = False, optimizer_with: Any = None
) -> Result:
    """Two epochs, with clipping, accumulation over two batches and a scheduler; uneven batches at the end of each."""
    make = optimizer_with or (lambda parameters: torch.optim.AdamW(parameters, lr=0.02))
    model, losses = CASES[name].model(), []
    loader = DataLoader(data(name, samples), 8, shuffle=True)
    torch.manual_seed(3)
    if optimizer_last:
        loader, model = prepare(loader, model)
        optimizer = prepare(make([p for p in model.parameters() if p.requires_grad]))
    else:
        optimizer = make([p for p in model.parameters() if p.requires_grad])
    scheduler = StepLR(optimizer, 1, 0.5)
    if optimizer_last:
        prepare(scheduler)
    else:
        scheduler, model, loader, optimizer = prepare(scheduler, model, loader, optimizer)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            loss = loss_of(model(x), y)
            loss.backward()
            losses.append(float(td.reduce_mean(loss)) if prepare is not alone else loss.item())
            if number % 2:
                losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, losses


def equal(how: ParallelContext, cell: Callable[[Prepare], Result], within: float = CLOSE) -> Result:
    """The cell under ``how``, against itself on one device."""
    expected, _, expected_losses = cell(alone)
    with job(how):
        model, optimizer, losses = cell(td.prepare)
        assert len(losses) == len(expected_losses)
        for number, (ours, theirs) in enumerate(zip(losses, expected_losses, strict=True)):
            assert abs(ours - theirs) < 2 * within, (number, ours, theirs)
    assert type(model) is type(expected) and not any(isinstance(p, DTensor) for p in model.parameters())
    if dist.get_rank() == 0:
        assert_close(model.state_dict(), expected.state_dict(), within)
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} <= {id(p) for p in model.parameters()}
    assert not [part for part in model.modules() if "forward" in vars(part)]
    return model, optimizer, losses


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def language(prepare: Prepare) -> Result:
    torch.manual_seed(3)
    model, losses = Language(tied=True), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    words = torch.randint(WORDS, (13, LENGTH))
    loader = DataLoader(TensorDataset(words, words.roll(1, 1)), 4, shuffle=True)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).view(-1, WORDS), y.view(-1))
        loss.backward()
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(float(td.reduce_mean(loss)) if prepare is not alone else loss.item())
    return model, optimizer, losses
