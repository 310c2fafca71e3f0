"""Unmodified loops in stages: held against one device, and what each option does."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import jupyter_torchdist as td
from jupyter_torchdist.strategies.auto import AutomaticTraining
from jupyter_torchdist.strategies.pipeline.wires import Arriving, Wires

from . import models
from .models import CASES, Case, adamw, sgd
from .ranks import CLOSE, SAID, assert_close, context, everyone, refusal

STEPS = 3
Trained = tuple[list[float], nn.Module, torch.optim.Optimizer]
"""Losses, the model and its optimizer."""


def staged(**options: Any) -> AutomaticTraining:
    """All ranks in one pipeline."""
    degrees = options.pop("degrees", {"pp": dist.get_world_size()})
    how = context(degrees, SAID.append, **options)
    automatic = AutomaticTraining(replace(how, plan=replace(how.plan, name="pp")))
    automatic.install()
    return automatic


def trained(
    case: Case,
    automatic: AutomaticTraining | None,
    make: models.MakeOptimizer = adamw,
    after: Callable[[nn.Module], Any] = lambda model: None,
    steps: int = STEPS,
) -> Trained:
    """The loop of a cell, with a strategy around it or without."""
    try:
        model = case.model()
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        losses = [models.step(model, optimizer, *batch, after=lambda: after(model)) for batch in case.batches(steps)]
        if automatic is not None:
            automatic.finish({})
    finally:
        if automatic is not None:
            automatic.abandon()
    return losses, model, optimizer


def compare(case: Case, make: models.MakeOptimizer = adamw, after: Any = lambda model: None, **options: Any) -> None:
    same_as(trained(case, None, make, after), trained(case, staged(**options), make, after))


def same_as(one_device: Trained, ours: Trained) -> None:
    (expected, alone, theirs), (losses, model, optimizer) = one_device, ours
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=CLOSE, rtol=CLOSE)
    if dist.get_rank() == 0:
        assert_close(model.state_dict(), alone.state_dict())
        states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
        assert all(state and not value.is_meta for state in states for value in state.values())
        state, known = optimizer.state_dict()["state"], theirs.state_dict()["state"]
        torch.testing.assert_close(state, known, atol=CLOSE, rtol=CLOSE)
    else:
        assert all(parameter.is_meta for parameter in model.parameters())


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.Tanh())])


class UNet(nn.Module):
    """A skip over all stages, a parameter of the root, a mask of the inputs, and an output beside the main one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.scale = nn.Parameter(torch.full((6,), 0.7))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mask = (x > 0).float()
        first = torch.tanh(self.layers[0](x))
        y = first * self.scale
        for layer in self.layers[1:4]:
            y = torch.tanh(layer(y)) * mask
        return self.layers[4](y + first), {"first": first.square().mean()}


class Seeing(TorchFunctionMode):
    """A mode of the user's own."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.__name__)
        return func(*args, **(kwargs or {}))


SEEN: set[str] = set()


class Watched(Deep):
    """Its layers are called under such a mode."""

    def forward(self, x: Tensor) -> Tensor:
        with Seeing(SEEN):
            return super().forward(x)  # type: ignore[no-any-return,no-untyped-call]


def held_states(optimizer: torch.optim.Optimizer) -> Iterable[dict[str, Tensor]]:
    """This rank's, which a cell is refused."""
    return dict.values(optimizer.state)


def deep() -> Case:
    return Case(Deep, CASES["mlp"].inputs, lambda: torch.randint(6, (models.SAMPLES,)))


def gpt(tied: bool) -> Case:
    return Case(lambda: models.Gpt(tied=tied, layers=4), CASES["tied"].inputs, CASES["tied"].targets)


def check_a_loop_in_stages_is_one_devices() -> None:
    compare(deep())
    compare(gpt(tied=False))
    compare(gpt(tied=True), sgd)


