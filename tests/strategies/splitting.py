"""Tensor parallelism: equal to one device, and every option by its effect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from jupyter_torchdist.strategies.core import optimizers
from jupyter_torchdist.strategies.core.context import ParallelContext
from jupyter_torchdist.strategies.parallel import fsdp, replicate, tensor

from . import models
from .languages import LENGTH, WORDS, Apart, Fused, Language
from .models import Case, adamw, sgd, step
from .ranks import CLOSE, SAID, assert_close, context, local_bytes, mean, mine, refusal

STEPS = 3


def _words() -> Tensor:
    return torch.randint(WORDS, (4, LENGTH))


def case(build: Callable[[], nn.Module]) -> Case:
    return Case(build, _words, _words)


LANGUAGES = {
    "apart": case(Language),
    "fused": case(lambda: Language(Fused)),
    "tied": case(lambda: Language(tied=True)),
    "fused, tied": case(lambda: Language(Fused, tied=True)),
}


def tp(**options: Any) -> ParallelContext:
    return context({"tp": dist.get_world_size()}, **options)


def split(model: nn.Module, how: ParallelContext) -> dict[nn.Parameter, nn.Parameter]:
    before = optimizers.by_name(model)
    tensor.check(model, how)
    tensor.apply(model, how)
    if how.plan.degree("dp_shard") > 1:
        fsdp.apply(model, how)
    elif how.plan.degree("dp_replicate") > 1:
        replicate.apply(model, how)
    return optimizers.replaced(before, model)


def trained(which: Case, how: ParallelContext, make: models.MakeOptimizer = adamw, switch: int = 0) -> nn.Module:
    """Split (from step ``switch`` on) and held against one device in losses and weights."""
    losses, weights = models.alone(which, STEPS, make)
    model = which.model()
    optimizer = make(list(model.parameters()))
    for number, (inputs, targets) in enumerate(which.batches(STEPS)):
        if number == switch:
            optimizers.remap(optimizer, split(model, how))
        own = (mine(inputs, how.data_group), mine(targets, how.data_group)) if number >= switch else (inputs, targets)
        loss = mean(step(model, optimizer, *own, after=lambda: None))
        assert abs(loss - losses[number]) < CLOSE, (number, loss, losses[number])
    assert_close(model.state_dict(), weights)
    return model


def check_languages_train_as_on_one_device() -> None:
    for name, which in LANGUAGES.items():
        for make in (adamw, sgd) if name == "tied" else (adamw,):
            SAID.clear()
            trained(which, tp(), make)
            assert any("layers" in line for line in SAID), SAID


def check_conversion_in_mid_training_takes_the_optimizers_state_along() -> None:
    trained(LANGUAGES["fused, tied"], tp(), adamw, switch=1)


class _Calls(TorchDispatchMode):
    """Collectives by their names, and what was computed on DTensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.on_dtensors: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(("all_reduce", "allreduce", "all_gather", "reduce_scatter")):
            self.names.append(name)
        if any(issubclass(kind, DTensor) for kind in types):
            self.on_dtensors.append(name)
        return func(*args, **(kwargs or {}))


def check_a_rank_holds_its_part_and_layers_between_need_one_sum_each() -> None:
    model, how = Language(tied=True), tp()
    names, full = list(model.state_dict()), local_bytes(list(model.layers.parameters()))
    split(model, how)
    assert isinstance(model, Language) and list(model.state_dict()) == names
    assert model.head.weight is model.words.weight
    world = dist.get_world_size()
    for name in (
        "layers.0.attention.q.weight",
        "layers.1.mlp.w3.weight",
        "layers.0.attention.out.weight",
        "head.weight",
    ):
        parameter = model.get_parameter(name)
        assert local_bytes([parameter]) == parameter.numel() * 4 // world, name
    assert local_bytes(list(model.layers.parameters())) < 0.6 * full
    with _Calls() as calls, torch.no_grad():
        output = model(torch.randint(WORDS, (2, LENGTH)))
    assert type(output) is Tensor and output.shape == (2, LENGTH, WORDS)
    assert len(calls.names) == 6, calls.names  # the words, attention and MLP of two layers, the head


def check_linear_layers_multiply_plain_tensors_and_need_one_sum_each_way() -> None:
    model = models.Gpt(layers=2)
    split(model, tp(tp_plan={"layers.*.mlp.1": "colwise", "layers.*.back": "rowwise"}))
    with _Calls() as forward:
        output = model.layers[0](torch.rand(2, 6, 16, requires_grad=True))
    assert len(forward.names) == 1, forward.names
    assert forward.on_dtensors and not {"t", "mm", "addmm", "linear"} & {*forward.on_dtensors}, forward.on_dtensors
    with _Calls() as backward:
        output.sum().backward()
    assert len(backward.names) == 1, backward.names


