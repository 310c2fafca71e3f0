"""Gradients of the automatic way under ddp: exact whatever each rank has, and every option of DDP's by its effect."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from jupyter_torchdist.strategies.core.hooks import Before
from jupyter_torchdist.strategies.step import compression
from jupyter_torchdist.strategies.step.averaging import Averaging, How
from jupyter_torchdist.strategies.step.early import REGULAR
from jupyter_torchdist.strategies.step.layout import ALARMS, CARGO, Bucket

from .models import Mlp
from .ranks import CLOSE, SAID, assert_close, context, everybody, everyone, refusal
from .unchanged import under

SHAPES = ((3, 2), (4,), (), (5,), (2, 3))
TAIL = len(SHAPES) + ALARMS + CARGO
PLAIN, SMALL = How(), How(bucket_bytes=32)


def given(count: int = len(SHAPES)) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES[:count]]


def averaging(how: How = PLAIN) -> Averaging:
    return Averaging(everybody(), how)


@contextmanager
def sent() -> Iterator[list[tuple[torch.dtype, int]]]:
    """Type and elements of each tensor that is all-reduced within the block."""
    noted: list[tuple[torch.dtype, int]] = []
    original = dist.all_reduce

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        noted.append((tensor.dtype, tensor.numel()))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = noting
    try:
        yield noted
    finally:
        dist.all_reduce = original


def fill(parameters: list[nn.Parameter], value: float = 1.0) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)


# ------------------------------------------------------------------------------------------------------------- exactly


def check_any_gradients_on_any_ranks_are_averaged_exactly() -> None:
    for number, how in enumerate((PLAIN, SMALL, How(views=True), How(32, views=True))):
        parameters, average = given(), averaging(how)
        parameters[4].requires_grad_(False)
        dice, common = random.Random(f"{number} {dist.get_rank()}"), random.Random(number)
        for step in range(25):
            if common.random() < 0.7:
                for parameter in parameters:
                    parameter.grad = None
            if step == 15:
                parameters[4].requires_grad_(True)
            likely = common.choice([0.0, 0.3, 1.0])
            for parameter in parameters:
                if parameter.requires_grad and dice.random() < likely:
                    part = torch.full_like(parameter, float(dice.randrange(-8, 8)))
                    parameter.grad = part if parameter.grad is None else parameter.grad + part
            everywhere = everyone([None if p.grad is None else p.grad.clone() for p in parameters])
            average.average(parameters)
            for place, parameter in enumerate(parameters):
                parts = [rank[place] for rank in everywhere if rank[place] is not None]
                if not parts:
                    assert parameter.grad is None, (number, step, place)
                else:
                    assert parameter.grad is not None
                    assert torch.equal(parameter.grad, sum(parts) / dist.get_world_size()), (number, step, place)


def check_sparse_gradients_stay_sparse_beside_dense_ones() -> None:
    table, dense, average = nn.Embedding(50, 3, sparse=True), nn.Linear(3, 1, bias=False), averaging()
    for step in range(3):
        for parameter in (table.weight, dense.weight):
            parameter.grad = None
        if dist.get_rank() == step % 2:
            dense(table(torch.tensor([4, 7, 4]))).sum().backward()
        average.average([*table.parameters(), *dense.parameters()])
        gradient, beside = table.weight.grad, dense.weight.grad
        assert gradient is not None and gradient.is_sparse and beside is not None and not beside.is_sparse
        assert gradient.coalesce().indices().tolist() == [[4, 7]]
        assert len({tuple(one.flatten().tolist()) for one in everyone(beside)}) == 1


def check_sparse_gradients_that_come_late_are_means_where_losses_were_divided() -> None:
    torch.manual_seed(3)
    table, dense, average = nn.Embedding(9, 3, sparse=True), nn.Linear(3, 1, bias=False), averaging()
    parameters, ranks = [*table.parameters(), *dense.parameters()], dist.get_world_size()
    for step in range(3):
        for parameter in parameters:
            parameter.grad = None
        summed = begin(average, parameters, may_sum=True)
        assert summed == (step == 1 or step == 2), (step, summed)
        inputs = table(torch.tensor([4])) if step == 2 else torch.ones(1, 3)
        (dense(inputs).sum() / (ranks if summed else 1)).backward()
        average.average(parameters)
    gradient = table.weight.grad
    assert gradient is not None and gradient.is_sparse
    torch.testing.assert_close(gradient.coalesce().values(), dense.weight.detach())


def check_a_backward_costs_one_all_reduce_that_also_tells_what_came() -> None:
    parameters, average = given(), averaging()
    elements = sum(parameter.numel() for parameter in parameters)
    for step in range(3):
        fill(parameters)
        if step == 2 and dist.get_rank() == 0:
            parameters[1].grad = None
        with sent() as noted:
            average.average(parameters)
        asked = [(torch.int32, len(SHAPES))] if step == 0 else []
        assert noted == [*asked, (torch.float32, elements + TAIL)], (step, noted)


# --------------------------------------------------------------------------------------------------- options by effect


def check_bucket_cap_mb_is_the_size_of_the_buckets() -> None:
    parameters = [nn.Parameter(torch.zeros(128)) for _ in range(8)]
    for megabytes, buckets in ((0.0005, 8), (0.001, 4), (25.0, 1)):
        average = averaging(How.of(context({"dp_replicate": dist.get_world_size()}, bucket_cap_mb=megabytes).plan))
        for _ in range(2):
            fill(parameters)
            with sent() as noted:
                average.average(parameters)
        assert len(noted) == buckets, (megabytes, noted)


def check_static_graph_asks_once_and_refuses_a_change_in_words() -> None:
    parameters, average = given(), averaging(How(static=True))
    elements = sum(parameter.numel() for parameter in parameters[:4])
    for _ in range(3):
        fill(parameters[:4], float(dist.get_rank()))
        if dist.get_rank() == 0:
            parameters[0].grad = None
        with sent() as noted:
            average.average(parameters)
        assert parameters[0].grad is not None and parameters[4].grad is None
        assert parameters[0].grad[0, 0].item() == (dist.get_world_size() - 1) / 2
    assert noted == [(torch.float32, elements)]
    parameters[4].grad = torch.zeros(2, 3)
    message = refusal(lambda: average.average(parameters))
    assert "parameter 4, of shape [2, 3], has a gradient, and had none after the first" in message, message
    parameters[4].grad = parameters[1].grad = None
    message = refusal(lambda: average.average(parameters))
    assert "parameter 1, of shape [4], has no gradient, and had one" in message and "leave static_graph out" in message
    parameters[4].requires_grad_(False)
    assert "other parameters are trained now" in refusal(lambda: average.average(parameters))


def check_gradients_are_views_of_one_storage_and_are_not_copied_again() -> None:
    def storages() -> set[int]:
        return {p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None}

    for wanted in (True, False):
        parameters, average = given(), averaging(How(views=wanted))
        fill(parameters)
        average.average(parameters)
        assert (len(storages()) == 1) is wanted
    parameters, average = given(), averaging(How(views=True))
    fill(parameters)
    average.average(parameters)
    optimizer = torch.optim.Adam(parameters, lr=0.1, foreach=True)
    before, kept = storages(), [p.grad for p in parameters]
    optimizer.zero_grad(set_to_none=False)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.detach_()
        parameter.grad += 2.0 + dist.get_rank()
    average.average(parameters)
    assert storages() == before and all(p.grad is not None and p.grad.flatten()[0] == 2.5 for p in parameters)
    optimizer.zero_grad()
    fill(parameters, 7.0)
    average.average(parameters)
    assert all(one is not None and one.flatten()[0] == 2.5 for one in kept), "what the cell keeps is overwritten"
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    optimizer.step()
    whole = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    assert abs(whole.norm().item() - 0.5) < CLOSE
    assert all(abs(p.flatten()[0].item() + 0.1) < CLOSE for p in parameters)


def check_new_gradients_lie_in_their_buckets_and_old_ones_stay_where_they_are() -> None:
    parameters, average = given(), averaging()
    fill(parameters)
    average.average(parameters)
    for parameter in parameters:
        parameter.grad = None
    with sent() as noted:
        backward(average, parameters, 3.0)
    kept = [parameter.grad for parameter in parameters]
    assert len(noted) == 1
    assert len({one.untyped_storage().data_ptr() for one in kept if one is not None}) == 1
    parameters[0].grad = None
    backward(average, parameters, 5.0 + dist.get_rank())
    new, *old = [parameter.grad for parameter in parameters]
    assert new is not None and new.flatten()[0] == 5.5
    assert all(one is before for one, before in zip(old, kept[1:], strict=True))
    assert [one.flatten()[0].item() for one in kept if one is not None] == [3.0, *[8.5] * len(old)]


def check_memory_is_taken_again_where_nothing_of_the_last_gradients_is_left() -> None:
    empty, image = torch.zeros(0, 3), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    parameters, average = [*given(), nn.Parameter(empty), nn.Parameter(image)], averaging()
    fill(parameters)
    average.average(parameters)

    def step(slope: float, meanwhile: Callable[[], object] = lambda: None) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        held = meanwhile()
        backward(average, parameters, slope)
        del held
        for parameter in parameters:
            assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
            assert bool((parameter.grad == slope).all())
        assert parameters[1].grad is not None
        return parameters[1].grad

    ways: list[Callable[[Tensor], Any]] = [lambda one: one, Tensor.detach, Tensor.numpy, lambda one: one.view(2, 2)[1:]]
    for keep in ways:
        kept = keep(step(3.0))
        step(5.0)
        assert bool((kept == 3.0).all()), "what the cell keeps is overwritten"
    del kept
    place, size = step(1.0).data_ptr(), sum(parameter.numel() for parameter in parameters) + len(parameters)
    # Memory that was let go of would be taken by these.
    again = step(2.0, lambda: [torch.empty(size + more) for more in range(-64, 64)]).data_ptr()
    assert again == place


def check_memory_that_nobody_waited_for_is_not_taken_again() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    bucket = Bucket([parameter], divisor=1)
    bucket.open()
    flat = bucket.flat
    assert flat is not None
    bucket.sent = dist.all_reduce(flat, async_op=True)
    bucket.let_go()  # as after a backward that raised
    bucket.clear()
    assert parameter.grad is None
    bucket.open()
    assert bucket.flat is not flat
    bucket.sent = dist.all_reduce(bucket.flat, async_op=True)
    bucket.wait()
    known = bucket.flat
    bucket.clear()
    parameter.grad = None
    bucket.open()
    assert bucket.flat is known


def check_gradients_that_were_put_elsewhere_meanwhile_are_averaged_all_the_same() -> None:
    parameters, average = given(), averaging()
    fill(parameters)
    average.average(parameters)
    for parameter in parameters:
        parameter.grad = None
    assert begin(average, parameters) is False  # losses were not divided
    assert all(bool((parameter.grad == 0).all()) for parameter in parameters if parameter.grad is not None)
    torch.stack([parameter.sum() for parameter in parameters[:4]]).sum().backward()
    parameters[0].grad = torch.full_like(parameters[0], 2.0 + dist.get_rank())
    parameters[1].grad = None  # came, and was thrown away
    if dist.get_rank():
        parameters[2].grad = None
    average.average(parameters)
    means = [None if parameter.grad is None else parameter.grad.flatten()[0].item() for parameter in parameters]
    assert means == [2.5, None, 0.5, 1.0, None], means


def backward(average: Averaging, parameters: list[nn.Parameter], slope: float) -> None:
    """One that gives all parameters this gradient, in the order in which the automatic way does it."""
    before = Before(parameters, anew=average.begins_anew(parameters))
    average.begin(silent=True, kept=before.has_gradients)
    (torch.stack([parameter.sum() for parameter in parameters]).sum() * slope).backward()
    average.average(parameters)
    before.follow()


def check_gradients_that_were_there_on_some_ranks_alone_are_refused() -> None:
    parameters, average = given(), averaging()
    fill(parameters)
    average.average(parameters)
    parameters[0].grad = None
    if dist.get_rank() == 0:
        for parameter in parameters:
            parameter.grad = None
    assert "some ranks had gradients and others had none" in refusal(lambda: backward(average, parameters, 1.0))


def check_half_precision_hooks_send_half_the_bytes() -> None:
    for hook, kind in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        parameters, average = given(), averaging(How(hook=hook))
        for _ in range(2):
            fill(parameters, 1.0 + dist.get_rank() / 64)
            with sent() as noted:
                average.average(parameters)
        assert noted == [(kind, sum(p.numel() for p in parameters) + TAIL)]
        mean = 1.0 + (dist.get_world_size() - 1) / 128
        assert all(p.grad is not None and abs(p.grad.flatten()[0].item() - mean) < 0.01 for p in parameters)
        assert parameters[0].grad is not None and parameters[0].grad.dtype == torch.float32


def check_powersgd_sends_factors_and_what_it_left_out_the_next_time() -> None:
    compression.POWERSGD_START, before = 2, compression.POWERSGD_START
    try:
        average = averaging(How(hook="powersgd"))
    finally:
        compression.POWERSGD_START = before
    matrix, vector = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(64, 3, generator=generator) @ torch.randn(3, 64, generator=generator) for _ in range(2)]
    mean, steps, total = (parts[0] + parts[1]) / 2, 120, torch.zeros(64, 64)
    for step in range(-3, steps):
        matrix.grad = parts[dist.get_rank() % 2].clone() if step >= 0 else torch.zeros(64, 64)  # a dead layer at first
        vector.grad = torch.full((64,), float(dist.get_rank()))
        with sent() as noted:
            average.average([matrix, vector])
        if step >= 0:
            total += matrix.grad
            if step == 5:  # of rank 1, where the gradient's is 6
                assert torch.linalg.matrix_rank(matrix.grad, rtol=1e-3) == 1
    assert sum(elements for _, elements in noted) <= 64 + 64 + 64 + 2 + ALARMS + CARGO
    assert (total / steps - mean).norm() < 0.15 * mean.norm()
    assert vector.grad is not None and abs(vector.grad[0].item() - 0.5) < CLOSE


# ----------------------------------------------------------------------------------------------------- in the backward


class Deep(nn.Module):
    """Layers of which some may be left out, and one that may run again in the backward."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.again = again
        self.without: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.without:
                continue
            if self.again and number == 4:  # both repeat, each in a backward of its own
                x = checkpoint(layer, x, use_reentrant=True)
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x).tanh()
        return x