class Residual(Deep):
    """Changes what its layers give in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        for layer in list(self)[2::2]:
            x += layer(torch.tanh(x))
        return x


def check_a_stage_may_change_what_it_received_in_place() -> None:
    for schedule in ("gpipe", "interleaved_1f1b"):
        compare(Case(Residual, deep().inputs, deep().targets), schedule=schedule)


def check_a_mode_of_the_users_sees_what_the_layers_compute() -> None:
    def after(_model: nn.Module) -> None:
        assert "linear" in SEEN
        SEEN.clear()

    compare(Case(Watched, deep().inputs, deep().targets), after=after)


def check_whole_pipelines_beside_each_other() -> None:
    if dist.get_world_size() == 4:
        compare(deep(), degrees={"pp": 2, "dp_replicate": 2}, schedule="looped_bfs")
        compare(gpt(tied=True), sgd, degrees={"pp": 2, "dp_replicate": 2})


class LossInside(Deep):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)  # type: ignore[no-untyped-call]


def check_a_loss_inside_counts_the_targets_of_all_ranks_and_microbatches() -> None:
    def run(automatic: AutomaticTraining | None) -> Trained:
        torch.manual_seed(4)
        try:
            model, losses = LossInside(), []
            optimizer = sgd(list(model.parameters()))
            for count in range(1, STEPS + 1):
                y = torch.randint(6, (12,))
                y[:3], y[12 - count :] = -100, -100  # of 4 ranks in pairs the first's first microbatch has none
                loss = model(torch.randn(12, 6), y)
                loss /= 2
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if automatic is not None:
                automatic.finish({})
        finally:
            if automatic is not None:
                automatic.abandon()
        return losses, model, optimizer

    one_device = run(None)
    same_as(one_device, run(staged()))
    if dist.get_world_size() == 4:
        same_as(one_device, run(staged(degrees={"pp": 2, "dp_replicate": 2})))


def losses_of(
    build: Callable[[], nn.Module], automatic: AutomaticTraining | None, samples: int = 8
) -> tuple[list[float], Any]:
    """A loop whose loss is of its own kind: contrastive in the batch, with the model's second output, on its input."""
    torch.manual_seed(4)
    model = build()
    optimizer = sgd(list(model.parameters()))
    losses, slopes = [], []
    for _ in range(STEPS):
        x = torch.randn(samples, 6, requires_grad=True)
        optimizer.zero_grad()
        y, extra = model(x)
        loss = ((y @ y.T).softmax(-1).diagonal().log().mean() - extra["first"]) ** 2
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert x.grad is not None
        slopes.append(x.grad)
    if automatic is not None:
        automatic.finish({})
    return losses, (slopes, model.state_dict())


def check_skips_root_parameters_any_loss_and_gradients_of_inputs() -> None:
    for samples in (8, 7, 1):
        expected, (slopes, weights) = losses_of(UNet, None, samples)
        losses, (ours, trained_weights) = losses_of(UNet, staged(microbatches=3), samples)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=CLOSE, rtol=CLOSE)
        for mine, other in zip(ours, slopes, strict=True):
            torch.testing.assert_close(mine, other, atol=CLOSE, rtol=CLOSE)
        if dist.get_rank() == 0:
            assert_close(trained_weights, weights)


def check_a_norm_is_that_of_all_stages() -> None:
    norms: list[float] = []

    def clip(model: nn.Module) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))

    for case in (deep(), gpt(tied=True)):
        norms.clear()
        compare(case, sgd, clip)
        torch.testing.assert_close(torch.tensor(norms[:STEPS]), torch.tensor(norms[STEPS:]), atol=CLOSE, rtol=CLOSE)


def check_each_rank_holds_its_stage_alone() -> None:
    automatic = staged(balance="parameters")
    try:
        model = deep().model()
        optimizer = adamw(list(model.parameters()))
        models.step(model, optimizer, *deep().batches(1)[0], after=lambda: None)
        held = everyone(sum(p.numel() for p in model.parameters() if not p.is_meta))
        states = everyone(sum(v.numel() for s in held_states(optimizer) for v in s.values() if v.dim()))
        whole = sum(p.numel() for p in model.parameters())
        assert sum(held) == whole and max(held) <= 3 * whole / 5
        assert states == [2 * part for part in held]
        state = model.state_dict()  # whole, on all ranks
        assert everyone({name: value.tolist() for name, value in state.items()}) == [
            {name: value.tolist() for name, value in state.items()}
        ] * len(held)
        model.load_state_dict({name: value + 1 for name, value in state.items()})
        assert_close(model.state_dict(), {name: value + 1 for name, value in state.items()})
        model.eval()
        with torch.no_grad():  # evaluation goes through the stages too
            assert len({tuple(row) for row in everyone(model(torch.ones(3, 6))[0].tolist())}) == 1
        automatic.finish({})
    finally:
        automatic.abandon()


