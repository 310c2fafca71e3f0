"""``--verify K``: a user's cell is compared with itself on one device, with its own optimizer and loader."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from jupyter_torchdist.protocol.errors import StrategyError, TrainingError
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.strategies.step.verifying import Ended, Loss, Taken, _ended, compared

from .running import Outcome, run_cell

CELL = """
import os
import random
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x = torch.randn(20, 4) * random.random()
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6, shuffle=True)
BEFORE = None
losses = []
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        loss = (model(a) - b).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
LINE = 1 + next(number for number, line in enumerate(CELL.split("\n"), 1) if "backward" in line)

pytestmark = pytest.mark.strategies


def verified(line: str, text: str = CELL, names: dict[str, Any] | None = None) -> Outcome:
    return run_cell(text, parse_options(f"--ranks 2 {line}"), names)


def test_steps_are_equal() -> None:
    """Random weights, random data, a shuffled loader with a worker, whose last batches are uneven."""
    outcome = verified("--strategy ddp --verify 7", CELL.replace("shuffle=True", "shuffle=True, num_workers=1"))
    assert outcome.state == "succeeded", outcome.error
    [said] = [line for line in outcome.said if "verified" in line]
    assert re.fullmatch(r"verified 7 steps: equal (to \de-(?:[6-9]|1\d)|in every bit)", said), said
    assert len(outcome.names["losses"]) == 12
    assert outcome.printed == ""


def test_a_model_and_an_optimizer_of_the_notebook() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}
    text = "\n".join(line for line in CELL.split("\n") if not line.startswith(("model =", "optimizer =")))
    outcome = verified("--strategy fsdp --verify 20", text, names)
    [said] = [line for line in outcome.said if "verified" in line]
    assert said.startswith("verified 12 steps, all that the cell made: equal "), said


def test_the_first_step_that_differs_is_named() -> None:
    text = CELL.replace("nn.Tanh(), nn.Linear(8, 8)", "Centred(), nn.Linear(8, 8)")
    outcome = verified("--strategy ddp --verify 5 -O trust_model=1", text)
    assert isinstance(outcome.error, TrainingError)
    said = str(outcome.error)
    assert f"--verify: step 1 is not the step of one device: the loss at Cell In[3], line {LINE} is " in said
    assert re.search(r"(on one device|the same); the gradient of 0\.weight differs by [\d.e+]+ % of its norm\n", said)
    assert "optimizer.step()" in outcome.errors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("nn.Tanh()", "nn.Dropout(0.2)"), "the model draws random numbers (dropout, noise)"),
        (
            ("BEFORE = None", "assert os.environ['WORLD_SIZE'] == '2', 'two ranks'"),
            "on one device the cell fails after 0 steps: AssertionError: two ranks",
        ),
        (
            ("losses = []", "losses = []\nif os.environ['WORLD_SIZE'] == '1':\n    raise MemoryError('14 GB')"),
            "on one device there is not enough memory for the whole training: MemoryError: 14 GB",
        ),
        (("optimizer.step()", "pass"), "the cell made no optimizer step"),
        (("BEFORE = None", "import jupyter_torchdist as td\ntd.prepare(model, optimizer)"), "but td.prepare is called"),
    ],
    ids=["dropout", "fails", "memory", "no_step", "prepare"],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(change: tuple[str, str], said: str) -> None:
    outcome = verified("--strategy ddp --verify 3", CELL.replace(*change))
    assert isinstance(outcome.error, StrategyError), outcome.error
    assert said in str(outcome.error)
    assert "leave --verify out" in str(outcome.error)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("line", "ranks"), [("hsdp -O dp_shard=2", 4), ("fsdp -O cpu_offload=1", 2), ("ddp -O zero1=1", 2)]
)
def test_other_strategies(line: str, ranks: int) -> None:
    outcome = run_cell(CELL, parse_options(f"--ranks {ranks} --strategy {line} --verify 12"))
    assert outcome.error is None, outcome.error
    assert [said for said in outcome.said if said.startswith("verified 12 steps: equal ")], outcome.said


# ---------------------------------------------------------------------------------------------------------- one step

TAKEN = Taken(["a", "b"], (Loss("Cell In[1], line 2", 1.0),), [torch.ones(3), torch.zeros(2)], [torch.ones(3)] * 2)


def changed(**fields: Any) -> str | None:
    return compared(Taken(**{**vars(TAKEN), **fields}), TAKEN)[1]


def test_rounding_is_no_difference() -> None:
    assert compared(TAKEN, TAKEN) == (0.0, None)
    near = Taken(TAKEN.names, TAKEN.losses, TAKEN.gradients, [torch.ones(3) * (1 + 1e-6), torch.ones(3)])
    worst, said = compared(near, TAKEN)
    assert said is None
    assert 5e-7 < worst < 2e-6
    noise = [torch.ones(3), torch.full((2,), 1e-7)]  # Adam makes a step of it that is as large as any
    assert changed(gradients=noise, parameters=[torch.ones(3), torch.zeros(3)]) is None


def test_a_difference_has_its_name() -> None:
    assert changed(losses=(Loss("Cell In[1], line 2", 1.1),)) == (
        "the loss at Cell In[1], line 2 is 1.1, and 1 on one device"
    )
    assert "ran at Cell In[1], line 3, and on one device at Cell In[1], line 2" in str(
        changed(losses=(Loss("Cell In[1], line 3", 1.0),))
    )
    assert "ran at no line" in str(changed(losses=()))
    wrong = changed(gradients=[torch.ones(3), torch.full((2,), 0.1)])
    assert str(wrong).startswith("the loss at Cell In[1], line 2 is the same; the gradient of b differs by ")
    assert "a differs by 10 % of its norm after the step" in str(
        changed(parameters=[torch.ones(3) * 1.1, torch.ones(3)])
    )
    assert "b has no gradient" in str(changed(gradients=[torch.ones(3), None]))
    assert changed(parameters=[torch.ones(3), torch.ones(4)]) == "the optimizer trains other parameters"
    odd = torch.tensor([1.0, torch.nan, torch.inf])
    assert "a differs" in str(changed(parameters=[odd, torch.ones(3)]))
    assert compared(Taken(TAKEN.names, (), [odd, None], [odd, odd]), Taken([], (), [odd, None], [odd, odd]))[1] is None


def test_an_end_on_one_device_is_worded() -> None:
    assert _ended(Ended(4)) == "one device makes no more than 4 steps"
    assert _ended(Ended(4, "ValueError: x")) == "on one device the cell fails after 4 steps: ValueError: x"
    assert "not enough memory" in _ended(Ended(0, "OutOfMemoryError: x", full=True))