def begin(average: Averaging, parameters: list[nn.Parameter], *, may_sum: bool = False) -> bool:
    return average.begins_anew(parameters) and average.begin(silent=True, may_sum=may_sum)


def early(model: Deep, steps: int, each: Callable[[int], None] = lambda step: None) -> list[int]:
    """Exact means in each step; how many all-reduces began while the backward ran."""
    average, parameters, began = averaging(How(bucket_bytes=200)), list(model.parameters()), []
    torch.manual_seed(100 + dist.get_rank())
    for step in range(steps):
        each(step)
        for parameter in parameters:
            parameter.grad = None
        x = torch.randn(4, 6)
        model(x).square().sum().backward()
        mine = [None if p.grad is None else p.grad.clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        with sent() as noted:
            begin(average, parameters)
            model(x).square().sum().backward()
            began.append(len(noted))
            average.average(parameters)
        for parameter, *parts in zip(parameters, *everyone(mine), strict=True):
            known = [part for part in parts if part is not None]
            assert (parameter.grad is None) == (not known)
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, sum(known) / len(parts), atol=1e-6, rtol=1e-5)
    average.end()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)
    return began


def check_buckets_are_sent_while_the_backward_runs_once_steps_are_alike() -> None:
    began = early(Deep(), REGULAR + 3)
    assert began[:REGULAR] == [0] * REGULAR and min(began[REGULAR + 1 :]) >= 4, began