def check_an_optimizers_state_dict_is_whole_and_takes_a_whole_one() -> None:
    kept: list[dict[str, Any]] = []

    def resumed(automatic: AutomaticTraining | None) -> Trained:
        """The state goes through a file's bytes in mid-training, and a new run of the optimizer begins with it."""
        model = gpt(tied=True).model()
        optimizer, losses = adamw(list(model.parameters())), []
        for batch in gpt(tied=True).batches(STEPS):
            losses.append(models.step(model, optimizer, *batch, after=lambda: None))
            saved = pickle.dumps(optimizer.state_dict())
            kept.append(pickle.loads(saved))
            optimizer.state.clear()
            optimizer.load_state_dict(pickle.loads(saved))
            assert not any(value.is_meta for state in held_states(optimizer) for value in state.values())
        if automatic is not None:
            automatic.finish({})
            automatic.abandon()
        return losses, model, optimizer

    same_as(resumed(None), resumed(staged()))
    for alone, ours in zip(kept[:STEPS], kept[STEPS:], strict=True):
        assert list(ours["state"]) == list(alone["state"]) and ours["param_groups"] == alone["param_groups"]
        for place, values in alone["state"].items():
            torch.testing.assert_close(ours["state"][place], values, atol=CLOSE, rtol=CLOSE)


def check_a_state_from_before_is_on_the_ranks_of_its_stage_alone() -> None:
    """Elsewhere it would grow old, and get into checkpoints."""

    def trained(automatic: AutomaticTraining | None, begun: dict[str, Any] | None = None) -> Trained:
        model = gpt(tied=False).model()
        optimizer, losses = adamw(list(model.parameters())), []
        if begun is not None:
            optimizer.load_state_dict(copy.deepcopy(begun))
        for batch in gpt(tied=False).batches(STEPS):
            losses.append(models.step(model, optimizer, *batch, after=lambda: None))
        if automatic is not None:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.is_meta]
            assert held and not any(dict.__contains__(optimizer.state, parameter) for parameter in held)
            automatic.finish({})
            automatic.abandon()
        return losses, model, optimizer

    _, _, before = trained(None)
    begun = before.state_dict()
    same_as(trained(None, begun), trained(staged(), begun))


def stages_of(build: Callable[[], nn.Module] = Deep, **options: Any) -> tuple[list[int], str]:
    """Parameters of each stage, and what was said."""
    automatic = staged(**options)
    try:
        model = build()
        optimizer = adamw(list(model.parameters()))
        models.step(model, optimizer, *deep().batches(1)[0], after=lambda: None)
        held = everyone(sum(p.numel() for p in model.parameters() if not p.is_meta))
        automatic.finish({})
        return held, SAID[-1]
    finally:
        automatic.abandon()


def check_blocks_a_stage_as_said_and_microbatches() -> None:
    stages = dist.get_world_size()
    numbers = (*[1] * (stages - 1), 6 - stages)
    held, said = stages_of(balance=numbers, microbatches=4)
    assert held == [42 * number for number in numbers]
    assert "4 microbatches" in said
    assert "add up to the blocks" in refusal(lambda: stages_of(balance=(1, 1)))


