"""DDP in place, gradients averaged by hand, ZeRO-1: every option by its effect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from jupyter_torchdist.ranks import alone
from jupyter_torchdist.ranks.streams import flight
from jupyter_torchdist.strategies.core.context import ParallelContext
from jupyter_torchdist.strategies.parallel import replicate, restore, zero1
from jupyter_torchdist.strategies.step import batchnorm, compression, gradients

from . import models
from .models import CASES, Gpt, Mixture, Mlp, adamw, sgd, step
from .ranks import (
    CLOSE,
    assert_close,
    context,
    counted_calls,
    everybody,
    everyone,
    hooks_of,
    local_bytes,
    mean,
    mine,
    refusal,
)

STEPS = 4


def ddp(**options: Any) -> ParallelContext:
    return context({"dp_replicate": dist.get_world_size()}, **options)


def replicated(model: nn.Module, how: ParallelContext) -> nn.Module:
    replicate.check(model, how)
    batchnorm.convert(model, how)
    replicate.apply(model, how)
    return model


def trained(name: str, how: ParallelContext, make: models.MakeOptimizer = adamw, within: float = CLOSE) -> nn.Module:
    """A replicated model, held against one device in losses and weights."""
    case = CASES[name]
    losses, weights = models.alone(case, STEPS, make)
    model = replicated(case.model(), how)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for (inputs, targets), expected in zip(case.batches(STEPS), losses, strict=True):
        loss = mean(step(model, optimizer, mine(inputs), mine(targets), after=lambda: None))
        assert abs(loss - expected) < within, (name, loss, expected)
    assert_close(model.state_dict(), weights, within)
    return model


def backward(model: nn.Module, name: str = "mlp") -> None:
    inputs, targets = CASES[name].batches(1)[0]
    models.loss_of(model(mine(inputs)), mine(targets)).backward()


def check_models_train_as_on_one_device() -> None:
    for name in ("mlp", "conv", "tied", "untied"):
        trained(name, ddp())
    trained("conv", ddp(), sgd)
    trained("mixture", ddp(find_unused_parameters=True))


def check_class_names_and_parameters_stay() -> None:
    model = CASES["tied"].model()
    names, parameters = list(model.state_dict()), list(model.parameters())
    replicated(model, ddp())
    assert isinstance(model, Gpt)
    assert list(model.state_dict()) == names
    assert all(one is two for one, two in zip(model.parameters(), parameters, strict=True))
    assert "Gpt" in refusal(lambda: copy.deepcopy(model))


def check_all_ranks_begin_with_rank_0s_weights_and_buffers() -> None:
    model = CASES["conv"].model(seed=dist.get_rank())
    assert isinstance(model, models.ConvNet)
    model.norm.running_mean = torch.full((6,), float(dist.get_rank()))
    with counted_calls("broadcast") as sent:
        replicated(model, ddp())
    assert sent["broadcast"] == len(list(model.parameters())) - 4 + 1  # ones and zeros of two norms are the same
    assert_close(model.state_dict(), {**CASES["conv"].model().state_dict(), "norm.running_mean": torch.zeros(6)})
    with counted_calls("broadcast") as sent:
        replicated(CASES["conv"].model(), ddp())
    assert sent["broadcast"] == 0


def check_unused_parameters_need_the_flag_or_a_static_graph() -> None:
    inputs, _ = CASES["mixture"].batches(1)[0]
    model = replicated(Mixture(), ddp())
    message = ""
    try:
        for _ in range(2):
            model(mine(inputs)).sum().backward()
    except RuntimeError as error:
        message = str(error)
    assert "Expected to have finished reduction" in message
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model = replicated(Mixture(), ddp(**options))
        for _ in range(3):
            model(mine(inputs)).sum().backward()


def check_buckets_have_the_size_that_was_asked_for() -> None:
    for megabytes, buckets in ((0.0005, 2), (25.0, 1)):
        model: Any = replicated(Mlp(), ddp(bucket_cap_mb=megabytes))
        calls: list[int] = []

        def noting(state: Any, bucket: Any, calls: list[int] = calls) -> Any:
            calls.append(bucket.buffer().numel())
            return default_hooks.allreduce_hook(state, bucket)

        noting.__annotations__ = {}  # DDP compares them with types, these are texts
        model.register_comm_hook(everybody(), noting)
        backward(model)
        calls.clear()  # buckets are made anew, in the order of the gradients, after the first step
        backward(model)
        assert len(calls) == buckets, (megabytes, calls)


def check_gradients_are_views_of_buckets_when_asked_for() -> None:
    for wanted in (True, False):
        model = replicated(Mlp(), ddp(gradient_as_bucket_view=wanted))
        for _ in range(2):
            backward(model)
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
        assert (len(storages) == 1) is wanted


def check_a_hook_halves_the_bytes_and_powersgd_sends_factors() -> None:
    trained("mlp", ddp(comm_hook="fp16"), sgd, within=1e-3)
    sent: list[tuple[torch.dtype, int]] = []
    original = dist.all_reduce

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append((tensor.dtype, tensor.numel()))
        return original(tensor, *args, **kwargs)

    compression.POWERSGD_START = 2
    for hook in ("fp16", "powersgd"):
        model = replicated(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), ddp(comm_hook=hook))
        total = sum(p.numel() for p in model.parameters())
        for _ in range(4):
            sent.clear()
            dist.all_reduce = noting
            try:
                model(torch.randn(4, 64)).sum().backward()
            finally:
                dist.all_reduce = original
        if hook == "fp16":
            assert sent == [(torch.float16, total)]
        else:
            assert 0 < sum(count for _, count in sent) < total / 8, (hook, sent)
    assert "NCCL" in refusal(lambda: replicate.check(Mlp(), ddp(comm_hook="bf16")))


def check_ranks_that_train_alone_are_told() -> None:
    """Of one that has met another, in whichever way, nothing is said."""
    world = dist.get_world_size()
    message = torch.zeros(1)

    def send() -> None:
        (dist.send if dist.get_rank() == 0 else dist.recv)(message, (dist.get_rank() + 1) % world)

    def of(meets: Callable[[], object], passes: int = alone.PASSES, patient: bool = False) -> list[str]:
        said: list[str] = []
        one = alone.Alone(lambda: passes, said.append, "and so", "Do this", patient=patient)
        one.begin()
        meets()
        one.look(flight.counts())
        one.look(flight.counts())
        assert not said or not patient
        one.end()
        return said

    before = dist.ProcessGroup.send
    (said,) = of(lambda: None)
    assert said.startswith(f"8 backward passes and no collective: each of the {world} ranks trains a model of its own")
    assert said.endswith(", and so. Do this")
    assert of(lambda: None, patient=True) == [said]
    assert of(lambda: None, passes=alone.PASSES - 1) == []
    assert of(send) == of(lambda: dist.barrier()) == of(lambda: dist.all_reduce(message)) == []
    assert dist.ProcessGroup.send is before


def check_restored_models_reduce_nothing() -> None:
    model = Mlp()
    hooks = hooks_of(model)
    replicated(model, ddp(gradient_as_bucket_view=True))
    backward(model)
    originals = list(model.parameters())
    restore.restore(model)
    assert type(model) is Mlp and hooks_of(model) == hooks
    if dist.get_rank() == 0:
        assert all(one is two for one, two in zip(model.parameters(), originals, strict=True))
        backward(model)  # alone: an all-reduce would wait for ever
        copy.deepcopy(model)


def check_a_model_without_trained_parameters_is_left_alone() -> None:
    model = replicated(Mlp().requires_grad_(False), ddp())
    assert type(model) is Mlp


def check_gradients_are_averaged_in_few_buckets_and_none_counts_as_zeros() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = [(3, 2), (4,), (), (5,)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes] + [nn.Parameter(torch.zeros(2).double())]
    for number, parameter in enumerate(parameters):
        if number != 3 and (number != 1 or rank == 0):
            parameter.grad = torch.full_like(parameter, float(rank + number))
    with counted_calls("all_reduce") as calls:
        gradients.average_gradients(parameters, everybody())
    assert calls["all_reduce"] == 3  # who has which, one bucket of floats, one of doubles
    middle = (world - 1) / 2
    expected = [middle, 1 / world, middle + 2, None, middle + 4]
    found = [None if p.grad is None else p.grad.flatten()[0].item() for p in parameters]
    assert found == expected, (found, expected)
    gradients.average_gradients(parameters, everybody())
    assert found == [None if p.grad is None else p.grad.flatten()[0].item() for p in parameters]


def check_sparse_gradients_are_averaged_by_rows() -> None:
    table = nn.Embedding(50, 3, sparse=True)
    table.weight.data.fill_(1.0)
    if dist.get_rank() == 0:
        table(torch.tensor([4, 7, 4])).sum().backward()
    gradients.average_gradients(table.parameters(), everybody())
    gradient = table.weight.grad
    assert gradient is not None and gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[4, 7]]
    assert gradient.to_dense()[4, 0].item() == 2 / dist.get_world_size()


def check_irregular_loops_train_with_averaged_gradients() -> None:
    for name in ("mlp", "mixture"):
        case = CASES[name]
        losses, weights = models.alone(case, STEPS)
        model = case.model()
        parameters = list(model.parameters())
        optimizer = adamw([p for p in parameters if p.requires_grad])
        for (inputs, targets), expected in zip(case.batches(STEPS), losses, strict=True):
            loss = step(
                model, optimizer, mine(inputs), mine(targets),
                after=lambda: gradients.average_gradients(parameters, everybody()),  # noqa: B023  # called now
            )  # fmt: skip
            assert abs(mean(loss) - expected) < CLOSE
        assert_close(model.state_dict(), weights)


def check_zero1_keeps_a_share_of_the_state_in_the_users_object() -> None:
    case, world = CASES["tied"], dist.get_world_size()
    _, weights = models.alone(case, STEPS)
    model = replicated(case.model(), ddp())
    optimizer = adamw(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    zero1.apply(optimizer, everybody())
    for inputs, targets in case.batches(STEPS):
        step(model, optimizer, mine(inputs), mine(targets), after=lambda: None)
        scheduler.step()
    assert_close(model.state_dict(), weights)
    held = [value["exp_avg"] for value in optimizer.state.values()]
    total = local_bytes(list(model.parameters()))
    assert abs(local_bytes(held) - total / world) < 0.2 * total / world
    assert sum(everyone(len(held))) == len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    assert "zero1" in refusal(optimizer.state_dict)
    with zero1.gathered(optimizer):
        state = optimizer.state_dict()
        assert len(state["state"]) == len(list(model.parameters()))
    assert len(optimizer.state) == len(held)
    optimizer.load_state_dict(state)
    assert len(optimizer.state) == len(held)
    restore.restore_optimizer(optimizer)
    assert len(optimizer.state) == len(list(model.parameters()))
    reference = case.model()
    other = adamw(list(reference.parameters()))
    for inputs, targets in case.batches(STEPS):
        step(reference, other, inputs, targets, after=lambda: None)
    if dist.get_rank() == 0:
        for ours, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
            torch.testing.assert_close(ours["exp_avg"], theirs["exp_avg"], atol=CLOSE, rtol=1e-3)
            assert ours["step"] == theirs["step"]


def check_zero1_evaluates_closures_with_all_parameters() -> None:
    model, reference = Mlp(), Mlp()
    reference.load_state_dict(model.state_dict())
    dist.barrier()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    reference.load_state_dict(model.state_dict())
    inputs, targets = CASES["mlp"].batches(1)[0]
    for trained_model in (model, reference):
        optimizer = sgd(list(trained_model.parameters()))
        if trained_model is model:
            zero1.apply(optimizer, everybody())

        def closure(optimizer: torch.optim.Optimizer = optimizer, it: nn.Module = trained_model) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(it(inputs), targets)
            loss.backward()
            return loss

        for _ in range(3):
            loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
            assert isinstance(loss, Tensor)
    assert_close(model.state_dict(), reference.state_dict())
    assert "LBFGS" in refusal(lambda: zero1.apply(torch.optim.LBFGS(model.parameters()), everybody()))