def check_layers_that_some_ranks_leave_out_are_averaged_exactly_when_buckets_are_early() -> None:
    model = Deep()

    def leave_out(step: int) -> None:
        model.without = step % 6 if (step + dist.get_rank()) % 2 else None
        if step == 9:
            model.without = 2  # on all ranks

    assert max(early(model, 12, leave_out)) > 0


def check_gradients_that_come_twice_are_averaged_after_the_backward_for_good() -> None:
    model = Deep()

    def repeat(step: int) -> None:
        model.again = step >= REGULAR + 2 and dist.get_rank() == 0  # seen by one rank, believed by all

    began = early(model, REGULAR + 5, repeat)
    assert began[REGULAR + 1] > 0 and began[-1] == 0, began


def check_losses_that_were_divided_before_are_summed_with_what_is_new_beside_them() -> None:
    """A layer that one rank alone begins to use after some steps is counted as all others are."""
    model, average = Deep(), averaging(How(bucket_bytes=200))
    parameters, ranks = list(model.parameters()), dist.get_world_size()
    torch.manual_seed(200 + dist.get_rank())
    for step in range(REGULAR + 4):
        model.without = 2 if step < REGULAR + 2 or dist.get_rank() else None
        x = torch.randn(4, 6)
        parts = torch.autograd.grad(model(x).square().sum(), parameters, allow_unused=True)
        model.zero_grad()
        summed = begin(average, parameters, may_sum=True)
        assert summed == (step > 0)
        (model(x).square().sum() / (ranks if summed else 1)).backward()
        average.average(parameters)
        for parameter, *known in zip(parameters, *everyone(parts), strict=True):
            some = [part for part in known if part is not None]
            assert (parameter.grad is None) == (not some)
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, sum(some) / ranks, atol=1e-6, rtol=1e-5)
    average.end()