class Dear(nn.Linear):
    """Takes its time, and keeps a thousand numbers for each of its outputs."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x).unsqueeze(-1).expand(-1, -1, 1000).tanh().mean(-1)


def check_with_gloo_receptions_are_begun_before_they_are_waited_for() -> None:
    order: list[str] = []
    begin, arrived = Wires.begin_to_receive, Arriving.arrived

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            order.append(name)
            return original(*args)

        return call

    Wires.begin_to_receive = noted("begins", begin)  # type: ignore[method-assign]
    Arriving.arrived = noted("waits", arrived)  # type: ignore[method-assign]
    try:
        trained(CASES["untied"], staged(microbatches=4), steps=1)
    finally:
        Wires.begin_to_receive, Arriving.arrived = begin, arrived  # type: ignore[method-assign]
    if dist.get_rank() in (0, dist.get_world_size() - 1):  # one neighbour
        assert order[-8:] == ["begins", "begins", "waits", "begins", "waits", "begins", "waits", "waits"], order


def check_stages_are_cut_by_measured_cost_not_by_parameters() -> None:
    layers = lambda: nn.Sequential(Dear(6, 6), *[nn.Linear(6, 6) for _ in range(5)])  # noqa: E731
    held, _ = stages_of(layers)
    assert held[0] == 42, held
    if dist.get_world_size() == 2:
        assert stages_of(layers, balance="parameters")[0] == [3 * 42] * 2


class Placed(nn.Module):
    """Its first layer alone is in the first stage; another number for each further stage."""

    def __init__(self, *, backwards: bool = False) -> None:
        super().__init__()
        stages = [min(layer, dist.get_world_size() - 1) for layer in range(5)]
        self.layers = nn.ModuleList()
        for number in reversed(stages) if backwards else stages:
            with td.stage(number):
                self.layers.append(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def check_stages_as_the_model_was_built() -> None:
    held, _ = stages_of(balance="manual", build=Placed)
    assert held == [42] * (dist.get_world_size() - 1) + [42 * (6 - dist.get_world_size())]
    said = refusal(lambda: stages_of(balance="manual", build=lambda: Placed(backwards=True)))
    assert f"of stage {dist.get_world_size() - 2} is called after one of stage {dist.get_world_size() - 1}" in said


def refused(build: Callable[[], nn.Module], make: models.MakeOptimizer = adamw, **options: Any) -> str:
    """What the first step of a cell is refused with."""
    automatic = staged(**options)

    def run() -> None:
        model = build()
        optimizer = make(list(model.parameters()))
        model(torch.ones(8, 6)).sum().backward()
        optimizer.step()

    try:
        return refusal(run)
    finally:
        automatic.abandon()


def check_stages_are_divided_no_further() -> None:
    for inside in ("dp_shard", "tp", "cp") if dist.get_world_size() == 4 else ():
        assert f"stages are divided further ({inside}=2)" in refused(Deep, degrees={"pp": 2, inside: 2})


def check_what_a_pipeline_cannot_do_is_refused() -> None:
    two = lambda: nn.Sequential(nn.Linear(6, 6))  # noqa: E731
    assert "are more than the 1 layers" in refused(two)
    assert "normalises over the batch" in refused(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    if dist.get_world_size() == 4:
        said = refused(Deep, schedule="1f1b", degrees={"pp": 2, "dp_replicate": 2})
        assert "schedule=1f1b needs the loss of each microbatch" in said
    assert "activation-checkpointing and a pipeline do not go" in refused(Deep, activation_checkpointing=True)
    assert "--compile and a pipeline do not go" in refused(Deep, compile=True)
    assert "zero1 and a pipeline do not go" in refused(Deep, zero1=True)
    assert "does other operations than in its trial" in refused(Skipping, microbatches=1)
    assert "mm multiplies every sample" in refused(Pairing, microbatches=2)
    assert "is a torch.jit script" in refused(lambda: nn.Sequential(*[scripted() for _ in range(4)]))
    assert "LBFGS" in refused(Deep, torch.optim.LBFGS)
    assert "branches on the values" in refused(Choosing, trust_model=True)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(6, 6))


class Drawing(nn.Module):
    """A block that draws random numbers, or not."""

    draws = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return F.dropout(x) if self.draws else x


def check_ranks_draw_the_same_after_stages_that_draw_their_own() -> None:
    for draws in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Drawing, "draws", draws)
            automatic = staged(microbatches=2)
            try:
                model = nn.Sequential(*[Drawing() for _ in range(4)])
                sgd(list(model.parameters()))
                model(torch.ones(8, 6)).sum().backward()
                before = torch.get_rng_state()
                model(torch.ones(8, 6)).sum().backward()
                unchanged = torch.equal(torch.get_rng_state(), before)
                assert unchanged is not draws and len(set(everyone(torch.rand(1).item()))) == 1
                if not draws:
                    patch.setattr(Drawing, "draws", True)
                    assert "does other operations than in its trial" in refusal(partial(model, torch.ones(8, 6)))
            finally:
                automatic.abandon()


class Unasked(Deep):
    def forward(self, x: Tensor, beside: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def check_an_argument_that_no_output_depends_on() -> None:
    def step(automatic: AutomaticTraining | None) -> float:
        torch.manual_seed(3)
        model = Unasked()
        sgd(list(model.parameters()))
        loss = model(torch.ones(8, 6), torch.ones(8, 2)).square().mean()
        loss.backward()
        if automatic is not None:
            automatic.finish({})
            automatic.abandon()
        return float(loss.detach())

    assert abs(step(staged(microbatches=4)) - step(None)) < CLOSE


class Reentrant(Deep):
    """Computes its blocks again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = checkpoint(layer, x, use_reentrant=True) if self.training else layer(x)
        return x


