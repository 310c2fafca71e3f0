"""What a forward leaves beside its outputs where its layers, tokens or stages are on several ranks."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import models
from .languages import LENGTH, WORDS, Language
from .models import adamw, sgd
from .pipelines import STEPS, Deep, Trained, refused, same_as, staged
from .ranks import SAID, context, refusal
from .unchanged import equal, language, under

BLOCK = "layers.0"


def hooked(note: Callable[[list[Any], Tensor], object]) -> Callable[[], Language]:
    """A model of which a hook of the first block's notes something."""

    def build() -> Language:
        model, notes = Language(), list[Any]()
        model.get_submodule(BLOCK).register_forward_hook(lambda _m, _a, output: note(notes, first(output)))
        return model

    return build


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


class Backwards(Language):
    def __init__(self) -> None:
        super().__init__()
        self.get_submodule(BLOCK).register_full_backward_hook(lambda *_: None)


class Early(Language):
    """Leaves out its last block from its second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        layers = self.layers
        if self.calls > 1:
            self.layers = layers[:-1]
        try:
            return super().forward(x)
        finally:
            self.layers = layers


def check_what_a_rank_has_of_the_tokens_is_not_left() -> None:
    ranks = {"cp": dist.get_world_size()}

    def said(build: Callable[[], nn.Module]) -> str:
        return refusal(lambda: under(context(ranks), language(build)))

    assert "stores something in a hook of layers.0" in said(hooked(lambda notes, it: notes.append(it.std().item())))
    assert "stores something in a hook of layers.0" in said(hooked(lambda notes, it: notes.append(it.detach())))
    assert "a backward hook of layers.0 would see only the gradients of this rank's tokens" in said(Backwards)
    assert "left out the last of its blocks" in said(Early)
    equal(context(ranks), language(hooked(lambda notes, _: notes.append(1))))


def check_what_is_kept_while_nothing_is_learned_is_not_a_ranks_part() -> None:
    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        model, optimizer, losses = language(Language)()
        kept: list[Tensor] = []
        model.get_submodule(BLOCK).register_forward_hook(lambda _m, _a, output: kept.append(first(output)))
        with torch.no_grad():
            model(torch.zeros(2, LENGTH, dtype=torch.long))
        return model, optimizer, losses

    assert "keeps something in" in refusal(lambda: under(context({"cp": dist.get_world_size()}), cell))


def check_hooks_of_layers_that_tp_splits_are_called_once_a_step() -> None:
    calls: dict[str, list[int]] = {}

    def build(name: str) -> Callable[[], Language]:
        calls[name] = []
        return hooked(lambda _, __: calls[name].append(1))

    language(build("alone"))()
    under(context({"tp": dist.get_world_size()}), language(build("tp")))
    assert calls["tp"] == calls["alone"]


class Annealing(nn.Linear):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        return super().forward(x).tanh() / (1 + 0.1 * self.seen)


class Stack(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(*(Annealing() for _ in range(8)), nn.Linear(6, 3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        self.calls += 1
        return x

    def kept(self) -> list[float]:
        """What forwards left in attributes and buffers."""
        layers = [one for one in self if isinstance(one, Annealing)]
        return [self.calls, *(float(one.seen) for one in layers), *(one.calls for one in layers)]


class Watched(Stack):
    def forward(self, x: Tensor) -> Tensor:
        first, second, *others = self
        between = x = second(first(x))
        for layer in others:
            x = layer(x)
        self.between = between.detach().mean()
        return x


def trained(*, alone: bool = False) -> Trained:
    """A cell that keeps parts of its model, and freezes one of them in the end."""
    automatic = None if alone else staged()
    try:
        model, losses = Stack(), []
        optimizer = sgd(list(model.parameters()))
        for batch in models.CASES["mlp"].batches(STEPS):
            losses += [models.step(model, optimizer, *batch, after=lambda: None), *model.kept()]
        for layer in (model[0], model[3]):
            file = io.BytesIO()
            torch.save(layer.state_dict(), file)
            file.seek(0)
            state = torch.load(file)
            assert float(state["seen"]) == STEPS
            losses.append(float(state["weight"].norm()))
            layer.requires_grad_(False)
        if automatic is not None:
            said = refusal(lambda: torch.save(dict(model.named_parameters()), io.BytesIO()))
            assert "torch.save of parameters of other pipeline stages" in said
            assert "torch.save of a whole Stack" in refusal(lambda: torch.save(model, io.BytesIO()))
            automatic.finish({})
    finally:
        if automatic is not None:
            automatic.abandon()
    return [*losses, *model.kept()], model, optimizer


def check_a_model_that_counts_its_forwards_goes_through_stages_in_one_piece() -> None:
    SAID.clear()
    there = trained()
    same_as(trained(alone=True), there)
    assert any("in one piece" in said and "once for each microbatch" in said for said in SAID), SAID
    frozen = {name[0] for name, one in there[1].named_parameters() if not one.requires_grad}
    assert frozen == {"0", "3"}
    assert "stores something in between" in refused(Watched)
    assert "stores something in calls" in refused(Stack, schedule="looped_bfs")


def check_what_a_stage_notes_is_refused() -> None:
    def build() -> nn.Module:
        model, notes = Deep(), list[int]()
        model[2].register_forward_hook(lambda *_: notes.append(1))
        return model

    assert "stores something in a hook of 2, which the ranks of other stages do not have" in refused(build)


class Result:
    def __init__(self, logits: Tensor, width: int) -> None:
        self.logits, self.width = logits, width


class Returning(Language):
    """Its outputs are an object's attributes."""

    def forward(self, x: Tensor) -> Result:  # type: ignore[override]
        logits = super().forward(x)
        return Result(logits, logits.size(-1))