def check_a_static_graph_in_which_gradients_come_twice_is_refused() -> None:
    model, average = Deep(), averaging(How(bucket_bytes=200, static=True))
    for step in range(REGULAR + 3):
        model.again = step == REGULAR + 2
        model.zero_grad()
        begin(average, list(model.parameters()))
        model(torch.ones(2, 6)).sum().backward()
        if model.again:
            assert "was computed twice" in refusal(lambda: average.average(list(model.parameters())))
        else:
            average.average(list(model.parameters()))
    average.end()


def check_a_backward_that_raises_leaves_nothing_behind() -> None:
    model, average = Deep(), averaging(How(bucket_bytes=200))
    parameters = list(model.parameters())

    def fail(gradient: Tensor) -> Tensor:
        raise ValueError("no gradient today")

    for step in range(REGULAR + 4):
        model.zero_grad()
        hidden = model.layers[1](model.layers[0](torch.ones(2, 6)))
        if step == REGULAR + 2:
            hidden.register_hook(fail)
        for layer in model.layers[2:]:
            hidden = layer(hidden)
        begin(average, parameters)
        try:
            (hidden.sum() * (1 + dist.get_rank())).backward()
        except ValueError:
            average.fail()
            continue
        average.average(parameters)
        assert (
            len({tuple(one) for one in everyone([p.grad.sum().item() for p in parameters if p.grad is not None])}) == 1
        )
    average.end()