class ReentrantLayer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


def check_checkpoints_without_a_graph_are_refused() -> None:
    words = "checkpoint with use_reentrant=True"
    assert words in refused(Reentrant)
    assert words in refused(Reentrant, microbatches=2)
    assert words in refused(lambda: nn.Sequential(*[ReentrantLayer(6, 6) for _ in range(4)]))

    def late() -> None:
        model = Reentrant().eval()
        optimizer = sgd(list(model.parameters()))
        for _ in range(2):
            model(torch.ones(8, 6)).sum().backward()
            optimizer.step()
            model.train()

    automatic = staged()
    try:
        assert words in refusal(late)
    finally:
        automatic.abandon()


class Experts(nn.Module):
    """The first half of the rows is one's, the second the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
        return F.grouped_mm(x, self.weight, offs=ends)


def check_experts_products_are_followed_in_any_type() -> None:
    build = lambda: nn.Sequential(nn.Linear(6, 8), *[Experts() for _ in range(3)], nn.Linear(8, 6))  # noqa: E731
    compare(Case(build, deep().inputs, deep().targets), microbatches=1)


class Pairing(Deep):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)  # type: ignore[no-untyped-call]
        return y @ y.T @ y  # type: ignore[no-any-return]


class Skipping(Deep):
    """Leaves a layer out where no gradient is wanted, as in the trial."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.children()):
            x = layer(x) if number != 2 or torch.is_grad_enabled() else x
        return x


class Choosing(Deep):
    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.children()
        y = first(x)
        for layer in others:
            y = layer(y) if y.sum() != 0 else y
        return y  # type: ignore[no-any-return]


def check_an_overflow_in_one_stage_skips_the_step_of_all() -> None:
    automatic = staged(balance="parameters")
    try:
        model = deep().model()
        optimizer = sgd(list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        x, _ = deep().batches(1)[0]
        scaler.scale(model(x).sum()).backward()
        last = [parameter for parameter in model.parameters() if not parameter.is_meta][-1]
        if dist.get_rank() == 0 and last.grad is not None:
            last.grad[0] = float("inf")
        before = last.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(last, before)
        assert scaler.get_scale() == 4.0
        assert pickle.dumps(scaler)
        automatic.finish({})
    finally:
        automatic.abandon()


CALLS = itertools.count(1)


class Breaking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if next(CALLS) > 60 and dist.get_rank() == 1:
            raise ValueError("broken layer")
        return super().forward(x)


def break_in_one_stage() -> None:
    """A loop whose second stage raises after some steps, while the first waits for its gradients."""
    staged(balance="parameters")
    model = nn.Sequential(*[Breaking(6, 6) for _ in range(4)])
    optimizer = sgd(list(model.parameters()))
    while True:
        optimizer.zero_grad()
        model(torch.ones(8, 6)).sum().backward()
        optimizer.step()
