"""What a notebook has after a cell that was interrupted, or failed, while a strategy had its model in parts."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from jupyter_torchdist.client import Job, Request, submit
from jupyter_torchdist.kernel.run import remarks
from jupyter_torchdist.protocol.spec import Options
from tests.leaks import wait_until
from tests.strategies.running import notebook

pytestmark = pytest.mark.strategies

CELL = """
losses, kept = [], {"both": [model, optimizer]}
for epoch in range(100_000):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(len(losses))
        if len(losses) == fails_at:
            raise ValueError("of the cell")
"""

PREPARED = "import jupyter_torchdist as td\nmodel, optimizer, loader = td.prepare(model, optimizer, loader)\n"

PARTS = {
    "zero1": ("ddp", ("zero1=1",), ""),
    "fsdp": ("fsdp", (), ""),
    "tp": ("tp", ("tp_plan=0:colwise,2:rowwise",), ""),
    "pp": ("pp", (), ""),
    "zero1 prepared": ("ddp", ("zero1=1",), PREPARED),
    "fsdp prepared": ("fsdp", (), PREPARED),
    "tp prepared": ("tp", ("tp_plan=0:colwise,2:rowwise",), PREPARED),
}
"""Strategy, options, and what the cell begins with."""


def made() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
    return {"model": model, "loader": loader, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    with notebook() as namespace:
        namespace.update(torch=torch, nn=nn, **made())
        yield namespace


def begin(parts: str, namespace: dict[str, Any], fails_at: int, cell: str = CELL) -> Job:
    strategy, option, first = PARTS[parts]
    namespace["fails_at"] = fails_at
    # A step may take long on a busy machine, and an interrupt waits for its end half of the grace.
    options = Options(ranks=2, strategy=strategy, option=option, env=("OMP_NUM_THREADS=1",), grace=40.0)
    return submit(Request(first + cell, "Cell In[3]", 2, options, namespace))


def alone(namespace: dict[str, Any], steps: int) -> None:
    """The same steps on this device."""
    model, optimizer = namespace["model"], namespace["optimizer"]
    for inputs, targets in itertools.islice(
        itertools.chain.from_iterable(itertools.repeat(namespace["loader"])), steps
    ):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def weights(namespace: dict[str, Any]) -> list[torch.Tensor]:
    assert {type(one) for one in namespace["model"].parameters()} == {nn.Parameter}
    optimizer, model = namespace["optimizer"], namespace["model"]
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, model.parameters()))
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("parts", PARTS)
def test_an_interrupted_cell_leaves_what_its_steps_made(home: Path, names: dict[str, Any], parts: str) -> None:
    before = dict(names)
    job = begin(parts, names, 0)
    assert wait_until(lambda: job.logs(0, "out").count("\n") > 10)
    job.interrupt()
    assert job.wait(60).state == "cancelled"
    assert not job.bring(names).left
    assert all(names[name] is before[name] for name in ("model", "optimizer"))
    assert names["kept"]["both"][0] is before["model"]
    steps, found = len(names["losses"]), weights(names)
    assert f"all ranks stopped after step {steps}" in " ".join(job.state.notes)
    state = names["optimizer"].state
    assert [int(state[one]["step"]) for one in names["model"].parameters()] == [steps] * 6
    again = made()
    alone(again, steps)
    torch.testing.assert_close(found, weights(again), atol=1e-5, rtol=0)


def test_a_cell_may_catch_its_interrupt(home: Path, names: dict[str, Any]) -> None:
    """As on one device: it ends well, and what it does afterwards counts."""
    caught = (
        "try:\n"
        + textwrap.indent(CELL, "    ")
        + "except KeyboardInterrupt:\n    after = model(torch.ones(1, 4)).item()"
    )
    job = begin("fsdp", names, 0, caught)
    assert wait_until(lambda: job.logs(0, "out").count("\n") > 10)
    job.interrupt()
    assert job.wait(60).state == "succeeded"
    assert not job.bring(names).left
    assert f"all ranks stopped after step {len(names['losses'])}" in " ".join(job.state.notes)
    with torch.no_grad():
        assert names["model"](torch.ones(1, 4)).item() == pytest.approx(names["after"], abs=1e-5)


def kept_apart(parts: str) -> str:
    strategy, _, prepares = PARTS[parts]
    saving = (
        "td.save saves while a cell trains, td.load goes on from there"
        if prepares
        else "--checkpoint DIR saves while a cell trains, --resume goes on from there"
    )
    return (
        f"--strategy {strategy} keeps it in parts on several ranks, so it comes back only when all ranks end together "
        f"({saving})"
    )


@pytest.mark.parametrize("parts", PARTS)
def test_a_failed_cell_leaves_what_the_notebook_had(home: Path, names: dict[str, Any], parts: str) -> None:
    """All of it or nothing: a model with the steps of one stage and an optimizer without are nobody's."""
    before = weights(names)
    job = begin(parts, names, 3)
    assert job.wait(60).state == "failed"
    brought = job.bring(names)
    zero1 = parts.startswith("zero1")
    apart = {"kept", "optimizer"} if zero1 else {"kept", "model", "optimizer"}
    assert {name for name, _ in brought.left} == apart
    assert {why for _, why in brought.left} == {kept_apart(parts)}
    said = [line for line in remarks(job.state, brought, 0) if line.startswith("stayed behind: ")]
    assert len(said) == 1
    assert said[0].count("keeps it in parts") == 1
    # Another rank may fail first: this one is ended within its own third step then, which no rank begins alone.
    assert len(names["losses"]) in (2, 3)
    found = weights(names)
    assert not names["optimizer"].state
    if not zero1:
        torch.testing.assert_close(found, before, atol=0, rtol=0)