def check_objects_that_a_model_returns_are_whole() -> None:
    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(3)
        model = Returning()
        optimizer, losses = adamw(list(model.parameters())), []
        for _ in range(STEPS):
            result = model(torch.randint(0, WORDS, (4, LENGTH)))
            loss = result.logits.square().mean() * result.width
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model, optimizer, losses

    for dimension in ("tp", "cp", "pp"):
        equal(context({dimension: dist.get_world_size()}), cell)


class Keeping(Language):
    """Keeps what a layer that tp splits gave."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        self.kept = logits.detach()
        return logits


def check_attributes_and_copies_of_a_split_model_come_back_whole() -> None:
    copies: list[nn.Parameter] = []

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        model, optimizer, losses = language(Keeping)()
        model.get_submodule("head").register_buffer("scale", torch.ones(()))
        vars(model)["best"] = [nn.Parameter(one.detach().clone()) for one in model.parameters()]
        copies[:] = vars(model)["best"]
        return model, optimizer, losses

    alone, _, _ = cell()
    model, _, _ = under(context({"tp": dist.get_world_size()}), cell)
    for before, now in zip(vars(alone)["best"], vars(model)["best"], strict=True):
        assert type(now) is nn.Parameter
        torch.testing.assert_close(now, before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.kept, alone.kept, atol=1e-4, rtol=1e-4)
    assert type(model.get_buffer("head.scale")) is Tensor


def check_norms_of_split_and_whole_parameters_are_one_devices() -> None:
    seen: dict[str, list[float]] = {}

    def cell(name: str) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer, list[float]]]:
        def run() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
            model, optimizer, losses = language(Language)()
            with torch.no_grad():
                stacked = torch.stack([one.norm() for one in model.parameters()]).norm()
                largest = max(one.abs().max() for one in model.parameters())
                total = torch.nn.utils.get_total_norm(list(model.parameters()))
                seen[name] = [stacked.item(), largest.item(), total.item()]
            return model, optimizer, losses

        return run

    cell("alone")()
    under(context({"tp": dist.get_world_size()}), cell("tp"))
    torch.testing.assert_close(torch.tensor(seen["tp"]), torch.tensor(seen["alone"]), atol=1e-4, rtol=1e-4)


def check_a_cell_without_an_optimizer_is_told_that_nothing_was_distributed() -> None:
    def run() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        model = Deep()
        model(torch.ones(2, 6)).sum().backward()
        return model, None, []  # type: ignore[return-value]

    SAID.clear()
    under(context(), run)
    assert any("nothing was distributed: no optimizer of torch.optim" in said for said in SAID), SAID


def check_hooks_that_change_gradients_are_no_difference_of_the_models() -> None:
    def clamped() -> Language:
        model = Language()
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return model

    for dimension in ("tp", "cp"):
        equal(context({dimension: dist.get_world_size()}), language(clamped))


def check_a_cells_autocast_rounds() -> None:
    class Rounded(Language):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float()

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        with torch.autocast("cpu", torch.bfloat16):
            return language(Rounded)()

    _, _, expected = cell()
    for dimension in ("tp", "cp"):
        _, _, losses = under(context({dimension: dist.get_world_size()}), cell)
        loss_and_norm = torch.tensor(losses[:2]), torch.tensor(expected[:2])  # Adam makes more of roundings later
        torch.testing.assert_close(*loss_and_norm, atol=0.0, rtol=0.01)


def check_state_dicts_of_optimizers_say_the_kernels_that_the_cell_chose() -> None:
    said: list[Any] = []

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        found = language(Language)()
        optimizer = found[1]
        state = optimizer.state_dict()
        said.append(state["param_groups"][0]["foreach"])
        optimizer.load_state_dict(state)
        optimizer.step()
        return found

    _, optimizer, _ = under(context({"tp": dist.get_world_size()}), cell)
    assert [*said, optimizer.param_groups[0]["foreach"]] == [None, None]
