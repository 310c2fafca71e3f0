"""Each option of FSDP by its effect, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from jupyter_torchdist.strategies.core import optimizers
from jupyter_torchdist.strategies.parallel import fsdp, restore
from jupyter_torchdist.strategies.sharded import norms

from . import models
from .models import CASES, Block, Gpt, Mixture, Mlp, adamw, sgd, step
from .ranks import CLOSE, SAID, assert_close, context, everyone, local_bytes, mine, refusal
from .sharding import STEPS, sharded, trained


def gathered(module: nn.Module) -> bool:
    """Whether a unit holds its parameters whole at this moment."""
    return not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def units_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def check_what_is_whole_between_forward_and_backward() -> None:
    inputs, _ = CASES["untied"].batches(1)[0]
    for options, whole in (
        ({"sharding_strategy": "FULL_SHARD"}, False),
        ({"reshard_after_forward": False}, True),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, True),
    ):
        model = Gpt(tied=False)
        sharded(model, context(**options))
        output = model(mine(inputs))
        assert gathered(model.layers[0]) is whole, options
        output.sum().backward()
        assert not gathered(model.layers[0])
        with torch.no_grad():
            model(mine(inputs))
        assert not any(gathered(module) for module in model.modules() if [*module.parameters(recurse=False)])


def check_no_shard_keeps_a_copy_on_every_rank() -> None:
    for degrees in ({"dp_shard": 2}, {"dp_replicate": 2}):
        model = trained("untied", context(degrees, sharding_strategy="NO_SHARD"))
        full = local_bytes(list(Gpt(tied=False).parameters()))
        assert local_bytes(list(model.parameters())) == full
        assert all(isinstance(p, DTensor) and p.placements == (Replicate(),) for p in model.parameters())
        restore.restore(model)
        assert type(model) is Gpt and type(model.layers[0]) is Block


def check_units_are_what_the_policy_says() -> None:
    layers = ["layers.0", "layers.1", "layers.2"]
    inner = [f"layers.{number}.mlp.1" for number in range(3)]
    for options, expected in (
        ({}, layers),
        ({"auto_wrap_policy": "NO_WRAP"}, []),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ("Block",)}, layers),
        ({"transformer_layer_cls_to_wrap": ("Block", "Embedding")}, ["tokens", "places", *layers]),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1500}, layers),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10**6}, []),
    ):
        model = Gpt(tied=False)
        sharded(model, context(**options))
        assert units_of(model) == ["", *expected], (options, units_of(model))
    model = Gpt(tied=False)
    sharded(model, context(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=512))
    assert set(inner) < set(units_of(model))
    message = refusal(lambda: fsdp.check(Gpt(), context(transformer_layer_cls_to_wrap=("LlamaLayer",))))
    assert "LlamaLayer" in message and "Block" in message and "Embedding" in message
    model = Gpt(tied=False)
    model._no_split_modules = ["Block"]  # type: ignore[assignment]
    sharded(model, context(auto_wrap_policy="TRANSFORMER_BASED_WRAP"))
    assert units_of(model) == ["", *layers]


def check_the_repeated_block_is_found() -> None:
    translator = nn.Transformer(8, 2, 2, 3, 16)
    names = {module: name for name, module in translator.named_modules()}
    found = [names[unit[0]] for unit in fsdp.units(translator, context(auto_wrap_policy="AUTO").plan)]
    assert found == [f"encoder.layers.{n}" for n in range(2)] + [f"decoder.layers.{n}" for n in range(3)]
    assert fsdp.units(Mlp(), context().plan) == []
    assert len(fsdp.units(nn.Sequential(*[nn.Linear(1100, 1100) for _ in range(3)]), context().plan)) == 3


def check_modules_that_share_a_parameter_are_one_unit() -> None:
    how = context(transformer_layer_cls_to_wrap=("Embedding", "Block", "Linear"))
    model = Gpt()
    groups = [len(group) for group in fsdp.units(model, how.plan)]
    assert sorted(groups)[-2:] == [1, 2]
    trained("tied", how)
    outer, inner = nn.Linear(4, 4), nn.Linear(4, 4)
    outer.add_module("inner", inner)
    inner.weight = outer.weight
    nested = nn.Sequential(outer, nn.Linear(4, 4))
    assert fsdp.units(nested, context(transformer_layer_cls_to_wrap=("Linear",)).plan) == [[nested[0]], [nested[1]]]


def check_the_next_unit_is_gathered_ahead_when_asked_for() -> None:
    inputs, _ = CASES["untied"].batches(1)[0]
    for wanted in (False, True):
        model = Gpt(tied=False)
        sharded(model, context(forward_prefetch=wanted))
        following: Any = model.layers[1]
        seen: list[bool] = []

        def look(*_: object, following: Any = following, seen: list[bool] = seen) -> None:
            group = following._get_fsdp_state()._fsdp_param_group
            seen.append(group._all_gather_result is not None)

        layers: Any = model.layers
        layers[0].norm.register_forward_pre_hook(look)
        model(mine(inputs))
        assert seen == [wanted]


def check_backward_gathers_ahead_unless_told_not_to() -> None:
    inputs, _ = CASES["untied"].batches(1)[0]
    for how, ahead in (("BACKWARD_PRE", True), ("NO_PREFETCH", False), ("BACKWARD_POST", False)):
        model = Gpt(tied=False)
        sharded(model, context(backward_prefetch=how))
        before: Any = model.layers[0]
        seen: list[bool] = []

        def look(_gradient: Tensor, before: Any = before, seen: list[bool] = seen) -> None:
            group = before._get_fsdp_state()._fsdp_param_group
            seen.append(group._all_gather_result is not None)

        layers: Any = model.layers
        layers[1].back.register_forward_hook(lambda _m, _a, out, look=look: (out.register_hook(look), None)[1])
        model(mine(inputs)).sum().backward()
        assert seen == [ahead], how
    assert any("BACKWARD_POST" in line for line in SAID)


def check_weights_of_rank_0_hold_unless_told_otherwise() -> None:
    """Its buffers, too, of which every rank keeps all."""
    for wanted in (True, False):
        model = CASES["conv"].model(seed=dist.get_rank())
        model.get_buffer("norm.running_mean").fill_(dist.get_rank())
        own = model.get_parameter("conv.weight").detach().clone()
        sharded(model, context(sync_module_states=wanted))
        assert everyone(model.get_buffer("norm.running_mean")[0].item()) == ([0, 0] if wanted else [0, 1])
        weight: Any = model.get_parameter("conv.weight")
        wished, (part,) = everyone(own), [own.chunk(2)[dist.get_rank()]]
        torch.testing.assert_close(weight.to_local(), wished[0].chunk(2)[dist.get_rank()] if wanted else part)


def check_rank_0_alone_needs_weights_before_sharding() -> None:
    for name in ("tied", "mixture"):
        _, weights = models.alone(CASES[name], STEPS)
        with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
            model = CASES[name].model()
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        before = sharded(model, context())
        assert not any(parameter.is_meta for parameter in model.parameters())
        optimizers.remap(optimizer, before)
        for inputs, targets in CASES[name].batches(STEPS):
            step(model, optimizer, mine(inputs), mine(targets), after=lambda: None)
        assert_close(model.state_dict(), weights)
    with torch.device("meta"):
        nowhere = Mlp()
    assert "no values on rank 0" in refusal(lambda: fsdp.apply(nowhere, context()))
    for wanted in (False, True):
        model = CASES["conv"].model(seed=dist.get_rank())
        model.get_buffer("norm.running_mean").fill_(dist.get_rank() + 3)
        optimizer = adamw(list(model.parameters()))  # keeps them
        whole = local_bytes(list(model.parameters()))
        held: list[int] = []
        original = fsdp._shard

        def noting(model: nn.Module, context: Any, original: Any = original, see: Any = (held, optimizer)) -> Any:
            see[0].append(local_bytes(see[1].param_groups[0]["params"]))
            return original(model, context)

        fsdp._shard = noting
        try:
            sharded(model, context(cpu_ram_efficient_loading=wanted))
        finally:
            fsdp._shard = original
        assert everyone(held) == [[whole], [0 if wanted else whole]]
        assert_close(
            model.state_dict(), {**CASES["conv"].model().state_dict(), "norm.running_mean": torch.full((6,), 3.0)}
        )


def check_offloaded_parameters_need_no_pinned_memory_here() -> None:
    model: Any = trained("mlp", context(cpu_offload=True))
    (parameter, *_) = model._get_fsdp_state()._fsdp_param_group.fsdp_params
    assert parameter.offload_to_cpu and not parameter.pin_memory


def check_half_precision_computes_low_sums_high_and_gives_fp32() -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model: Any = CASES["untied"].model()
        sharded(model, context(precision=name))
        seen: list[torch.dtype] = []
        model.layers[0].norm.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out.dtype))
        inputs, targets = CASES["untied"].batches(1)[0]
        output = model(mine(inputs))
        models.loss_of(output, mine(targets)).backward()
        assert seen == [dtype] and output.dtype == torch.float32
        kinds = {kind for p in model.parameters() if p.grad is not None for kind in (p.dtype, p.grad.dtype)}
        assert kinds == {torch.float32}


def check_evaluation_between_backward_and_step_leaves_nothing_stale() -> None:
    for how in (context(), context(sharding_strategy="SHARD_GRAD_OP")):
        _, weights = models.alone(CASES["tied"], STEPS, sgd)
        model = CASES["tied"].model()
        optimizer = sgd(list(model.parameters()))
        optimizers.remap(optimizer, sharded(model, how))
        for inputs, targets in CASES["tied"].batches(STEPS):

            def look(inputs: Tensor = inputs, model: nn.Module = model) -> None:
                model(mine(inputs))  # without no_grad, as some write it

            step(model, optimizer, mine(inputs), mine(targets), after=look)
        assert_close(model.state_dict(), weights)


def check_a_method_beside_forward() -> None:
    class Judge(Mlp):
        def judge(self, x: Tensor) -> Tensor:
            return self(x).square()  # type: ignore[no-any-return]

        def shortcut(self, x: Tensor) -> Tensor:
            return x @ self.get_parameter("0.weight").T

    inputs, _ = CASES["mlp"].batches(1)[0]
    model: Any = Judge()
    expected = model.shortcut(inputs).detach()
    fsdp.apply(model, context(), forward_methods=["shortcut"])
    torch.testing.assert_close(model.shortcut(inputs), expected)
    restore.restore(model)
    assert "shortcut" not in vars(model)
    model = Judge()
    fsdp.apply(model, context())
    model.judge(inputs)
    model.reshard()
    try:
        model.shortcut(inputs)
    except RuntimeError as error:
        said = fsdp.explain(error)
        assert said is not None and "other methods than forward" in str(said)
    else:
        raise AssertionError("a shard was multiplied")
    assert fsdp.explain(RuntimeError("something else")) is None


def check_a_parameter_without_dimensions_stays_whole_and_alike() -> None:
    model = trained("mixture", context())
    assert isinstance(model, Mixture) and not isinstance(model.temperature, DTensor)
    values = everyone(model.temperature.item())
    assert len(set(values)) == 1
    with_decay = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
    optimizers.remap(with_decay, {})
    assert with_decay.param_groups[0]["foreach"] is False


def check_channels_last_weights_can_be_sharded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 5, 5)
    dist.broadcast(x, 0)
    expected = model(x)
    dist.broadcast(expected, 0)
    sharded(model, context())
    torch.testing.assert_close(model(x), expected, atol=CLOSE, rtol=CLOSE)


def check_what_cannot_be_is_refused_in_words() -> None:
    model = Mlp()
    sharded(model, context())
    assert "distributed already" in refusal(lambda: fsdp.check(model, context()))
    assert "deepcopy of Mlp" in refusal(lambda: copy.deepcopy(model))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    assert "1.weight (torch.float64)" in refusal(lambda: fsdp.check(mixed, context()))
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Adafactor):
        optimizer: Any = kind(Mlp().parameters())
        optimizers.check(optimizer, sharded=False)
        assert kind.__name__ in refusal(partial(optimizers.check, optimizer, sharded=True))


def check_other_optimizers_train_shards() -> None:
    def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.05)

    def rmsprop(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5)

    for make, within in ((rmsprop, CLOSE), (muon, 0.02)):  # Muon multiplies in bf16
        trained("mlp", context(), make, within=within)
        trained("mlp", context(), make, switch=2, within=within)


class Choice(nn.Module):
    """Three experts alike; the caller chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.last(self.experts[expert](x))  # type: ignore[no-any-return]


