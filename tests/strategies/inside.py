"""What is changed inside of a model: batch normalisation, checkpointing, compilation, precision; and agreement."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from jupyter_torchdist.strategies.core import agreement
from jupyter_torchdist.strategies.core.dtensors import local, whole
from jupyter_torchdist.strategies.parallel import activations, compiling, fsdp, precision, replicate, restore
from jupyter_torchdist.strategies.step import batchnorm, gradients

from . import models
from .languages import LENGTH, WORDS, Language
from .models import CASES, Block, Gpt, Mlp, sgd, step
from .prepared import alone
from .prepared import equal as equal_prepared
from .ranks import CLOSE, SAID, assert_close, compiled_graphs, context, counted_calls, everyone, hooks_of, mine, refusal
from .unchanged import equal, language, under


def ddp(**options: Any) -> Any:
    return context({"dp_replicate": dist.get_world_size()}, **options)


def uneven_slice(x: Tensor) -> Tensor:
    """Rank 0 has none or one sample, the last rank has the most."""
    world, rank = dist.get_world_size(), dist.get_rank()
    bounds = [0, *[1 + number for number in range(world - 1)], len(x)]
    return x[bounds[rank] : bounds[rank + 1]]


def check_batch_norm_is_that_of_the_whole_batch() -> None:
    for shape, kind in (((8, 5), nn.BatchNorm1d), ((8, 5, 4), nn.BatchNorm1d), ((8, 5, 3, 2), nn.BatchNorm2d)):
        for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
            for share in (mine, uneven_slice):
                _compare_batch_norm(shape, kind, options, share)


def _compare_batch_norm(shape: tuple[int, ...], kind: Any, options: dict[str, Any], share: Any) -> None:
    torch.manual_seed(3)
    whole, spread = kind(shape[1], **options), kind(shape[1], **options)
    if whole.affine:
        nn.init.normal_(whole.weight), nn.init.normal_(whole.bias)
    spread.load_state_dict(whole.state_dict())
    assert batchnorm.convert(spread, ddp()) is not None
    for _ in range(3):
        x, weights = torch.randn(shape) * 3 + 5, torch.randn(shape)
        one, two = x.clone().requires_grad_(), share(x).clone().requires_grad_()
        whole.zero_grad(), spread.zero_grad()
        (whole(one) * weights).sum().backward()
        (spread(two) * share(weights)).sum().backward()
        assert one.grad is not None and two.grad is not None
        torch.testing.assert_close(two.grad, share(one.grad), atol=CLOSE, rtol=CLOSE)
        if whole.affine:
            total = torch.stack([spread.weight.grad, spread.bias.grad])
            dist.all_reduce(total)
            torch.testing.assert_close(total[0], whole.weight.grad, atol=1e-4, rtol=CLOSE)
            torch.testing.assert_close(total[1], whole.bias.grad, atol=1e-4, rtol=CLOSE)
    assert_close(spread.state_dict(), whole.state_dict())
    whole.eval(), spread.eval()
    torch.testing.assert_close(spread(x), whole(x), atol=CLOSE, rtol=CLOSE)


def check_batch_norm_without_samples_on_a_rank() -> None:
    x = torch.randn(6, 4)
    own = x if dist.get_rank() == 1 else x[:0]
    norm, whole = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    batchnorm.convert(norm, ddp())
    dist.broadcast(x, 1)
    assert norm(own.requires_grad_()).sum().backward() is None
    whole(x.detach())
    assert_close(norm.state_dict(), whole.state_dict())


def check_batch_norm_can_be_differentiated_twice() -> None:
    torch.manual_seed(5)
    x, targets = torch.randn(8, 4), torch.randn(8, 4)
    whole, spread = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    nn.init.normal_(whole.weight)
    spread.load_state_dict(whole.state_dict())
    batchnorm.convert(spread, ddp())
    penalties = []
    for norm, share in ((whole, lambda t: t), (spread, mine)):
        own = share(x).clone().requires_grad_()
        output = (norm(own) ** 2 * share(targets)).sum()
        (gradient,) = torch.autograd.grad(output, own, create_graph=True)
        gradient.square().sum().backward()
        penalties.append((own.grad, norm.weight.grad))
    (of_whole, weight), (of_slice, part) = penalties
    assert of_whole is not None and of_slice is not None
    torch.testing.assert_close(of_slice, mine(of_whole), atol=1e-4, rtol=1e-4)
    dist.all_reduce(part)
    torch.testing.assert_close(part, weight, atol=1e-4, rtol=1e-4)


def check_batch_norm_communicates_once_forward_and_once_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sharing = batchnorm.convert(model, ddp())
    x = torch.randn(4, 4)
    with counted_calls("all_gather", "all_reduce") as calls:
        model(x).sum().backward()
    assert calls == {"all_gather": 1, "all_reduce": 1}
    with counted_calls("all_gather", "all_reduce") as calls, batchnorm.whole_batch(sharing):
        model(x).sum().backward()
    assert calls == {"all_gather": 0, "all_reduce": 0}
    assert type(model[1]) is nn.BatchNorm1d
    copy.deepcopy(model)
    batchnorm.revert(model)
    assert not [name for name in vars(model[1]) if name == "forward" or name.startswith("_torchdist")]
    assert batchnorm.convert(nn.Linear(2, 2), ddp()) is None


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def check_batch_norm_refuses_a_forward_of_its_own_and_one_value() -> None:
    assert "0 (OwnNorm)" in refusal(lambda: batchnorm.check(nn.Sequential(OwnNorm(3))))
    norm = nn.BatchNorm1d(3)
    batchnorm.convert(norm, ddp())
    message = ""
    try:
        norm(torch.ones(1 if dist.get_rank() == 0 else 0, 3))
    except ValueError as error:
        message = str(error)
    assert "more than 1 value per channel" in message


def kept_for_backward(model: nn.Module, inputs: Tensor) -> int:
    """Numbers that autograd keeps of a forward."""
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs)
    return sum(sizes)


def check_checkpointed_blocks_keep_their_inputs_alone() -> None:
    inputs, _ = CASES["untied"].batches(1)[0]
    model = Gpt(tied=False)
    names, before = list(model.state_dict()), kept_for_backward(model, inputs)
    activations.check(model, ddp())
    activations.apply(model, ddp())
    assert kept_for_backward(model, inputs) < 0.3 * before
    assert list(model.state_dict()) == names
    assert "no repeated block" in refusal(lambda: activations.check(Mlp(), ddp()))


def check_checkpointing_compiling_and_sharding_go_together() -> None:
    _, weights = models.alone(CASES["tied"], 3, sgd)
    model, how = CASES["tied"].model(), context()
    with compiled_graphs() as graphs:
        activations.apply(model, how)
        compiling.apply(model, how)
        fsdp.apply(model, how)
        optimizer = sgd(list(model.parameters()))
        for inputs, targets in CASES["tied"].batches(3):
            step(model, optimizer, mine(inputs), mine(targets), after=lambda: None)
    assert graphs
    assert_close(model.state_dict(), weights)
    restore.restore(model)
    assert hooks_of(model) == 0
    assert all(module._compiled_call_impl is None for module in model.modules())


class Tempered(nn.Module):
    """Its 0-dim parameter comes first, and is left whole like the small vector, beside DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(3))
        self.inner, self.outer = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))) * self.temperature + self.shift  # type: ignore[no-any-return]


