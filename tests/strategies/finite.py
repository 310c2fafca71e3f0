"""Gradients that are not finite: told by all ranks together, with where they come from; taken, left out, or the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import jupyter_torchdist as td
from jupyter_torchdist.protocol.errors import TrainingError
from jupyter_torchdist.strategies.auto import AutomaticTraining
from jupyter_torchdist.strategies.core.context import ParallelContext
from jupyter_torchdist.strategies.core.dtensors import local

from .languages import LENGTH, WORDS, Language
from .models import Gpt, Mlp
from .prepared import job
from .ranks import SAID, assert_close, context, everyone, failure
from .unchanged import under

Trained = tuple[nn.Module, torch.optim.Optimizer, list[float]]
Make = Callable[..., torch.optim.Optimizer]

ADAM = partial(torch.optim.Adam, lr=0.05)
BATCH, BAD = 4, (5, 19)
"""The samples whose loss is NaN: in the second step, which a rank sees whole, and in the fifth."""


def numbers() -> tuple[nn.Module, Tensor, Tensor]:
    return Mlp(), torch.randn(24, 6), torch.randint(3, (24,))


def words() -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randint(WORDS, (24, LENGTH))
    return Language(), x, x.roll(1, 1)


def blocks() -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randint(11, (24, 6))
    return Gpt(tied=False), x, x.roll(1, 1)


def finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(one.grad).all()) for one in model.parameters() if one.grad is not None)


def cell(
    given: Callable[[], tuple[nn.Module, Tensor, Tensor]] = numbers,
    make: Make = ADAM,
    *,
    bad: tuple[int, ...] = BAD,
    by_hand: bool = False,
    prepare: Callable[..., Any] | None = None,
) -> Trained:
    """One epoch in which the loss of samples ``bad`` is NaN. ``by_hand``: the cell leaves out these steps itself."""
    torch.manual_seed(3)
    model, x, y = given()
    optimizer = make(model.parameters())
    weights = torch.ones(len(x)).index_fill(0, torch.tensor(bad, dtype=torch.int64), torch.nan)
    loader = DataLoader(TensorDataset(x, y, weights), BATCH)
    if prepare is not None:
        prepare(model, optimizer, loader)
    for inputs, targets, weight in loader:
        optimizer.zero_grad()
        each = F.cross_entropy(model(inputs).movedim(-1, 1), targets, reduction="none")
        loss = (each.flatten(1).mean(1) if each.dim() > 1 else each).mul(weight).mean()
        loss.backward()
        if not by_hand or finite(model):
            optimizer.step()
    return model, optimizer, []


def as_if_left_out(
    how: ParallelContext, given: Any = numbers, make: Make = ADAM, *, explicit: bool = False
) -> list[str]:
    """Under ``skip`` the cell leaves what one device leaves that takes finite steps alone. What is said."""
    expected, theirs, _ = cell(given, make, by_hand=True)
    if explicit:
        with job(how):
            model, optimizer, _ = cell(given, make, prepare=td.prepare)
    else:
        model, optimizer, _ = under(how, partial(cell, given, make))
    if dist.get_rank() == 0:
        assert finite(expected)
        assert_close(model.state_dict(), expected.state_dict())
        steps = [state["step"] for state in theirs.state.values() if "step" in state]
        assert [state["step"] for state in optimizer.state.values() if "step" in state] == steps
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            for name, value in theirs.state[other].items():
                torch.testing.assert_close(optimizer.state[one][name], value, atol=1e-5, rtol=1e-5)
    return [line for line in SAID if "not finite" in line]


def told(said: list[str], where: str, sample: str = "sample 1 of the batch") -> None:
    """It is said once, with the step, the layer, the line, the rank and the sample."""
    first, last = said
    assert first.startswith("step 2: the gradients of "), first
    assert f"the loss is at {__file__}, line " in first and first.count("line") == 1
    assert where in first and sample in first and "The step was left out" in first, first
    assert last == "gradients were not finite in 2 steps, from step 2 to step 5"


def world(name: str) -> dict[str, int]:
    return {name: dist.get_world_size()}


# ------------------------------------------------------------------------------------------ each strategy leaves it out


def check_ddp() -> None:
    said = as_if_left_out(context(world("dp_replicate"), nonfinite="skip"))
    told(said, "6 of 6 parameters are not finite, in the backward first 4.bias; the loss", "from rank 0: ")
    told(said, "the gradients of the model's outputs are not finite for sample 1 of the batch")


def check_fsdp() -> None:
    told(as_if_left_out(context(nonfinite="skip")), "6 of 6 parameters")


def check_zero1() -> None:
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    told(as_if_left_out(context(world("dp_replicate"), zero1=True, nonfinite="skip"), make=momentum), "from rank 0: ")


def check_tp() -> None:
    told(as_if_left_out(context(world("tp"), nonfinite="skip"), words), "from all ranks: ")


def check_cp() -> None:
    told(as_if_left_out(context(world("cp"), nonfinite="skip"), words), "from all ranks: ")


def check_pp() -> None:
    for schedule in ("gpipe", "1f1b"):
        SAID.clear()
        how = context(world("pp"), name="pp", schedule=schedule, nonfinite="skip")
        told(as_if_left_out(how, blocks), "in the backward first head.weight; the loss", "from rank 1")


def check_prepare() -> None:
    for degrees in (world("dp_replicate"), world("dp_shard")):
        SAID.clear()
        said = as_if_left_out(context(degrees, nonfinite="skip"), explicit=True)
        told(said, "from rank 0: the gradients of the model's outputs are not finite for ")


# -------------------------------------------------------------------------------------------------------- other choices


def check_it_goes_on_by_default_and_says_so_once() -> None:
    for degrees in (world("dp_replicate"), world("dp_shard")):
        SAID.clear()
        model, _, _ = under(context(degrees), cell)
        assert dist.get_rank() or not bool(torch.isfinite(next(model.parameters())).any())
        said = [line for line in SAID if "not finite" in line]
        assert len(said) == 2 and "The optimizer took them" in said[0], said
        assert said[1] == "gradients were not finite in 5 steps, from step 2 to step 6"


def check_all_ranks_stop_before_the_step() -> None:
    for degrees in (world("dp_replicate"), world("dp_shard")):
        kept: list[Any] = []

        def keeping(model: nn.Module, optimizer: torch.optim.Optimizer, _loader: object, kept: Any = kept) -> None:
            kept[:] = [model, optimizer]

        automatic = AutomaticTraining(context(degrees, nonfinite="stop"))
        automatic.install()
        try:
            error = failure(lambda keeping=keeping: cell(prepare=keeping))  # type: ignore[misc]
        finally:
            automatic.abandon()
        assert isinstance(error, TrainingError) and "step 2: the gradients of 6 of 6" in str(error), error
        assert "stopped before the optimizer's step" in str(error) and "-O nonfinite=skip" in error.hint
        assert len(set(everyone(str(error)))) == 1
        model, optimizer = kept
        assert all(state["step"] == 1 for state in optimizer.state.values())
        assert all(bool(torch.isfinite(local(one)).all()) for one in model.parameters())


def check_nothing_is_said_of_finite_gradients() -> None:
    under(context(world("dp_replicate"), nonfinite="stop"), partial(cell, bad=()))
    under(context(nonfinite="stop"), partial(cell, bad=()))
    assert not [line for line in SAID if "not finite" in line]


# -------------------------------------------------------------------------------------------------- where it comes from


class Root(nn.Module):
    """A square root in the middle, whose gradient is infinite for a sample of zeros. Its outputs are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).square().sqrt())  # type: ignore[no-any-return]


