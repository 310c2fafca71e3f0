"""What a cell does with parameters of a pipeline's other stages, beside one device; on two ranks or more."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from . import models
from .models import adamw, sgd
from .pipelines import STEPS, Deep, Trained, deep, same_as, staged
from .ranks import SAID, everyone, refusal

Look = Callable[[nn.Module, torch.optim.Optimizer], Any]


def trained(look: Look, make: models.MakeOptimizer = sgd, *, alone: bool = False, **options: Any) -> Trained:
    """A cell that does something with its model after each step; its names come back."""
    automatic = None if alone else staged(**options)
    try:
        model = deep().model()
        optimizer = make(list(model.parameters()))
        losses = []
        for batch in deep().batches(STEPS):
            losses.append(models.step(model, optimizer, *batch, after=lambda: None))
            look(model, optimizer)
        if automatic is not None:
            automatic.finish({})
    finally:
        if automatic is not None:
            automatic.abandon()
    return losses, model, optimizer


def equal(look: Look, make: models.MakeOptimizer = sgd) -> None:
    same_as(trained(look, make, alone=True), trained(look, make))


def check_layers_that_begin_anew_draw_alike_on_all_ranks() -> None:
    drawn: list[float] = []

    def anew(model: nn.Module, _: torch.optim.Optimizer) -> None:
        first, *_more, last = [one for one in model.modules() if isinstance(one, nn.Linear)]
        for layer in (first, last):
            layer.reset_parameters()
            nn.init.xavier_uniform_(layer.weight)
            nn.init.trunc_normal_(layer.weight, std=0.1)
            nn.init.orthogonal_(layer.weight)
            layer.weight.data.normal_(0, 0.3)
            with torch.no_grad():
                layer.weight += 0.1 * torch.randn_like(layer.weight)
        drawn.append(torch.rand(()).item())

    torch.manual_seed(3)
    one_device = trained(anew, alone=True)
    torch.manual_seed(3)
    same_as(one_device, trained(anew))
    assert drawn[:STEPS] == drawn[STEPS:]
    assert len(set(everyone(drawn[-1]))) == 1


def check_what_is_written_to_a_state_dict_is_the_models() -> None:
    def shrink(model: nn.Module, _: torch.optim.Optimizer) -> None:
        for value in model.state_dict().values():
            value.mul_(0.9)

    equal(shrink)


def check_weights_are_changed_element_by_element() -> None:
    def clip(model: nn.Module, _: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.95

    equal(clip)


class SignDescent(torch.optim.Optimizer):
    """A cell's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad.sign()
                    self.state[parameter]["sign"] = parameter.grad.sign()


def check_an_optimizer_of_the_cells_own_passes_over_them() -> None:
    equal(lambda model, _: None, SignDescent)


