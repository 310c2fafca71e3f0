"""What shows that work is divided, and not done by every rank; and the table of equality on four ranks."""

from __future__ import annotations

import pytest

from jupyter_torchdist.protocol.spec import Options

from .running import run_alone, run_cell, text_of
from .test_cells import STRATEGIES
from .traces import differences, trace

pytestmark = pytest.mark.strategies

WATCHED = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
training, evaluating = [], []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        (training if self.training else evaluating).append(len(x))
        return self.fc(x)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(25, 4), torch.randint(0, 3, (25,)))
losses = []
for epoch in range(2):
    model.train()
    for x, y in DataLoader(dataset, batch_size=10, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        model(dataset.tensors[0])
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_computes_its_part_of_every_batch(strategy: str) -> None:
    refused = run_cell(WATCHED, Options(ranks=2, strategy=strategy))
    assert "it stores something about its samples" in str(refused.error) and "in training" in str(refused.error)
    trusted = Options(ranks=2, strategy=strategy, option=("trust_model=1",), collect="all")
    outcome = run_cell(WATCHED, trusted)  # which is not one device's: each rank notes its own rows
    assert outcome.error is None, outcome.error
    last_epoch = [rows[-3:] for rows in outcome.names["training"]]
    assert [sum(parts) for parts in zip(*last_epoch, strict=True)] == [10, 10, 5]
    assert all(abs(one - other) <= 1 for one, other in zip(*last_epoch, strict=True))
    assert outcome.names["evaluating"] == [[25, 25], [25, 25]]
    assert outcome.names["losses"][0] == outcome.names["losses"][1]


SMALL = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.arange(8) % 2
for _ in range(3):
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_what_is_said_of_a_batch_is_what_each_rank_computes_of_it() -> None:
    outcome = run_cell(SMALL, Options(ranks=2, strategy="ddp", option=("model=whole",)))
    assert outcome.error is None, outcome.error
    (said,) = [line for line in outcome.said if "is trained by ddp" in line]
    assert said.endswith("on 2 ranks; each computes the whole batch")


NOISY = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

taken = []


class Noisy(Dataset):
    def __len__(self):
        return 25

    def __getitem__(self, i):
        taken.append(i)
        return torch.full((4,), float(i)) + torch.randn(4)


model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = DataLoader(Noisy(), batch_size=10, shuffle=True)
for epoch in range(3):
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


def test_every_sample_is_loaded_once_though_ranks_draw_other_numbers_for_theirs() -> None:
    """A batch of 5 is one of 3 and one of 2: one rank draws more noise, and both must shuffle alike."""
    outcome = run_cell(NOISY, Options(ranks=2, strategy="ddp", option=("batch=slices",), collect="all"))
    assert outcome.error is None, outcome.error
    one, other = outcome.names["taken"]
    for epoch in range(3):
        parts = one[13 * epoch :][:13], other[12 * epoch :][:12]
        assert sorted([*parts[0], *parts[1]]) == list(range(25))


def test_without_a_strategy_every_rank_does_all() -> None:
    outcome = run_cell(WATCHED, Options(ranks=2, strategy="none", collect="all"))
    assert outcome.names["training"] == [[10, 10, 5] * 2] * 2


@pytest.mark.parametrize("cell", ["uneven_batches", pytest.param("gpt_tied", marks=pytest.mark.soak)])
def test_four_ranks(cell: str) -> None:
    check_on_four(cell, "fsdp")


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_models_and_optimizers_on_four_ranks(strategy: str) -> None:
    check_on_four("model_zoo", strategy)


def check_on_four(cell: str, strategy: str) -> None:
    text = text_of(cell)
    outcome = run_cell(text, Options(ranks=4, strategy=strategy), patience=600)
    assert outcome.error is None, outcome.error
    off = differences(trace(outcome.names, outcome.printed), run_alone({cell: text})[cell])
    assert not off, "\n".join(sorted(off)[:12])
