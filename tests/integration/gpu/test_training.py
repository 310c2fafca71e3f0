"""Cells that train on the GPUs end as on one CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.places import CPU, Place

BY_HAND = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import jupyter_torchdist as td

torch.manual_seed(0)
losses = []
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(td.device)
model = DistributedDataParallel(model, device_ids=[td.device] if td.device.type == "cuda" else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
x, y = torch.randn(24, 4).to(td.device), torch.randint(0, 3, (24,)).to(td.device)
for step in range(6):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
where = loss.device.type
"""
"""Every rank has the same samples, so that the mean of the gradients is one device's."""

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
"""It never says where: with a strategy, model and batches are on the rank's device."""


@cache
def on_one_cpu(source: str) -> list[float]:
    losses: list[float] = CPU.run(source).names["losses"]
    return losses


def alike(place: Place, source: str, **options: Any) -> dict[str, Any]:
    """The names after a cell whose losses are those of one CPU; a GPU adds in another order."""
    names = dict(place.run(source, **options).names)
    assert names["losses"] == pytest.approx(on_one_cpu(source), rel=1e-3 if place.on_gpu else 1e-5)
    assert all(value.device.type == "cpu" and not value.is_meta for value in names["model"].state_dict().values())
    assert type(names["model"]) is torch.nn.Sequential
    return names


def test_a_cell_that_is_distributed_by_hand(most: Place) -> None:
    assert alike(most, BY_HAND)["where"] == most.kind


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_cell_that_never_says_where_trains_on_the_device(one: Place, strategy: str) -> None:
    assert alike(one, UNMODIFIED, strategy=strategy)["seen"] == {(one.kind, one.kind)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_devices_train_as_one(several: Place, strategy: str) -> None:
    assert alike(several, UNMODIFIED, strategy=strategy)["seen"] == {(several.kind, several.kind)}