def check_what_is_not_here_is_refused_where_it_is_read() -> None:
    def norm(model: nn.Module, _: Any) -> float:
        return math.hypot(*(one.grad.norm().item() for one in model.parameters() if one.grad is not None))

    def total(model: nn.Module, _: Any) -> float:
        return float(sum((one.detach().square().sum() for one in model.parameters()), torch.zeros(())))

    def mixed(model: nn.Module, _: Any) -> list[Tensor]:
        return [one + torch.ones(one.shape) for one in model.parameters()]

    def number(model: nn.Module, _: Any) -> list[float]:
        return [one.detach().abs().max().item() for one in model.parameters()]

    def momenta(_: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        return float(sum(one["momentum_buffer"].norm() for one in optimizer.state.values()))

    for look, words in (
        (momenta, "the cell reads an optimizer's state"),
        (norm, "the cell reads the gradient of a parameter of another pipeline stage"),
        (total, "the cell reads a number from parameters of other pipeline stages"),
        (mixed, "parameters of other pipeline stages have no values on this rank"),
        (number, "the cell reads a number from parameters of other pipeline stages"),
    ):
        assert words in refusal(partial(trained, look)), look


def check_what_torch_would_write_of_no_values_is_refused() -> None:
    """It takes the device of the target, and leaves the target as it is or with what was in memory."""
    kept: dict[str, Any] = {}

    def average(update: Callable[[list[Tensor], list[Tensor]], Any]) -> Look:
        def look(model: nn.Module, _: Any) -> None:
            averages = kept.setdefault("averages", [torch.zeros(one.shape) for one in model.parameters()])
            with torch.no_grad():
                update(averages, list(model.parameters()))

        return look

    def each(update: Callable[[Tensor, Tensor], Any]) -> Look:
        return average(lambda averages, own: [update(*pair) for pair in zip(averages, own, strict=True)])

    def norm(model: nn.Module, _: Any) -> None:
        total = torch.zeros(())
        for one in model.parameters():
            total += one.detach().square().sum()

    def outside(model: nn.Module, _: Any) -> None:
        for one in model.parameters():
            if one.dim() == 2:
                F.linear(torch.ones(2, 6), one)

    for look in (
        each(lambda mean, one: mean.mul_(0.9).add_(one, alpha=0.1)),
        each(lambda mean, one: mean.add_(one.data)),
        each(lambda mean, one: mean.sub_(other=0.1 * one)),
        each(lambda mean, one: mean.lerp_(one, 0.1)),
        each(lambda mean, one: mean.copy_(one)),
        each(lambda mean, one: mean.__setitem__(slice(None), one)),
        each(lambda mean, one: torch.add(mean, one, out=mean)),
        average(lambda means, own: torch._foreach_add_(means, own, alpha=0.1)),
        average(lambda means, own: torch._foreach_add_(means, [one * 0.1 for one in own])),
        *(norm, outside),
    ):
        assert "other pipeline stages have no values on this rank" in refusal(partial(trained, look)), look
        kept.clear()


def check_what_is_written_of_them_alone_is_not() -> None:
    def shrink(model: nn.Module, _: Any) -> None:
        own: list[Tensor] = list(model.parameters())
        with torch.no_grad():
            torch._foreach_mul_(own, 0.9)
            torch._foreach_add_(own, [one * 0.01 for one in own])
            torch._foreach_add_(own, [torch.ones(one.shape) for one in own], alpha=1e-3)
            for one in own:
                one.add_(one, alpha=0.01).sub_(torch.full(one.shape, 1e-3))

    equal(shrink)


def check_a_copy_of_what_is_in_stages_is_refused_when_it_is_called() -> None:
    def call(model: nn.Module, _: Any) -> None:
        copy.deepcopy(model)(torch.ones(2, 6))

    assert "a copy of Deep is called" in refusal(lambda: trained(call))


def check_a_penalty_from_before_the_first_call_is_explained() -> None:
    automatic = staged()
    try:
        model = deep().model()
        sgd(list(model.parameters()))
        penalty = sum((one.square().sum() for one in model.parameters()), torch.zeros(()))
        with pytest.raises(RuntimeError) as caught:
            (model(torch.ones(8, 6)).sum() + penalty).backward()
        assert "before the model's first call, which cut it into stages" in str(automatic.explained(caught.value))
    finally:
        automatic.abandon()


def check_they_say_where_this_rank_computes() -> None:
    def put(model: nn.Module, _: torch.optim.Optimizer) -> None:
        assert {one.device for one in model.parameters()} == {torch.device("cpu")}
        model.to(next(model.parameters()).device).cpu()
        for one in model.parameters():
            x = torch.arange(3.0)
            assert x.to(one.device) is x and (0 * one.data).device == x.device
            assert x.double().to(one).tolist() == x.type_as(one).tolist() == [0.0, 1.0, 2.0]
            assert x.double().to(tensor=one).dtype == one.dtype  # type: ignore[call-overload]

    equal(put)


def check_a_list_from_before_the_first_step_is_no_way_around() -> None:
    def kept(read: Callable[[nn.Parameter], Any]) -> Trained:
        automatic = staged()
        try:
            model = deep().model()
            parameters = list(model.parameters())
            optimizer = sgd(parameters)
            models.step(model, optimizer, *deep().batches(1)[0], after=lambda: None)
            with torch.no_grad():
                for one in parameters:
                    one.clamp_(-0.2, 0.2)
            for one in parameters:
                read(one)
            automatic.finish({})
        finally:
            automatic.abandon()
        assert all(type(one) is nn.Parameter for one in parameters)
        return [], model, optimizer

    assert "the cell reads the gradient" in refusal(lambda: kept(lambda one: one.grad))
    assert "the cell reads a number from parameters" in refusal(lambda: kept(lambda one: one.sum().item()))
    _, model, _ = kept(lambda one: one.shape)
    if dist.get_rank() == 0:
        found = {name: one.abs().max().item() for name, one in model.named_parameters()}
        assert max(found.values()) <= 0.2 + 1e-6, found


def check_torchs_own_words_are_explained() -> None:
    for look in (
        lambda model: nn.utils.parameters_to_vector(model.parameters()),
        lambda model: AveragedModel(Deep()).update_parameters(model),
        lambda model: [layer(torch.ones(2, 6)) for layer in model.children()],
    ):
        automatic = staged()
        try:
            model = deep().model()
            optimizer = sgd(list(model.parameters()))
            models.step(model, optimizer, *deep().batches(1)[0], after=lambda: None)
            with pytest.raises(RuntimeError) as caught:
                look(model)
            assert "have no values on this rank" in str(automatic.explained(caught.value))
        finally:
            automatic.abandon()


def check_a_second_optimizer_is_refused_by_name() -> None:
    def another(model: nn.Module, _: Any) -> None:
        optimizer = adamw(list(model.parameters()))
        models.step(model, optimizer, *deep().batches(1)[0], after=lambda: None)

    assert "Deep is already cut into stages, and an optimizer or a parameter group" in refusal(lambda: trained(another))


def check_names_come_back_with_values_or_are_named() -> None:
    automatic = staged()
    names: dict[str, Any] = {}
    try:
        model = Deep()
        optimizer = sgd(list(model.parameters()))
        models.step(model, optimizer, *deep().batches(1)[0], after=lambda: None)
        names["last"], names["first"] = list(model.parameters())[-1], next(iter(model.parameters()))
        names["averages"] = {name: one.detach().clone() for name, one in model.named_parameters()}
        SAID.clear()
        automatic.finish(names)
    finally:
        automatic.abandon()
    assert [
        one for one in SAID if one.startswith("averages: computed from parameters of pipeline stages on other ranks")
    ]
    if dist.get_rank() == 0:
        kept: list[Tensor] = [names["first"], names["last"]]
        assert not any(one.is_meta for one in kept)
        assert {id(one) for one in kept} <= {id(one) for one in model.parameters()}
