"""``td.prepare`` in cells, and code that is distributed by itself: the automatic way stands aside."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import jupyter_torchdist as td
from jupyter_torchdist.client import Request, submit
from jupyter_torchdist.client.job import Job
from jupyter_torchdist.functions.decorated import call_of
from jupyter_torchdist.functions.keywords import options_of
from jupyter_torchdist.protocol.errors import StrategyError
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store import journal

from .running import PATIENCE, run_cell

pytestmark = pytest.mark.strategies

CELL = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import jupyter_torchdist as td

torch.manual_seed(0)
data = TensorDataset(torch.randn(21, 4), torch.randn(21, 1))
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW([*net.parameters(), *model.parameters()], lr=0.05)
loader = DataLoader(data, 8, shuffle=True)
net, head, optimizer, loader = td.prepare(net, model, optimizer, loader)
losses, held = [], sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in net.parameters())
for epoch in range(2):
    for x, y in loader:
        loss = F.mse_loss(head(net(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(td.reduce_mean(loss)))
state = {name: value.clone() for name, value in net.state_dict().items()}
place = (td.dp_rank, td.tp_rank, td.pp_rank, td.mesh is None)
"""


@pytest.mark.parametrize("strategy", ["fsdp", None])
def test_a_cell(strategy: str | None) -> None:
    torch.manual_seed(1)
    model, twin = nn.Linear(1, 1), nn.Linear(1, 1)
    twin.load_state_dict(model.state_dict())
    alone: dict[str, Any] = {"model": twin}
    exec(compile(CELL, "Cell In[3]", "exec"), alone)
    first = model.weight
    found = run_cell(CELL, Options(ranks=2, strategy=strategy), {"model": model})
    assert found.error is None, (found.error, found.errors)
    assert found.names["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert found.names["model"] is model and model.weight is first and type(model) is nn.Linear
    net = found.names["net"]
    assert type(net) is nn.Sequential and not any(p.is_meta for p in net.parameters())
    whole = (*alone["net"].parameters(), *twin.parameters())
    for ours, theirs in zip((*net.parameters(), *model.parameters()), whole, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), atol=1e-5, rtol=1e-5)
    assert {name: value.shape for name, value in found.names["state"].items()} == {
        name: value.shape for name, value in net.state_dict().items()
    }
    assert found.names["place"] == (0, 0, 0, False) and alone["place"] == (0, 0, 0, True)
    assert (found.names["held"] < sum(p.numel() for p in net.parameters())) == (strategy == "fsdp")


def notes_of(job: Job) -> list[str]:
    job.wait(PATIENCE)
    job.raise_for_state()
    return list(journal.state(job.paths).notes)


def by_itself(number: int) -> int:
    return _summed(number)


def _summed(number: int) -> int:
    import torch.distributed as dist

    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def prepares_late() -> bool:
    late = importlib.import_module("jupyter_torchdist")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    getattr(late, "pre" + "pare")(model, optimizer)
    model(torch.ones(2, 2)).mean().backward()
    return isinstance(model, nn.Linear) and type(model) is not nn.Linear


def prepares_too_late() -> str:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 2)).mean().backward()
    try:
        getattr(td, "pre" + "pare")(model, optimizer)
    except StrategyError as error:
        return str(error)
    return "nothing was refused"


def trains_alone() -> float:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        loss = model(torch.ones(2, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def trains_alone_by_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 1))
    for _ in range(8):
        accelerator.backward(model(torch.ones(2, 2)).square().mean())


def test_ranks_that_train_alone_are_told() -> None:
    (note,) = notes_of(submit(call_of(trains_alone, (), {}, options_of(ranks=2))))
    assert note == (
        "9 backward passes and no collective: each of the 2 ranks trains a model of its own, and rank 0's comes back. "
        "--strategy ddp trains one model with a cell that is written for one device"
    )
    assert notes_of(submit(call_of(trains_alone, (), {}, options_of(ranks=1)))) == []
    if find_spec("accelerate") is None:
        return
    options = options_of(ranks=2, strategy="ddp", env=["ACCELERATE_USE_CPU=0"])
    *_, note = notes_of(submit(call_of(trains_alone_by_accelerate, (), {}, options)))
    assert "8 backward passes and no collective" in note and "Accelerator(cpu=True)" in note


def test_functions_and_scripts_that_are_distributed_already(tmp_path: Path) -> None:
    options = options_of(ranks=2, strategy="ddp", collect="all")
    job = submit(call_of(by_itself, (3,), {}, options))
    assert any("distributed already (torch.distributed)" in note for note in notes_of(job))
    assert job.values() == [6, 6]
    job = submit(call_of(prepares_late, (), {}, options))
    notes = notes_of(job)
    assert "td.prepare is called, and --strategy acts through it" in notes
    assert any("prepared for ddp on 2 ranks: Linear (3 parameters)" in note for note in notes)
    assert job.values() == [True, True]
    job = submit(call_of(prepares_too_late, (), {}, options))
    notes_of(job)
    assert all("has distributed Linear before" in said for said in job.values())
    script = tmp_path / "train.py"
    script.write_text("from torch.nn.parallel import DistributedDataParallel\nprint('left alone')\n")
    request = Request(script.read_text(), str(script), options=options, kind="script")
    assert any("DistributedDataParallel" in note or "torch.nn.parallel" in note for note in notes_of(submit(request)))
