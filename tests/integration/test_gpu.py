"""One GPU under one rank, as a notebook's cell finds it; ``make soak`` runs the same cells on a CPU.

Written from the documentation of CUDA, NCCL and torch; what a person sees of a GPU's failure is torch's wording.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jupyter_torchdist.protocol import inventory
from jupyter_torchdist.protocol.spec import Options
from tests.strategies.running import Outcome, run_cell

GPUS = inventory.visible(inventory.gpus(), None)

pytestmark = pytest.mark.timeout(300)

ON_GPU = (
    *("cuda", Options(gpus=1)),
    [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")],
)
ON_CPU = ("cpu", Options(ranks=1), [pytest.mark.soak])


@pytest.fixture(params=[pytest.param(where[:2], id=where[0], marks=where[2]) for where in (ON_GPU, ON_CPU)])
def where(request: pytest.FixtureRequest) -> tuple[str, Options]:
    """The kind of device, and the options that ask for one rank on it."""
    found: tuple[str, Options] = request.param
    return found


def run(source: str, options: Options, **names: Any) -> Outcome:
    outcome = run_cell(source, options, names, patience=240)
    assert outcome.error is None, f"{outcome.error!r}\n{outcome.printed}\n{outcome.errors}"
    return outcome


PLACE = """
import os
import torch, torch.distributed as dist
import jupyter_torchdist as td

device, backend, visible = td.device, dist.get_backend(), os.environ.get("CUDA_VISIBLE_DEVICES")
total = torch.full((1000,), 2.0, device=td.device)
dist.all_reduce(total)
everyone = [None]
dist.all_gather_object(everyone, str(total.device))
current = torch.cuda.current_device() if td.device.type == "cuda" else None
product = (torch.ones(300, 300, device=td.device) @ torch.ones(300, 300, device=td.device)).sum().item()
"""


def test_a_rank_has_its_device_and_a_group_on_it(home: Path, where: tuple[str, Options]) -> None:
    """Twice: the second rank is forked from a process that has served one with a device."""
    kind, options = where
    for _ in range(2):
        names = run(PLACE, options).names
        assert names["total"].tolist() == [2.0] * 1000 and names["total"].device.type == "cpu"
        assert names["product"] == 300.0**3
        if kind == "cuda":
            assert (names["device"], names["backend"], names["current"]) == (torch.device("cuda", 0), "nccl", 0)
            assert names["visible"] in [gpu.uuid for gpu in GPUS]
            assert names["everyone"] == ["cuda:0"]
        else:
            assert (names["device"], names["backend"], names["everyone"]) == (torch.device("cpu"), "gloo", ["cpu"])


FORKS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import jupyter_torchdist as td

on_device = torch.ones(8, device=td.device)  # the device is in use before the loader's workers are forked
data = TensorDataset(torch.arange(64.0).reshape(64, 1))
loader = DataLoader(data, batch_size=8, num_workers=2, pin_memory=td.device.type == "cuda")
total = sum((x.to(td.device, non_blocking=True).squeeze(1) * on_device).sum().item() for x, in loader)
"""


def test_workers_of_a_loader_beside_a_device(home: Path, where: tuple[str, Options]) -> None:
    assert run(FORKS, where[1]).names["total"] == 2016.0


TRAINED = """
import torch
from torch import nn
import jupyter_torchdist as td

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).to(td.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(32, 4, device=td.device)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
half, view = x.bfloat16(), x[:2]
where = {value.device.type for value in (x, half, loss, *model.state_dict().values())}
"""


def plain(model: Any) -> bool:
    """A model as it is in a notebook that has no device: of torch's own classes, its values on the CPU and whole."""
    values = [*model.parameters(), *model.buffers()]
    return (
        type(model) is torch.nn.Sequential
        and all(type(value) in (torch.nn.Parameter, torch.Tensor) for value in values)
        and all(value.device.type == "cpu" and not value.is_meta for value in values)
        and not [part for part in model.modules() if part._forward_hooks or part._forward_pre_hooks]
    )


def test_what_was_made_on_a_device_comes_back_on_the_cpu(home: Path, where: tuple[str, Options]) -> None:
    kind, options = where
    names = run(TRAINED, options).names
    assert names["where"] == {kind}
    assert plain(names["model"]) and names["losses"][-1] < names["losses"][0]
    assert names["half"].dtype == torch.bfloat16 and names["half"].device.type == names["x"].device.type == "cpu"
    assert names["view"].untyped_storage().data_ptr() == names["x"].untyped_storage().data_ptr()
    states = [value for state in names["optimizer"].state.values() for value in state.values()]
    assert len(states) == 3 * 6 and all(value.device.type == "cpu" for value in states)
    again = names["model"](names["x"])  # it goes on in the notebook
    assert torch.isfinite(again).all()


UNMODIFIED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
seen, losses = set(), []


class Noted(nn.Linear):
    def forward(self, x):
        seen.add((x.device.type, self.weight.device.type))
        return super().forward(x)


model = nn.Sequential(Noted(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
for epoch in range(3):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
"""
"""It never says where: with a strategy, model and batches are on the rank's device (SPEC section 1)."""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_cell_that_never_says_where_trains_on_the_device(
    home: Path, where: tuple[str, Options], strategy: str
) -> None:
    kind, options = where
    names = run(UNMODIFIED, replace(options, strategy=strategy)).names
    assert names["seen"] == {(kind, kind)}
    assert plain(names["model"])
    alone = run(UNMODIFIED, Options(ranks=1)).names["losses"]
    assert names["losses"] == pytest.approx(alone, rel=1e-3 if kind == "cuda" else 1e-5)


TOO_MUCH = """
import torch
import jupyter_torchdist as td

kept = 1
too_much = torch.empty(1 << 50, dtype=torch.uint8, device=td.device)
"""


def test_memory_that_is_not_there_is_said(home: Path, where: tuple[str, Options]) -> None:
    """The exception is the cell's own, the line is named, what came before is there, and the device is free again."""
    kind, options = where
    outcome = run_cell(TOO_MUCH, options, patience=240)
    assert outcome.state == "failed" and isinstance(outcome.error, RuntimeError)
    words = str(outcome.error)
    if kind == "cuda":
        assert isinstance(outcome.error, torch.OutOfMemoryError)
        assert "CUDA out of memory. Tried to allocate" in words and "GPU 0" in words
    else:
        assert "allocate" in words and str(1 << 50) in words
    assert "too_much = torch.empty" in outcome.errors + "".join(getattr(outcome.error, "__notes__", []))
    run(PLACE, options)


COMPILED = """
import torch
import jupyter_torchdist as td

f = torch.compile(lambda x: (x @ x).relu() * 2 + 1)
x = torch.full((32, 32), 0.5, device=td.device)
same, where = torch.allclose(f(x), (x @ x).relu() * 2 + 1), x.device.type
"""


def test_a_compiled_function(home: Path, where: tuple[str, Options]) -> None:
    """By Triton on a GPU."""
    kind, options = where
    names = run(COMPILED, options).names
    assert names["same"] is True and names["where"] == kind
