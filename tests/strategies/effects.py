"""Options of an unmodified cell by their effects: what is seen within its loop, which knows of none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import jupyter_torchdist as td
from jupyter_torchdist.strategies.core.context import ParallelContext
from jupyter_torchdist.strategies.step import compression
from jupyter_torchdist.strategies.step.layout import ALARMS, CARGO

from .averaging import sent
from .models import Gpt, Mixture, Mlp, loss_of
from .ranks import CLOSE, context, everyone, local_bytes, refusal, spied
from .unchanged import WORLD, Cell, under

Look = Callable[[nn.Module, torch.optim.Optimizer], None]
"""What a check sees of a cell: called in its loop, once gradients have come."""

STEPS = 4


def ddp(**options: Any) -> ParallelContext:
    return context({"dp_replicate": WORLD()}, **options)


def cell(
    build: Callable[[], nn.Module],
    look: Look,
    forward: Callable[..., Tensor] = lambda model, x: model(x),
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Cell:
    """A step for each eight samples. ``forward`` calls the model."""

    def run() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(5)
        model, losses = build(), []
        trained = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.01)
        words = torch.randint(11, (8 * STEPS, 6))
        data = (words, words) if isinstance(model, Gpt) else (words.float(), words[:, 0] % 3)
        for x, y in DataLoader(TensorDataset(*data), 8):
            trained.zero_grad(set_to_none=False)
            loss = loss_of(forward(model, x), y)
            loss.backward()
            look(model, trained)
            trained.step()
            losses.append(loss.item())
        return model, trained, losses

    return run


def seen(
    how: ParallelContext, build: Callable[[], nn.Module], look: Callable[[Any, torch.optim.Optimizer], Any]
) -> list[Any]:
    """What ``look`` finds in each step of the cell."""
    found: list[Any] = []
    under(how, cell(build, lambda model, optimizer: found.append(look(model, optimizer))))
    return found


def check_gradients_are_sent_as_the_option_says() -> None:
    elements, tail = sum(p.numel() for p in Mlp().parameters()), len(list(Mlp().parameters())) + ALARMS + CARGO
    compression.POWERSGD_START, before = 2, compression.POWERSGD_START
    try:
        for options, last in (
            ({}, [(torch.float32, elements + tail)]),
            ({"static_graph": True}, [(torch.float32, elements)]),  # nobody tells what came
            ({"bucket_cap_mb": 0.0005}, [(torch.float32, part) for part in (67, 256, elements - 67 - 256 + tail)]),
            ({"comm_hook": "fp16"}, [(torch.float16, elements + tail)]),
            ({"comm_hook": "bf16"}, [(torch.bfloat16, elements + tail)]),
            ({"comm_hook": "powersgd"}, [(torch.float32, part) for part in (35 + tail, 35, 38)]),
        ):
            with sent() as noted:
                under(ddp(**options), cell(Mlp, lambda model, optimizer: None))
            assert noted[-len(last) :] == last, (options, noted)
            # One asks first what comes; of the losses of two steps, the second one travels with the gradients.
            losses = 1 if options.keys() <= {"bucket_cap_mb"} else 2
            assert len(noted) == STEPS * len(last) + 1 + losses or "comm_hook" in options, noted
    finally:
        compression.POWERSGD_START = before


def check_gradients_are_views_of_the_buckets_from_the_first_on() -> None:
    def storages(model: nn.Module, _: torch.optim.Optimizer) -> int:
        return len({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None})

    assert seen(ddp(gradient_as_bucket_view=True), Mlp, storages) == [1] * STEPS
    assert seen(ddp(), Mlp, storages) == [6] * STEPS


def check_parameters_that_take_no_part_are_found_and_may_not_change_in_a_static_graph() -> None:
    """``find_unused_parameters`` is what is done anyway."""

    def without(model: nn.Module, _: torch.optim.Optimizer) -> list[str]:
        return [name for name, p in model.named_parameters() if p.grad is None and p.requires_grad]

    unused = [f"experts.{number}.0.{name}" for number in (0, 2) for name in ("weight", "bias")]
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        assert seen(ddp(trust_model=True, **options), Mixture, without) == [unused] * STEPS

    def change(model: Any, _: torch.optim.Optimizer) -> None:
        model.experts[0], model.experts[1] = model.experts[1], model.experts[0]

    seen(ddp(trust_model=True), Mixture, change)
    message = refusal(lambda: seen(ddp(trust_model=True, static_graph=True), Mixture, change))
    assert "-O static_graph=1: after this backward" in message and "after the first" in message, message


def check_zero1_keeps_a_share_of_the_state() -> None:
    def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        return local_bytes([value for state in optimizer.state.values() for value in state.values() if value.dim()])

    whole = 2 * local_bytes(list(Mlp().parameters()))
    for options, share in (({}, 1.0), ({"zero1": True}, 1 / WORLD())):
        of_all = everyone(seen(ddp(**options), Mlp, held)[-1])
        assert max(of_all) < 1.3 * share * whole, (options, of_all)
        assert sum(of_all) == whole * (1 if options else WORLD())


def check_blocks_are_computed_again_and_keep_less() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        if model.training and not rows:
            model.layers[1].register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
        steps.append(1)
        if len(steps) < STEPS:
            return model(x)  # type: ignore[no-any-return]
        rows.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return model(x)  # type: ignore[no-any-return]

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    kept_of = spied()
    for again in (False, True):
        rows = spied()
        kept = spied()
        steps = spied()
        run = cell(lambda: Gpt(tied=False, layers=2), lambda model, optimizer: None, forward)
        under(ddp(activation_checkpointing=again), run)
        assert rows == [8 // WORLD()] * (2 if again else 1), rows
        kept_of.append(sum(kept))
    assert kept_of[1] < 0.2 * kept_of[0], kept_of


@contextmanager
def compiled_in_no_time() -> Iterator[list[int]]:
    """``--compile`` as it is, with a backend that runs the graph as it was captured: how often each of them ran."""
    original = nn.Module.compile
    runs = spied()

    def backend(graph: Any, _: Any) -> Any:
        place = len(runs)
        runs.append(0)

        def run(*args: Any) -> Any:
            runs[place] += 1
            return graph.forward(*args)

        return run

    def compiled(module: nn.Module, **options: Any) -> None:
        original(module, backend=backend, **options)

    nn.Module.compile = compiled  # type: ignore[assignment, method-assign]
    try:
        yield runs
    finally:
        nn.Module.compile = original  # type: ignore[method-assign]


def check_compiled_blocks_run() -> None:
    def compiled(model: Any, _: torch.optim.Optimizer) -> list[bool]:
        return [layer._compiled_call_impl is not None for layer in model.layers]

    with compiled_in_no_time() as runs:
        assert seen(ddp(compile=True), lambda: Gpt(tied=False, layers=2), compiled) == [[True, True]] * STEPS
    assert min(runs) > 0 and sum(runs) >= 2 * STEPS, runs  # both blocks in every step


def check_a_rank_reads_a_loss_alone_and_waits_for_nobody() -> None:
    def run() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(0)
        model, losses = Mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(40, 6), torch.randn(40, 3))
        for x, y in DataLoader(data, batch_size=10, shuffle=True):
            loss = nn.functional.mse_loss(model(x), y)
            if td.is_main:
                losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if td.is_main:
                losses.append(loss.item())
        return model, optimizer, losses

    _, _, expected = run()
    assert len(expected) == (8 if dist.get_rank() == 0 else 0)
    for degrees in ({"dp_replicate": WORLD()}, {"dp_shard": WORLD()}):
        _, _, losses = under(context(degrees), run)
        for ours, theirs in zip(losses, expected, strict=True):
            assert abs(ours - theirs) < CLOSE, (degrees, losses, expected)


def check_layers_compute_in_the_precision_that_is_asked_for() -> None:
    def build() -> nn.Module:
        model = Mlp()
        model[2].register_forward_hook(lambda _module, _inputs, output: kinds.append(output.dtype))
        return model

    def gradients(model: nn.Module, _: torch.optim.Optimizer) -> set[torch.dtype]:
        return {p.grad.dtype for p in model.parameters() if p.grad is not None}

    for degrees in ({"dp_replicate": WORLD()}, {"dp_shard": WORLD()}):
        kinds = spied()
        assert seen(context(degrees, precision="bf16"), build, gradients) == [{torch.float32}] * STEPS
        assert kinds[-STEPS:] == [torch.bfloat16] * STEPS, (degrees, kinds)
