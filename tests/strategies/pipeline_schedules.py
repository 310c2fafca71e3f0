"""Every schedule by name, around an unmodified loop: equal to one device, in its own order; or refused in words."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import jupyter_torchdist as td
from jupyter_torchdist.protocol.options.strategy import BY_NAME

from .models import SAMPLES, sgd
from .pipelines import Placed, gpt, same_as, staged, stages_of, trained
from .ranks import CLOSE, SAID, assert_close, refusal

EACH = tuple(BY_NAME["schedule"].choices)
STEPS = 4
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[layer for _ in range(9) for layer in (nn.Linear(6, 6), nn.Tanh())])


def microbatches() -> int:
    """Two a rank, as DualPipeV asks for."""
    return 2 * dist.get_world_size()


def check_every_schedule_is_one_devices() -> None:
    which, steps = gpt(tied=True), 2
    alone = trained(which, None, sgd, clipped, steps)
    for schedule in EACH:
        options = {"schedule": schedule, "microbatches": microbatches()}
        same_as(alone, trained(which, staged(**options), sgd, clipped, steps))
        assert f"schedule {schedule}" in SAID[-1]
        assert not any("all forwards ran before" in said for said in SAID)


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


# ------------------------------------------------------------------------------------------ loops with losses of theirs


def loop(
    loss_of: Loss,
    schedule: str | None,
    build: Callable[[], nn.Module] = Wide,
    samples: int = SAMPLES,
    look: Callable[[int, Tensor], None] = lambda step, loss: None,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a loop that steps at every second backward; ``look`` is called before ``backward()``."""
    automatic = None
    if schedule is not None:
        automatic = staged(schedule=schedule, **{"microbatches": microbatches(), **options})
    try:
        torch.manual_seed(5)
        model = build()
        optimizer = sgd(list(model.parameters()))
        losses = []
        for step in range(STEPS):
            x, y = torch.randn(samples, 6), torch.randint(6, (samples,))
            y[: step + 1] = -100
            loss = loss_of(model, x, y)
            look(step, loss)
            loss.backward()
            losses.append(loss.item())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        if automatic is not None:
            automatic.finish({})
        return losses, model.state_dict()
    finally:
        if automatic is not None:
            automatic.abandon()


def same(loss_of: Loss, schedule: str = "1f1b", within: float = CLOSE, **options: Any) -> None:
    """The loop under a schedule beside the loop alone."""
    build, samples = options.pop("build", Wide), options.pop("samples", SAMPLES)
    look = options.pop("look", lambda step, loss: None)
    expected, weights = loop(loss_of, None, build, samples)
    losses, ours = loop(loss_of, schedule, build, samples, look, **options)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=within, rtol=within)
    if dist.get_rank() == 0:
        assert_close(ours, weights, within)


def with_ignored_targets(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def accumulated(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss /= 2
    return loss


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - x).square().sum() / 40  # type: ignore[no-any-return]


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(out.view(-1, 6), y.view(-1), weight=torch.arange(1.0, 7.0))


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=torch.arange(1.0, 7.0), label_smoothing=0.1) / 2