def scaled(build: Any, fused: bool = False, overflow: str | None = None) -> Any:
    """A cell with a scaler; in the second step a gradient may overflow, where it is sharded on one rank alone."""

    def cell(prepare: Any = alone) -> Any:
        torch.manual_seed(3)
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        samples = torch.randint(WORDS, (16, LENGTH)) if build is Language else torch.randn(16, 6)
        model, optimizer, loader = prepare(model, optimizer, DataLoader(TensorDataset(samples), 4))
        for number, (x,) in enumerate(loader):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if overflow and number == 1:
                gradient = model.get_parameter(overflow).grad
                if dist.get_rank() == 1 or not isinstance(gradient, DTensor):
                    local(gradient).view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert pickle.dumps(scaler)
        return model, optimizer, [scaler.get_scale()]

    return cell


def check_whole_blocks_are_compiled_and_whole_forwards_where_there_are_none() -> None:
    """Whatever hooks there are around them; in a container of torch's own too, and in units of their own."""
    ddp_, fsdp_ = ddp(compile=True), context(compile=True)
    units = context(compile=True, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=50)
    linears, cut = ["linear", "tanh", "linear"], [["linear"], ["tanh"], ["linear"], ["mul", "add"]]

    def plain_layers() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    for how, build, expected in (
        *((ddp_, plain_layers, [linears]), (fsdp_, plain_layers, [linears])),
        *(
            (ddp_, Tempered, [[*linears, "mul", "add"]]),
            (fsdp_, Tempered, [[*linears, "mul", "add"]]),
            (units, Tempered, cut),
        ),
    ):
        for same in (equal, equal_prepared):
            with compiled_graphs() as graphs:
                same(how, scaled(build))
            assert graphs == expected, (how.plan, graphs)
    with compiled_graphs() as graphs:
        equal(ddp_, scaled(Language))
    assert len(graphs) == 1 and {"layer_norm", "linear", "scaled_dot_product_attention", "silu"} <= set(graphs[0])


def check_blocks_that_tp_or_cp_divides_are_compiled_in_parts() -> None:
    for one, said in (
        ("tp", "with tp, only the code between the split layers"),
        ("cp", "with cp, a block is compiled in parts"),
    ):
        with compiled_graphs() as graphs:
            equal(context({one: dist.get_world_size()}, compile=True), language(Language))
        assert len(graphs) > 1 and any(said in line for line in SAID), (one, graphs)