# ------------------------------------------------------------------------------------------------------------- a cell


def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    torch.manual_seed(5)
    model, losses = Mlp(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    for _ in range(2):
        for x, y in DataLoader(data, 8, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return model, optimizer, losses


def check_steps_within_the_backward_are_refused() -> None:
    def within() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
        model(torch.ones(4, 6)).sum().backward()
        return model, optimizer, []

    message = refusal(lambda: under(context({"dp_replicate": dist.get_world_size()}), within))
    assert "0.weight.register_post_accumulate_grad_hook" in message and "after backward()" in message


def check_cells_train_as_on_one_device_under_every_option() -> None:
    whole, _, expected = cell()
    tiny = {"bucket_cap_mb": 0.0005}
    several: tuple[dict[str, Any], ...] = (
        {}, tiny, {"gradient_as_bucket_view": True, **tiny}, {"static_graph": True, **tiny},
        {"find_unused_parameters": True}, {"comm_hook": "powersgd"}, {"comm_hook": "fp16"},
    )  # fmt: skip
    for options in several:
        SAID.clear()
        within = 1e-2 if options.get("comm_hook") == "fp16" else CLOSE
        model, _, losses = under(context({"dp_replicate": dist.get_world_size()}, **options), cell)
        assert "each rank loads its part of every batch" in SAID, SAID  # though the loop stands in a function
        assert max(abs(one - other) for one, other in zip(losses, expected, strict=True)) < within, options
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        assert_close(model.state_dict(), whole.state_dict(), within)