def shared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Targets that are shares of classes."""
    return F.cross_entropy(model(x), F.one_hot(y.clamp(min=0), 6).float(), label_smoothing=0.1)


def exactly(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([0.1, 0.2, 0.3, 1.0, 2.0, 3.0], dtype=torch.float64)
    return F.cross_entropy(model(x.double()), y, weight=weight)


class LossInside(Wide):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def inside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y)["loss"]  # type: ignore[no-any-return]


HELD: list[dict[str, Tensor]] = []


def held(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    HELD.append(model(x, y))
    return HELD[-1]["loss"]


def check_losses_are_those_of_the_batch() -> None:
    for loss_of in (with_ignored_targets, summed, weighted, smoothed, shared):
        same(loss_of)
    same(exactly, build=lambda: Wide().double())
    same(accumulated, "interleaved_zero_bubble")
    same(inside, "interleaved_1f1b", build=LossInside)
    same(held, build=LossInside)
    for alone, ours in zip(HELD[:STEPS], HELD[STEPS:], strict=True):
        assert_close(ours, alone, CLOSE)
    same(with_ignored_targets, "zbv", samples=SAMPLES - 1)  # microbatches do not divide it
    same(with_ignored_targets, precision="bf16", within=0.05)
    assert not any("all forwards ran before" in said for said in SAID)


def check_outputs_are_there_after_backward() -> None:
    """An accuracy of outputs that were deferred; in evaluation another shape; scaled losses; a last batch of one."""
    seen: list[Any] = []

    def train(automatic: Any) -> list[Any]:
        torch.manual_seed(6)
        model, scaler = Wide(), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = sgd(list(model.parameters()))
        found = []
        for samples in (SAMPLES, 1, SAMPLES):
            x, y = torch.randn(samples, 6), torch.randint(6, (samples,))
            out = model(x)
            loss = nn.CrossEntropyLoss()(out, y)
            kept = loss.detach()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            hits = (out.argmax(1) == y).sum().item()
            assert type(out) is Tensor and type(loss) is Tensor and out.requires_grad
            model.eval()
            with torch.no_grad():
                other = model(torch.ones(3, 6)).sum().item()
            model.train()
            found.append([hits, loss.item(), kept.item(), other, out.sum().item()])
        if automatic is not None:
            automatic.finish({})
            automatic.abandon()
        return found

    seen.append(torch.tensor(train(None)))
    seen.append(torch.tensor(train(staged(schedule="1f1b", microbatches=microbatches()))))
    torch.testing.assert_close(seen[1], seen[0], atol=CLOSE, rtol=CLOSE)
    assert any("the batch goes through in one piece" in said for said in SAID) or dist.get_rank()


def peak(schedule: str) -> tuple[int, list[float]]:
    """The most rows of activations that this rank kept for backwards once its first step was over, and the losses."""
    now = most = 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal now, most
            self.tensor = tensor.detach()  # else one saved by its own operation would hold itself
            real = tensor.dim() == 2 and not isinstance(tensor, FakeTensor)
            self.rows = tensor.size(0) if real and tensor.size(0) != 6 else 0  # 6: of weights
            now += self.rows
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            now -= self.rows

    def look(step: int, loss: Tensor) -> None:
        nonlocal most
        gc.collect()
        most = most if step > 1 else now

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        # The hooks keep what goes through the model, which a trial of it would object to.
        losses, _ = loop(with_ignored_targets, schedule, Wide, 32, look, microbatches=8, trust_model=True)
    return most, losses


def check_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    (gpipe, losses), (ours, same_losses) = peak("gpipe"), peak("1f1b")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(same_losses), atol=CLOSE, rtol=CLOSE)
    assert 2 * ours < gpipe, (ours, gpipe)


def check_a_value_that_is_read_before_backward() -> None:
    """Every step: refused. Now and then, even on one rank alone: right, and said."""

    def reads(step: int, loss: Tensor) -> None:
        if step == 2 and dist.get_rank() == 0:
            assert loss.item() > 0

    same(with_ignored_targets, look=reads)
    if dist.get_rank() == 0:
        assert any("all forwards ran before the backwards" in said and "item" in said for said in SAID)
    said = refusal(lambda: loop(with_ignored_targets, "1f1b", look=lambda step, loss: print(end=f"{loss:.0f}"[:0])))
    assert "schedule=1f1b" in said and "use -O schedule=gpipe" in said


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def check_what_a_schedule_cannot_do_is_refused() -> None:
    def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return (out @ out.T).softmax(-1).diagonal().log().mean()  # type: ignore[no-any-return]

    def two_means(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.cross_entropy(out, y) + out.square().mean()  # type: ignore[no-any-return]

    def several(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out, there = model(x), y.clamp(min=0)
        return F.cross_entropy(out, there) + F.cross_entropy(out, there.flip(0))

    def more(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return inside(model, x, y) + 0.5

    def custom(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return Doubled.apply(model(x)).mean()  # type: ignore[no-any-return, no-untyped-call]

    def written(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model(x).mean()
        with torch.no_grad():
            next(parameter for parameter in model.parameters() if not parameter.is_meta).mul_(2)
        return loss

    def drawing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.dropout(model(x)).mean()

    said = refusal(lambda: loop(contrastive, "1f1b"))
    assert "every sample with every other" in said and "cannot be computed from those of the microbatches" in said, said
    assert "two means with different divisors" in refusal(lambda: loop(two_means, "1f1b"))
    assert "adds several cross entropies" in refusal(lambda: loop(several, "1f1b"))
    assert "adds a term to a mean over targets" in refusal(lambda: loop(more, "1f1b", LossInside))
    assert "Doubled" in refusal(lambda: loop(custom, "1f1b"))
    assert "changed between its forward and backward" in refusal(lambda: loop(written, "1f1b"))
    assert "dropout" in refusal(lambda: loop(drawing, "zbv"))
    for schedule in ("gpipe", "looped_bfs"):  # take any
        same(contrastive, schedule)
        same(custom, schedule)
    said = refusal(lambda: loop(with_ignored_targets, "zbv", lambda: nn.Sequential(*list(Wide())[:4])))
    assert f"{2 * dist.get_world_size()} stages are more than the 2 layers" in said
    said = refusal(lambda: loop(with_ignored_targets, "dualpipev", microbatches=dist.get_world_size()))
    assert "as many microbatches as stages" in said


def check_stages_a_rank_as_said() -> None:
    ranks = dist.get_world_size()
    held, said = stages_of(schedule="looped_bfs", balance=(1,) * (2 * ranks - 1) + (6 - 2 * ranks,))
    assert held == [42 * (ranks), 42 * (5 - ranks)] and f"in {2 * ranks} stages on {ranks} ranks" in said
    held, _ = stages_of(schedule="zbv", balance="manual", build=InFour)
    assert held == [42 * 3, 42 * 2]  # the first and the last stage are on rank 0
    said = refusal(lambda: stages_of(schedule="zbv", balance="manual", build=Placed))
    assert "needs 4 stages, there are 2" in said


class InFour(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        for number in (0, 1, 2, 3, 3):
            with td.stage(number):
                self.append(nn.Linear(6, 6))