def rooted() -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randn(24, 6)
    x[7] = 0.0  # the second step, rank 1
    return Root(), x, torch.randint(3, (24,))


def check_the_rank_is_told_where_the_outputs_are_finite() -> None:
    for degrees in (world("dp_replicate"), world("dp_shard")):
        for prepare in (None, td.prepare):
            SAID.clear()
            how = context(degrees, nonfinite="skip")
            if prepare is None:
                under(how, partial(cell, rooted, bad=()))
            else:
                with job(how):
                    cell(rooted, bad=(), prepare=prepare)
            said = next(line for line in SAID if "not finite" in line)
            assert "1 of 3 parameters are not finite, in the backward first first.weight; " in said, said
            assert said.endswith(
                "from rank 1. The step was left out: parameters and optimizer are as before it (said once)"
            )


def check_outputs_that_are_not_finite_come_before_their_gradients() -> None:
    def looping() -> Trained:
        torch.manual_seed(3)
        model = Mlp()
        optimizer = ADAM(model.parameters())
        x = torch.randn(8, 6)
        x[6] = torch.nan
        for _ in range(2):
            optimizer.zero_grad()
            outputs = model(x)
            outputs.square().mean().sqrt().backward()  # every gradient is NaN
            optimizer.step()
        return model, optimizer, []

    under(context(world("dp_replicate"), nonfinite="skip"), looping)
    said = next(line for line in SAID if "not finite" in line)
    assert "from rank 1: the model's outputs are not finite for sample 6 of the batch" in said, said


