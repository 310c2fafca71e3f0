"""FSDP: every option by its effect."""

from __future__ import annotations

import copy
import weakref

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from jupyter_torchdist.strategies.core import dtensors, optimizers
from jupyter_torchdist.strategies.core.context import ParallelContext
from jupyter_torchdist.strategies.parallel import fsdp, restore

from . import models
from .models import CASES, Gpt, adamw, sgd, step
from .ranks import CLOSE, assert_close, context, hooks_of, local_bytes, mean, mine

STEPS = 4


def sharded(model: nn.Module, context: ParallelContext) -> dict[nn.Parameter, nn.Parameter]:
    before = optimizers.by_name(model)
    fsdp.check(model, context)
    fsdp.apply(model, context)
    return optimizers.replaced(before, model)


def trained(
    name: str, how: ParallelContext, make: models.MakeOptimizer = adamw, switch: int = 0, within: float = CLOSE
) -> nn.Module:
    """A model trained as sharded (from step ``switch`` on), held against one device in losses and weights."""
    case = CASES[name]
    losses, weights = models.alone(case, STEPS, make)
    model = case.model()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for number, (inputs, targets) in enumerate(case.batches(STEPS)):
        if number == switch:
            optimizers.remap(optimizer, sharded(model, how))
        own = (inputs, targets) if number < switch else (mine(inputs), mine(targets))
        loss = mean(step(model, optimizer, *own, after=lambda: None))
        assert abs(loss - losses[number]) < within, (name, number, loss, losses[number])
    assert_close(model.state_dict(), weights, within)
    return model


def check_models_train_as_on_one_device() -> None:
    for name in ("mlp", "tied", "untied", "mixture"):
        for make in (adamw, sgd):
            trained(name, context(), make)


def check_conversion_in_mid_training_takes_the_optimizers_state_along() -> None:
    trained("tied", context(), adamw, switch=2)
    trained("mixture", context(), sgd, switch=2)


def check_a_rank_holds_its_share_and_classes_and_names_stay() -> None:
    model = Gpt(tied=False, width=16)
    names, full = list(model.state_dict()), local_bytes(list(model.parameters()))
    sharded(model, context())
    assert isinstance(model, Gpt)
    assert list(model.state_dict()) == names
    assert abs(local_bytes(list(model.parameters())) - full / dist.get_world_size()) < 0.1 * full
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())


def check_restored_models_are_plain_whole_and_tied() -> None:
    model, handle_ran = CASES["tied"].model(), []
    assert isinstance(model, Gpt)
    model.layers[1].register_forward_hook(lambda *_: handle_ran.append(1))
    hooks, originals = hooks_of(model), dict(model.named_parameters())
    optimizer = adamw(list(model.parameters()))
    before = sharded(model, context())
    optimizers.remap(optimizer, before)
    optimizers.release(before)
    for inputs, targets in CASES["tied"].batches(STEPS):
        step(model, optimizer, mine(inputs), mine(targets), after=lambda: None)
    restore.restore(model, before)
    restore.restore_optimizer(optimizer, before)
    assert type(model) is Gpt and type(model.layers[0]) is models.Block
    assert hooks_of(model) == hooks and handle_ran
    assert model.head.weight is model.tokens.weight
    assert not any(name.startswith("_fsdp") or "-" in name for module in model.modules() for name in vars(module))
    if dist.get_rank() == 0:
        _, weights = models.alone(CASES["tied"], STEPS)
        assert_close(model.state_dict(), weights)
        assert all(type(p) is nn.Parameter and not isinstance(p, DTensor) for p in model.parameters())
        assert all(model.get_parameter(name) is parameter for name, parameter in originals.items())
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].shape == parameter.shape and type(state["exp_avg"]) is Tensor
        step(model, optimizer, *CASES["tied"].batches(1)[0], after=lambda: None)
        copy.deepcopy(model)
    else:
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.head.weight.shape == (11, 16)


def check_a_model_comes_back_one_parameter_at_a_time() -> None:
    """Rank 0 collects one full copy; no other rank ever has more than the parameter that is being gathered."""
    model = Gpt(tied=False, width=16)
    sharded(model, context())
    gathered: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    original = dtensors.whole

    def noting(tensor: Tensor) -> Tensor:
        found = original(tensor)
        gathered.append(weakref.ref(found))
        alive.append(sum(one() is not None for one in gathered))
        return found

    dtensors.whole = noting
    try:
        restore.restore(model)
    finally:
        dtensors.whole = original
    assert len(alive) == len(list(model.parameters()))
    assert max(alive) == 1 or dist.get_rank() == 0, alive