def check_sequence_parallel_keeps_a_part_of_the_tokens_between() -> None:
    model = trained(LANGUAGES["apart"], tp(sequence_parallel=True))
    shapes: dict[str, torch.Size] = {}
    for name in ("layers.0.between", "layers.0.attention.q", "last"):
        model.get_submodule(name).register_forward_hook(
            lambda _m, inputs, _out, name=name: shapes.update({name: inputs[0].shape})
        )
    model(torch.randint(WORDS, (2, LENGTH)))
    part = LENGTH // dist.get_world_size()
    lengths = {name: shape[1] for name, shape in shapes.items()}
    assert lengths == {"layers.0.between": part, "layers.0.attention.q": LENGTH, "last": LENGTH}
    assert "5 tokens over" in refusal(lambda: model(torch.randint(WORDS, (2, 5))))


def check_loss_parallel_leaves_the_logits_split() -> None:
    which = LANGUAGES["tied"]
    model = trained(which, tp(loss_parallel=True))
    output = model(torch.randint(WORDS, (2, LENGTH)))
    assert isinstance(output, DTensor) and output.to_local().shape[-1] == WORDS // dist.get_world_size()


def check_plans_by_pattern() -> None:
    plan = {"layers.*.mlp.w1": "colwise", "layers.*.mlp.w3": "colwise", "layers.*.mlp.w2": "rowwise"}
    extra = {"layers.*.between": "sequence", "last": "replicate", "head": "colwise", "words": "rowwise"}
    for tp_plan in (plan, plan | extra):
        model: Any = trained(LANGUAGES["apart"], tp(tp_plan=tp_plan))
        assert not isinstance(model.layers[0].attention.q.weight, DTensor)
        assert model.layers[1].mlp.w2.weight.placements == (Shard(1),)
    assert model.last.weight.placements == (Replicate(),) and model.head.weight.placements == (Shard(0),)
    shapes: list[int] = []
    model.layers[0].between.register_forward_hook(lambda _m, _a, out: shapes.append(out.shape[1]))
    model(torch.randint(WORDS, (2, LENGTH)))
    assert shapes == [LENGTH]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


def check_what_cannot_be_split_is_refused_with_what_to_do() -> None:
    def of(model: nn.Module, **options: Any) -> str:
        return refusal(lambda: tensor.check(model, tp(**options)))

    assert "layers.*.mlp.w9 matches no module of Language" in of(Language(), tp_plan={"layers.*.mlp.w9": "colwise"})
    assert "near it: layers.*.mlp.w" in of(Language(), tp_plan={"layers.*.mlp.w9": "colwise"})
    assert "Plain" in of(Plain()) and "use --strategy ddp or fsdp" in of(Plain())
    three = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    assert "-O tp_plan=0:colwise,2:rowwise" in of(three)
    tensor.check(three, tp(tp_plan={"0": "colwise", "2": "rowwise"}))  # what it says can be done
    assert "heads=3, which 2 ranks of tp do not divide" in of(Language(lambda: Apart(heads=3)))  # type: ignore[arg-type]
    assert "n_head=1" in of(Language(lambda: Fused(heads=1)))  # type: ignore[arg-type]
    assert "15 out_features" in of(nn.Sequential(nn.Linear(4, 15)), tp_plan={"0": "colwise"})
    assert "0 is a LayerNorm; colwise splits a Linear" in of(nn.Sequential(nn.LayerNorm(4)), tp_plan={"0": "colwise"})
    assert "torch.nn.MultiheadAttention" in of(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
    )
    assert "share a parameter" in refusal(
        lambda: tensor.apply(Language(tied=True), tp(tp_plan={"head": "rowwise", "words": "rowwise"}))
    )
    assert "are in the block itself" in of(models.Gpt(layers=2), sequence_parallel=True)
    assert "repeated blocks" in of(
        nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4)),
        sequence_parallel=True,
        tp_plan={"0": "colwise", "1": "rowwise"},
    )
    assert "splits the outputs of a head" in of(Language(), loss_parallel=True, tp_plan={"layers.*.mlp.w1": "colwise"})
    model = Language()
    split(model, tp())
    assert "copy.deepcopy of Language" in refusal(lambda: copy.deepcopy(model))
    assert "distributed already" in of(model)