def check_ranks_may_use_different_experts() -> None:
    torch.manual_seed(1)
    whole, model = Choice(), Choice()
    model.load_state_dict(whole.state_dict())
    one = torch.optim.AdamW(whole.parameters(), lr=0.05, weight_decay=0.5)
    two = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    optimizers.remap(two, sharded(model, context()))
    world = dist.get_world_size()
    for number, (inputs, _) in enumerate(CASES["mlp"].batches(3)):
        experts = [(rank + number) % 2 for rank in range(world)]  # the third is never used
        one.zero_grad()
        losses = [whole(x, expert).square().mean() for x, expert in zip(inputs.chunk(world), experts, strict=True)]
        torch.stack(losses).mean().backward()
        one.step()
        output = model(mine(inputs), experts[dist.get_rank()])
        two.zero_grad()
        output.square().mean().backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (whole.get_parameter(name).grad is None), name
        two.step()
    assert_close(model.state_dict(), whole.state_dict())


def check_what_was_used_in_a_microbatch_without_sums_counts() -> None:
    whole, model = Choice(), Choice()
    for parameter in whole.parameters():
        dist.broadcast(parameter.data, 0)
    model.load_state_dict(whole.state_dict())
    sharded(model, context())
    it: Any = model
    x = torch.ones(2, 6)
    for expert in (0, 1):
        it.set_requires_gradient_sync(expert == 1)
        whole(x, expert).sum().backward()
        model(x, expert).sum().backward()
    for name, parameter in model.named_parameters():
        expected = whole.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None), name
        if isinstance(parameter.grad, DTensor):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected)


def check_gradients_are_clipped_by_the_norm_of_all() -> None:
    """Over DTensors and a plain 0-dim parameter."""
    case = CASES["mixture"]
    for kind in (2.0, float("inf")):
        whole, model = case.model(), case.model()
        sharded(model, context())
        inputs, targets = case.batches(1)[0]
        models.loss_of(whole(inputs), targets).backward()
        models.loss_of(model(mine(inputs)), mine(targets)).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, kind)
        found = norms.clip_grad_norm_(model.parameters(), 0.01, kind)
        torch.testing.assert_close(found, expected, atol=CLOSE, rtol=CLOSE)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_close(gradients, {n: p.grad for n, p in whole.named_parameters() if p.grad is not None})
