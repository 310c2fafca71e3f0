"""``--checkpoint DIR --resume`` of unmodified cells: stopped anywhere, they go on as if they had never been."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import jupyter_torchdist as td
from jupyter_torchdist.client import Request, submit
from jupyter_torchdist.protocol.spec import Options
from tests.leaks import wait_until
from tests.strategies.running import Outcome, notebook, run_cell

pytestmark = pytest.mark.strategies

CELL = """
import os, signal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
critic = nn.Linear(3, 1)
shadow = {name: value.detach().clone() for name, value in critic.named_parameters()}
averaged = torch.optim.swa_utils.AveragedModel(model)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
loader = DataLoader(data, batch_size=8, shuffle=True)
losses, seen = [], 0


def fit(model, critic):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    second = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for epoch in range(epochs):
        for inputs, targets in loader:
            outputs = model(inputs)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(outputs, targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            second.zero_grad()
            (critic(outputs.detach()) - loss.detach()).square().mean().backward()
            second.step()
            note(loss.item())
        scheduler.step()
    return scheduler


def note(loss):
    global seen
    averaged.update_parameters(model)
    with torch.no_grad():
        for name, value in critic.named_parameters():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            shadow[name].mul_(0.5).add_(value, alpha=0.5)
    losses.append(loss + torch.rand(()).item() + next(iter(shadow.values())).sum().item())
    seen += 1
    print(seen)
    if seen == stop_at and int(os.environ["RANK"]):
        os.kill(os.getpid(), sent)


scheduler = fit(model, critic)
rate = scheduler.get_last_lr()
"""


ATTENTION = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        parts = (f(self.norm(x)).unflatten(2, (self.heads, -1)) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, words=12, width=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
words = torch.randint(12, (32, 8))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)  # a bias of keys has gradients of rounding
losses = []
for epoch in range(3):
    for x, y in DataLoader(TensorDataset(words, words.roll(1, 1)), batch_size=8, shuffle=True):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


def train(
    strategy: str, ranks: int, place: Path | None, names: Mapping[str, int] | None = None, **more: Any
) -> Outcome:
    where = None if place is None else str(place)
    options = Options(ranks=ranks, strategy=strategy, checkpoint=where, env=("OMP_NUM_THREADS=1",), **more)
    return run_cell(CELL, options, {"stop_at": 0, "sent": 0, "epochs": 3, **(names or {})})


def same(one: Outcome, other: Outcome) -> None:
    """Both ended alike: the curve, the weights, the averages and the scheduler."""
    assert (one.error, other.error) == (None, None)
    assert one.names["seen"] == other.names["seen"] == 15
    assert one.names["losses"] == pytest.approx(other.names["losses"], abs=1e-5)
    assert one.names["rate"] == pytest.approx(other.names["rate"])
    for name in ("model", "critic", "averaged"):
        torch.testing.assert_close(
            dict(one.names[name].state_dict()), dict(other.names[name].state_dict()), atol=1e-5, rtol=0
        )
    torch.testing.assert_close(dict(one.names["shadow"]), dict(other.names["shadow"]), atol=1e-5, rtol=0)


@pytest.mark.timeout(300)
def test_a_cell_goes_on_as_if_it_had_never_been_stopped(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "whole"
    whole = train("ddp", 2, place, option=("checkpoint_steps=4", "checkpoint_keep=9"))
    assert sorted(os.listdir(place)) == ["step-000004", "step-000008", "step-000012", "step-000015"]
    assert set(td.load(place)) == {"step", "tensors"}
    same(train("ddp", 2, place, resume=True), whole)  # it had ended: nothing is left to do
    for step, strategy, ranks in ((4, "fsdp", 2), (12, "ddp", 1)):
        part = tmp_path / strategy
        shutil.copytree(place / f"step-{step:06d}", part / f"step-{step:06d}")
        same(train(strategy, ranks, part, resume=True), whole)


WITHOUT_A_LOADER = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, seen = torch.ones(4, 4), 0
for step in range(4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    seen += 1
"""


def test_a_loop_without_a_loader_starts_again_and_a_note_says_so(home: Path, tmp_path: Path) -> None:
    options = Options(ranks=1, strategy="ddp", checkpoint=str(tmp_path / "saved"))
    assert run_cell(WITHOUT_A_LOADER, options, {}).names["seen"] == 4
    with notebook() as namespace:
        job = submit(Request(WITHOUT_A_LOADER, "Cell In[3]", 2, replace(options, resume=True), namespace))
        assert job.wait(60).state == "succeeded"
        job.bring(namespace)
    notes = " ".join(job.state.notes)
    assert "step-000004 has no position of a DataLoader: a loop such as `for step in range(N)` starts again" in notes
    assert namespace["seen"] == 8


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_interrupt_stops_all_ranks_at_one_step(home: Path, tmp_path: Path, strategy: str) -> None:
    place = tmp_path / "interrupted"
    saves, option = (str(place), ("checkpoint_minutes=0.00001",)) if strategy == "fsdp" else (None, ())
    # A step that saves may take long on a busy machine, and an interrupt waits for its end half of the grace.
    options = Options(
        ranks=2, strategy=strategy, checkpoint=saves, option=option, env=("OMP_NUM_THREADS=1",), grace=40.0
    )
    with notebook() as namespace:
        namespace.update(stop_at=0, sent=0, epochs=100_000)
        job = submit(Request(CELL, "Cell In[3]", 2, options, namespace))
        assert wait_until(lambda: job.logs(0, "out").count("\n") > 10)
        job.interrupt()
        assert job.wait(60).state == "cancelled"
        job.bring(namespace)
    last = [int(job.logs(rank, "out").splitlines()[-1]) for rank in (0, 1)]
    assert last == [namespace["seen"]] * 2
    notes = " ".join(job.state.notes)
    assert f"all ranks stopped after step {last[0]}" in notes
    if saves:
        assert sorted(os.listdir(place))[-1] == f"step-{last[0]:06d}"
        assert len(os.listdir(place)) == 2  # earlier ones went when later ones came


def test_sigterm_of_one_rank_saves_on_all(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "terminated"
    stopped = train("ddp", 2, place, {"stop_at": 6, "sent": signal.SIGTERM, "epochs": 10_000})
    assert "SIGTERM" in str(stopped.error)
    assert td.load(place)["step"] > 6


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_checkpoint_of_one_parallelism_goes_on_under_the_next(home: Path, tmp_path: Path) -> None:
    """Layers divided, then sequences, two stages, two copies of two shards, and one device: one curve."""

    def run(strategy: str, ranks: int, place: Path | None, **more: Any) -> Outcome:
        where, env = None if place is None else str(place), ("OMP_NUM_THREADS=1",)
        outcome = run_cell(ATTENTION, Options(ranks=ranks, strategy=strategy, checkpoint=where, env=env, **more))
        assert outcome.error is None, outcome.errors
        return outcome

    every = ("checkpoint_steps=2", "checkpoint_keep=9")
    alone, earlier = run("ddp", 1, None), tmp_path / "tp"
    found = [run("tp", 2, earlier, option=every)]
    hops: tuple[tuple[str, int, tuple[str, ...]], ...] = (
        ("cp", 2, ()), ("pp", 2, ("microbatches=4",)), ("hsdp", 4, ("dp_shard=2",)), ("ddp", 1, ())
    )  # fmt: skip
    for step, (strategy, ranks, option) in zip((2, 4, 6, 8), hops, strict=True):
        name, place = f"step-{step:06d}", tmp_path / strategy
        shutil.copytree(earlier / name, place / name)
        found.append(run(strategy, ranks, place, resume=True, option=(*every, *option)))
        earlier = place
    for outcome in found:
        assert outcome.names["losses"] == pytest.approx(alone.names["losses"], abs=1e-5)
        ours, theirs = (one.names["model"].state_dict() for one in (outcome, alone))
        torch.testing.assert_close(dict(ours), dict(theirs), atol=1e-5, rtol=0)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_rank_that_was_killed_costs_the_steps_since_the_last_checkpoint(home: Path, tmp_path: Path) -> None:
    place, option = tmp_path / "killed", ("checkpoint_steps=4", "checkpoint_keep=9")
    killed = train("fsdp", 2, place, {"stop_at": 9, "sent": signal.SIGKILL}, option=option)
    assert "was killed (SIGKILL)" in str(killed.error)
    assert "step-000004" in os.listdir(place)  # and that of step 8, if it was written in time
    again = train("fsdp", 2, place, resume=True)
    assert again.printed.split()[0] in ("5", "9")
    same(again, train("ddp", 2, None))
