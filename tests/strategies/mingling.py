"""Plain tensors of a cell's that meet shards in and around an optimizer's step: one device's numbers, at no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jupyter_torchdist.strategies.sharded import mixing

from .effects import STEPS, cell
from .models import Mlp
from .ranks import context
from .unchanged import equal, under


@contextmanager
def counted() -> Iterator[list[Any]]:
    """Operations on shards that are looked at for plain tensors, of jobs that begin within the block."""
    noted: list[Any] = []
    original = mixing._compute

    def compute(operation: Any, args: Any, kwargs: Any) -> Any:
        noted.append(operation)
        return original(operation, args, kwargs)

    mixing._compute = compute
    try:
        yield noted
    finally:
        mixing._compute = original


def check_a_step_of_pytorchs_own_optimizers_pays_nothing() -> None:
    looked: list[int] = []
    with counted() as noted:

        def look(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
            looked.append(len(noted))
            with torch.no_grad():
                for parameter in model.parameters():
                    assert isinstance(parameter, DTensor)
                    assert isinstance(parameter * torch.ones(parameter.shape), DTensor)

        under(context(), cell(Mlp, look))
    parameters = len(list(Mlp().parameters()))
    # Each look makes so many, at least (mul on shards is asked for again where it was not found): steps none.
    assert looked == [number * parameters for number in range(STEPS)], looked


def masking(attach: Callable[[torch.optim.Optimizer, Callable[..., None]], Any]) -> Callable[..., None]:
    """In the first step of a cell ``attach`` is given a function that puts plain masks on the parameters."""
    attached: list[torch.optim.Optimizer] = []

    def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if any(one is optimizer for one in attached):
            return
        attached.append(optimizer)
        generator = torch.Generator().manual_seed(1)
        masks = [(torch.rand(parameter.shape, generator=generator) > 0.3).float() for parameter in model.parameters()]

        @torch.no_grad()
        def mask(*_: Any) -> None:
            for parameter, one in zip(model.parameters(), masks, strict=True):
                parameter.mul_(one)

        attach(optimizer, mask)

    return look


def check_hooks_of_an_optimizers_step_may_mix() -> None:
    equal(context(), cell(Mlp, masking(lambda optimizer, mask: optimizer.register_step_post_hook(mask))))
    equal(context(), cell(Mlp, masking(lambda optimizer, mask: optimizer.register_step_pre_hook(mask))))


class Slow(torch.optim.AdamW):
    """Goes half of the way back before each step, by copies that it made while parameters were whole."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.first: list[Tensor] = [one.detach().clone() for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [one for group in self.param_groups for one in group["params"]]
        for parameter, first in zip(parameters, self.first, strict=True):
            parameter.lerp_(first, 0.5)
        return super().step(closure)


def check_an_optimizer_of_the_cells_own_may_mix() -> None:
    equal(context(), cell(Mlp, lambda *_: None, optimizer=Slow))


def check_a_closure_may_mix() -> None:
    """A penalty on the way from where the weights were at first."""

    def run() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(5)
        model, losses = Mlp(), list[float]()
        anchors = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = torch.randn(8 * STEPS, 6)
        for x in data.split(8):

            def closure(x: Tensor = x) -> float:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                with torch.no_grad():
                    for parameter, anchor in zip(model.parameters(), anchors, strict=True):
                        assert parameter.grad is not None
                        parameter.grad.add_(parameter - anchor, alpha=0.1)
                return float(loss.item())

            losses.append(optimizer.step(closure))
        return model, optimizer, losses

    equal(context(), run)
