"""DeepSpeed: unmodified cells by the automatic way under every ZeRO stage, against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from . import unchanged
from .models import Gpt, Mlp, adamw
from .ranks import CLOSE, SAID, assert_close, context, refusal

Trained = tuple[nn.Module, torch.optim.Optimizer, list[float]]
Cell = Callable[[], Trained]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Probe = Callable[[nn.Module, torch.optim.Optimizer], object]
Config = dict[str, Any]


def under(cell: Cell, config: Config, **plan: Any) -> Trained:
    return unchanged.under(
        context({"dp_replicate": dist.get_world_size()}, name="deepspeed", config=config, **plan), cell
    )


def zero(stage: int, **more: Any) -> Config:
    return {"zero_optimization": {"stage": stage}, **more}


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    words = torch.randint(11, (16, 6))
    return Gpt(), words, words.roll(1, 1)


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    return Mlp(), torch.randn(16, 6), torch.randint(3, (16,))


def nothing(*_: object) -> None:
    """Looks at nothing."""


def training(
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]] = mlp,
    loss_of: Loss = cross_entropy,
    *,
    clip: float = 0.0,
    parts: int = 1,
    batch: int = 4,
    scheduled: bool = False,
    optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw,
    after_backward: Probe = nothing,
    after_step: Probe = nothing,
) -> Cell:
    """A cell for one device: two passes over a loader, each step on ``parts`` batches."""

    def cell() -> Trained:
        torch.manual_seed(3)
        model, x, y = make()
        optimizer = optimizer_of(list(model.parameters()))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
        losses = []
        for _ in range(2):
            for number, (inputs, targets) in enumerate(DataLoader(TensorDataset(x, y), batch, shuffle=True)):
                loss = loss_of(model, inputs, targets) / parts
                loss.backward()
                losses.append(loss.item())
                after_backward(model, optimizer)
                if number % parts == parts - 1:
                    if clip:
                        losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
                    optimizer.step()
                    optimizer.zero_grad()
                    if schedule is not None:
                        schedule.step()
                    after_step(model, optimizer)
            with torch.no_grad():
                losses.append(loss_of(model, x, y).item())
        return model, optimizer, losses

    return cell


def equal(cell: Cell, config: Config, within: float = CLOSE, reference: Cell | None = None, **plan: Any) -> None:
    """Losses, weights and the optimizer's state are one device's, and everything is plain."""
    before, known, expected = (reference or cell)()
    model, optimizer, losses = under(cell, config, **plan)
    if reference is None:
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=2 * within), (losses, expected)
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        assert type(ours) is type(theirs) and type(ours._parameters) is dict
        assert vars(ours).keys() - {"_compiled_call_impl"} == vars(theirs).keys()
        assert not ours._forward_hooks and not ours._forward_pre_hooks and not ours._state_dict_hooks
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter and not vars(parameter) and parameter.dtype == torch.float32
    if dist.get_rank() != 0:
        assert all(parameter.is_meta for parameter in model.parameters())
        return
    assert_close(model.state_dict(), before.state_dict(), within)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    mine, expected_state = optimizer.state_dict(), known.state_dict()
    assert mine["param_groups"] == expected_state["param_groups"]
    for number, state in expected_state["state"].items():
        assert_close(mine["state"][number], state, within)


def check_every_stage_trains_as_one_device_and_holds_its_part() -> None:
    """Tied weights, clipping by the cell, its scheduler, evaluation between."""
    for stage, parts_of_state, parts_of_model in ((0, 1, 1), (1, 2, 1), (2, 2, 1), (3, 2, 2)):
        held: list[tuple[int, int]] = []

        def note(model: nn.Module, optimizer: torch.optim.Optimizer, held: list[tuple[int, int]] = held) -> None:
            state = sum(one.nbytes for of in optimizer.state.values() for one in of.values() if one.dim())
            held.append((state, sum(_bytes(one) for one in model.parameters())))

        few = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        equal(training(gpt, clip=0.5, scheduled=True, after_step=note), {"zero_optimization": {"stage": stage, **few}})
        whole, (state, weights) = held[0][1], held[-1]
        assert abs(state * parts_of_state - 2 * whole) < 0.1 * whole, (stage, state, whole)
        assert abs(weights * parts_of_model - whole) < 0.1 * whole, (stage, weights, whole)


def _bytes(parameter: nn.Parameter) -> int:
    part = getattr(parameter, "ds_tensor", None)
    own: int = parameter.data.untyped_storage().nbytes() if part is None else part.numel() * part.element_size()
    return own if part is not None else parameter.numel() * parameter.element_size()


def check_backwards_that_the_cell_accumulates() -> None:
    for stage in (0, 1, 2, 3):
        equal(training(parts=2, clip=0.5), zero(stage))


def check_accumulation_that_the_configuration_asks_for() -> None:
    for stage in (1, 3):
        config = zero(stage, gradient_accumulation_steps=2, gradient_clipping=0.5)
        equal(training(), config, grad_accumulation=2, reference=training(parts=2, clip=0.5))


def check_loops_of_which_each_rank_loads_its_part() -> None:
    for stage in (2, 3):
        equal(training(clip=0.5, batch=5), zero(stage), batch="slices")


def twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    product: Tensor = (model(2 * x) * model(x + 1)).mean()
    return F.mse_loss(model(x), model(x.flip(1)).detach()) + product


def check_several_forwards_of_one_backward_and_other_optimizers() -> None:
    for stage in (1, 2, 3):
        equal(
            training(loss_of=twice, batch=5, optimizer_of=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)), zero(stage)
        )


def check_half_precision_is_that_of_the_weights() -> None:
    seen: list[torch.dtype] = []

    def note(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        seen.append(next(model.parameters()).dtype)

    for stage in (1, 2, 3):
        config = zero(stage, bf16={"enabled": "auto"})
        equal(training(clip=0.5, after_step=note), config, 3e-2, precision="bf16")
    assert torch.bfloat16 in seen


def check_a_schedule_of_the_configuration() -> None:
    rates: list[float] = []
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 4, "warmup_type": "linear"}

    def note(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    lr = adamw(list(Mlp().parameters())).param_groups[0]["lr"]
    under(training(after_step=note), zero(2, scheduler={"type": "WarmupLR", "params": params}))
    assert [round(rate / lr, 3) for rate in rates[:5]] == [0.0, 0.25, 0.5, 0.75, 1.0], rates


def check_states_are_whole_in_between() -> None:
    for stage in (2, 3):
        states: list[tuple[dict[str, Tensor], Any]] = []

        def keep(model: nn.Module, optimizer: torch.optim.Optimizer, states: list[Any] = states) -> None:
            assert sum(one.numel() for one in model.parameters()) == sum(one.numel() for one in Mlp().parameters())
            states.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))

        training(after_step=keep)()
        expected, states[:] = list(states), []
        under(training(after_step=keep), zero(stage))
        for (ours, our_state), (theirs, their_state) in zip(states, expected, strict=True):
            assert_close(ours, theirs)
            if dist.get_rank() == 0:
                assert_close(our_state["state"][0], their_state["state"][0])


def stepped_by_a_closure() -> Trained:
    """LBFGS has a state before its closure calls the model."""
    model, x, y = mlp()
    optimizer, losses = torch.optim.LBFGS(model.parameters()), []

    def closure() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    optimizer.step(closure)
    return model, optimizer, losses


class Spare(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:5]:
            x = layer(x)
        return x


def check_what_is_not_one_devices_is_refused() -> None:
    from deepspeed.accelerator import get_accelerator

    def said(cell: Cell, config: Config | None = None, **plan: Any) -> str:
        return refusal(lambda: under(cell, config or zero(2), **plan))

    def probe(look: Callable[[nn.Module], object]) -> Cell:
        return training(after_backward=lambda model, _: look(model))

    assert "LBFGS may look at a parameter as a whole" in said(training(optimizer_of=torch.optim.LBFGS))
    assert "LBFGS may look at a parameter as a whole" in said(stepped_by_a_closure)
    assert "spare.weight has no gradient" in said(training(lambda: (Spare(), *mlp()[1:])))
    assert "which DeepSpeed keeps in parts in its own buffers" in said(
        probe(lambda model: next(model.parameters()).grad)
    )
    assert "mul_ changes a parameter" in said(probe(lambda model: next(model.parameters()).data[0].mul_(2)))
    assert "thrown away" in said(probe(lambda model: model.zero_grad()))
    assert "load_state_dict" in said(probe(lambda model: model.load_state_dict(model.state_dict())))
    norms = probe(lambda model: [one.norm() for one in model.parameters()])
    assert "norm of a parameter outside the model's forward" in said(
        norms, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    )
    under(norms, zero(2))  # whole there

    def scaled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return torch.amp.GradScaler("cpu").scale(cross_entropy(model, x, y))

    def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    def functional(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model(x)
        return F.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)

    assert "scale: DeepSpeed" in said(training(loss_of=scaled))
    assert "grad: DeepSpeed" in said(training(loss_of=penalised))
    assert "functional_call: DeepSpeed" in said(training(loss_of=functional))
    assert "the cell clips to 0.5" in said(training(clip=0.5), zero(2, gradient_clipping=1.0))
    assert "train_micro_batch_size_per_gpu means 3 samples" in said(
        training(), zero(2, train_micro_batch_size_per_gpu=3)
    )
    assert "DeepSpeed refuses its configuration" in said(training(), {"zero_optimization": {"stage": 2, "nonsense": 1}})
    if not get_accelerator().is_fp16_supported():  # some processors compute in it
        assert "fp16" in said(training(), zero(2), precision="fp16")
    assert "total_num_steps is auto" in said(
        training(), zero(2, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})
    )


def check_one_model_and_one_optimizer() -> None:
    def two() -> Trained:
        model, x, y = mlp()
        parameters = list(model.parameters())
        one, other = adamw(parameters[:2]), adamw(parameters[2:])
        cross_entropy(model, x, y).backward()
        return model, one, [len(other.param_groups)]

    def trained_already() -> Trained:
        model, x, y = mlp()
        optimizer = adamw(list(model.parameters()))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        cross_entropy(model, x, y).backward()
        return model, optimizer, []

    assert "this cell has 2 optimizers" in refusal(lambda: under(two, zero(2)))
    assert "has trained already" in refusal(lambda: under(trained_already, zero(2)))


def check_what_it_left_to_deepspeed_is_said() -> None:
    config: Config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
    under(training(), config)
    assert "DeepSpeed uses its own defaults for zero_optimization.reduce_bucket_size" in SAID