def check_autocast_computes_in_half_precision_and_gives_fp32() -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        seen: list[torch.dtype] = []
        model, how = Mlp(), ddp(precision=name)
        model[2].register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out.dtype))
        precision.apply(model, how)
        replicate.apply(model, how)
        inputs, targets = CASES["mlp"].batches(1)[0]
        output = model(mine(inputs))
        models.loss_of(output, mine(targets)).backward()
        assert seen == [dtype] and output.dtype == torch.float32
        assert model[0].weight.grad is not None and model[0].weight.grad.dtype == torch.float32
        restore.restore(model)
        assert "forward" not in vars(model) and not [n for n in vars(model) if n.startswith("_torchdist")]
        model = Mlp()
        vars(model)["forward"] = before = model.forward  # on the object, as torch.compile does
        precision.apply(model, how)
        assert model(mine(inputs)).dtype == torch.float32 and model.forward is not before
        precision.revert(model)
        assert model.forward is before


def check_all_ranks_skip_the_step_in_which_one_shard_overflowed() -> None:
    tp, torchs_own = context({"tp": dist.get_world_size()}), torch.amp.GradScaler._unscale_grads_
    for fused in (False, True):
        equal(context(), scaled(Tempered, fused, "outer.weight"))
        equal_prepared(context(), scaled(Tempered, fused, "outer.weight"))
        equal(tp, scaled(Language, fused, "layers.0.attention.q.weight"))
        equal_prepared(tp, scaled(Language, fused, "layers.0.attention.q.weight"))
    assert torch.amp.GradScaler._unscale_grads_ is torchs_own


def clipped_by_value(build: Any) -> Any:
    """A cell that clips each gradient by its value."""

    def cell(prepare: Any = alone) -> Any:
        torch.manual_seed(3)
        model, losses = build(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        samples = torch.randint(WORDS, (16, LENGTH)) if build is Language else torch.randn(16, 6)
        model, optimizer, loader = prepare(model, optimizer, DataLoader(TensorDataset(samples), 4))
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            losses.append(max(float(whole(p.grad).abs().max()) for p in model.parameters() if p.grad is not None))
            optimizer.step()
        assert max(losses) == pytest.approx(0.01)
        return model, optimizer, losses

    return cell


def check_values_of_gradients_are_clipped_where_some_are_sharded() -> None:
    for how, build in ((context(), Tempered), (context({"tp": dist.get_world_size()}), Language)):
        for same in (equal, equal_prepared):
            same(how, clipped_by_value(build))


def check_fp16_trains_a_sharded_mixture_with_a_scaler() -> None:
    """Its 0-dim parameter is a plain tensor beside DTensors."""
    _, weights = models.alone(CASES["mixture"], 3, sgd)

    def cell() -> Any:
        model = CASES["mixture"].model()
        optimizer = sgd([p for p in model.parameters() if p.requires_grad])
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        for inputs, targets in CASES["mixture"].batches(3):
            optimizer.zero_grad()
            scaler.scale(models.loss_of(model(inputs), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer, []

    model, *_ = under(context(precision="fp16"), cell)
    if dist.get_rank() == 0:
        assert_close(model.state_dict(), weights, within=0.02)


def check_ranks_with_different_models_are_told_the_first_difference() -> None:
    rank = dist.get_rank()
    agreement.same_on_all_ranks(Gpt(), ddp())
    last = dist.get_world_size() - 1

    def other(build: Any, otherwise: Any) -> str:
        messages = everyone(
            refusal(lambda: agreement.same_on_all_ranks(otherwise() if rank == last else build(), ddp()))
        )
        assert len(set(messages)) == 1
        return str(messages[0])

    wider = other(lambda: nn.Linear(3, 4), lambda: nn.Linear(3, 5))
    assert f"parameter weight is (4, 3) float32 on rank 0 and (5, 3) float32 on rank {last}" in wider
    assert "frozen" in other(lambda: nn.Linear(3, 4), lambda: nn.Linear(3, 4).requires_grad_(False))
    assert "tied to tokens.weight" in other(Gpt, lambda: Gpt(tied=False))
    assert "float64" in other(lambda: nn.Linear(3, 4), lambda: nn.Linear(3, 4).double())
    assert "parameter bias of rank 0 is missing" in other(lambda: nn.Linear(3, 4), lambda: nn.Linear(3, 4, bias=False))
    assert "buffer" in other(lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3, track_running_stats=False))


def check_the_end_of_every_backward_is_met_once() -> None:
    met: list[int] = []
    model = Block(4)
    watched = gradients.AtEndOfBackward(lambda: met.append(1))
    model.register_forward_hook(watched.watch)
    for expected in (1, 2):
        (model(torch.randn(2, 3, 4)).sum() + model(torch.randn(2, 3, 4)).sum()).backward()
        assert len(met) == expected