# ------------------------------------------------------------------------------------------------------ optimizer steps


def check_overflows_of_a_gradient_scaler_are_not_counted() -> None:
    def scaled() -> Trained:
        torch.manual_seed(3)
        model, scaler = Mlp(), torch.amp.GradScaler("cpu", init_scale=1e38)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, before = torch.randn(8, 6), copy.deepcopy(model.state_dict())
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(x).square().sum() * 10).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() < 1e38
        if not hasattr(next(model.parameters()), "to_local"):
            assert_close(model.state_dict(), before)
        return model, optimizer, []

    under(context(world("dp_replicate"), nonfinite="stop"), scaled)
    under(context(nonfinite="stop"), scaled)
    assert not [line for line in SAID if "not finite" in line]


def check_a_closure_is_looked_at_after_its_call() -> None:
    def closing(make: Make) -> Trained:
        torch.manual_seed(3)
        model = Mlp()
        optimizer = make(model.parameters())
        x, factors = torch.randn(8, 6), iter([1.0, torch.nan] + [1.0] * 100)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean() * factor
            loss.backward()
            return loss

        for _ in range(3):
            factor = next(factors)
            optimizer.step(closure)
        return model, optimizer, []

    for make in (partial(torch.optim.SGD, lr=0.1), partial(torch.optim.LBFGS, max_iter=2)):
        for zero1 in (False, True) if make.func is torch.optim.SGD else (False,):
            SAID.clear()
            model, _, _ = under(context(world("dp_replicate"), nonfinite="skip", zero1=zero1), partial(closing, make))
            assert all(bool(torch.isfinite(one).all()) for one in model.parameters())
            assert [line[:7] for line in SAID if "not finite" in line] == ["step 2:"]


def check_large_gradients_are_not_infinite_ones() -> None:
    def large() -> Trained:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-38)
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.full((4, 6), 2.5e18)) * 1e19).sum().backward()  # 1e38 each, and 18 of them
            optimizer.step()
        return model, optimizer, []

    under(context(world("dp_replicate"), nonfinite="stop"), large)


def check_flags_that_are_read_later_say_the_same() -> None:
    """As on a GPU: what a step's flags are is asked when the next one begins, the last at the end."""
    for degrees in (world("dp_replicate"), world("dp_shard")):
        for bad, steps in ((BAD, "5 steps, from step 2 to step 6"), ((22,), "")):
            SAID.clear()
            automatic = AutomaticTraining(context(degrees))
            automatic._guard.later = True
            automatic.install()
            try:
                cell(bad=bad)
                automatic.finish()
            finally:
                automatic.abandon()
            said = [line for line in SAID if "not finite" in line]
            assert said[0].startswith("step 2:" if steps else "step 6:") and "6 of 6 parameters" in said[0]
            assert said[1:] == ([f"gradients were not finite in {steps}"] if steps else [])
