"""Cells that were once wrong in silence: what keeps them right, what refuses them, and that each advice works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.spec import Options

from .expected import SAME, Equal, Refused, expected
from .running import Outcome, all_cells, run_alone, run_cell, text_of
from .test_cells import STRATEGIES
from .traces import differences, trace

pytestmark = pytest.mark.strategies


def run(cell: str, strategy: str, *options: str, ranks: int = 2) -> Outcome:
    return run_cell(text_of(cell), Options(ranks=ranks, strategy=strategy, option=options))


def check_as_alone(outcome: Outcome, cell: str) -> None:
    assert outcome.error is None, f"{outcome.error!r}\n{outcome.printed}\n{outcome.errors}"
    wanted, found = run_alone({cell: text_of(cell)})[cell], trace(outcome.names, outcome.printed)
    how = expected(cell, "ddp")
    equal = how if isinstance(how, Equal) else SAME
    off = differences(found, wanted, equal.tolerance, equal.leave_out)
    assert not off, "\n".join(sorted(off)[:12])


def followed(advice: str) -> list[tuple[str, ...]]:
    """The strategies and options that a hint names; an option alone goes with the strategy that was refused."""
    found: list[tuple[str, ...]] = [("", "model=whole")] if "-O model=whole" in advice else []
    return found + [(name,) for name in re.findall(r"--strategy (ddp|fsdp)", advice)]


def refused() -> list[object]:
    """Every cell that is refused, with each strategy."""
    cells = [(cell, strategy) for cell in all_cells() for strategy in STRATEGIES]
    return [pytest.param(*one, marks=pytest.mark.soak) for one in cells if isinstance(expected(*one), Refused)]


@pytest.mark.parametrize(("cell", "strategy"), [("gcn_adjacency", "ddp"), ("bayes_early_stop", "ddp"), *refused()])
def test_the_advice_of_a_refusal_gives_what_one_device_gives(cell: str, strategy: str) -> None:
    outcome = run(cell, strategy)
    words = outcome.refusal
    assert words
    for _ in range(3):  # an advice may be refused with better advice
        advice = followed(words)
        if not advice:
            return
        name, *options = advice[0]
        outcome = run(cell, name or strategy, *options)
        if not outcome.refusal:
            check_as_alone(outcome, cell)
            return
        strategy, words = name or strategy, outcome.refusal
    raise AssertionError(f"no advice helped: {words}")


@pytest.mark.parametrize(
    ("cell", "strategy", "options", "ranks"),
    [
        ("max_norm_in_forward", "fsdp", ("model=whole",), 2),
        pytest.param("max_norm_in_forward", "hsdp", ("dp_shard=2",), 4, marks=pytest.mark.soak),
        pytest.param("max_norm_in_forward", "pp", (), 2, marks=pytest.mark.soak),
        pytest.param("ema_in_forward_assign", "fsdp", ("model=whole",), 2, marks=pytest.mark.soak),
        pytest.param("vq_vae_ema", "ddp", ("model=whole",), 2, marks=pytest.mark.soak),
        ("iterators_in_forward", "fsdp", ("model=whole",), 2),
    ],
)
def test_what_a_forward_changes_is_one_devices(cell: str, strategy: str, options: tuple[str, ...], ranks: int) -> None:
    check_as_alone(run(cell, strategy, *options, ranks=ranks), cell)


def test_a_pipeline_tells_of_tensors_that_share_memory_with_its_parameters() -> None:
    outcome = run("weights_kept_aside", "pp")
    told = "pp gives parameters other memory than theta, first, row: what is there stays as it is now"
    assert outcome.error is None and any(one.startswith(told) for one in outcome.said), outcome.said


@pytest.mark.parametrize(
    ("cell", "strategy", "options", "words"),
    [
        ("ema_in_forward_assign", "pp", (), "changes its parameter target"),
        ("shrink_perturb", "pp", (), "line 19 reads numbers from parameters of Sequential"),
        pytest.param(
            *("vq_vae_ema", "fsdp", ("model=whole",), "puts a new nn.Parameter in place of vq.e"),
            marks=pytest.mark.soak,
        ),
        pytest.param("embedding_max_norm", "ddp", (), "writes its parameter 0.weight", marks=pytest.mark.soak),
        pytest.param("embedding_max_norm", "fsdp", (), "writes its parameter 0.weight", marks=pytest.mark.soak),
    ],
)
def test_what_would_be_lost_is_refused(cell: str, strategy: str, options: tuple[str, ...], words: str) -> None:
    outcome = run(cell, strategy, *options)
    assert words in outcome.refusal, (outcome.error, outcome.printed, outcome.errors)


SAVING = """
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with open(log, "a") as file:
        print(step, file=file)
"""


def test_a_file_that_every_rank_writes_is_told_once(tmp_path: Path) -> None:
    names = {"log": str(tmp_path / "log.csv")}
    outcome = run_cell(SAVING, Options(ranks=2, strategy="ddp"), names)
    assert outcome.error is None, outcome.error
    told = [line for line in outcome.said if "log.csv" in line]
    assert len(told) == 1
    assert "line 12 opens log.csv for writing, and each of the 2 ranks does so" in told[0]


def test_a_log_file_that_every_rank_opens_is_told(tmp_path: Path) -> None:
    """Each line would be in it once for each rank."""
    text = "import logging\nhandler = logging.FileHandler(log)\nhandler.close()\ndel handler\n"
    outcome = run_cell(text, Options(ranks=2, strategy="ddp"), {"log": str(tmp_path / "train.log")})
    assert outcome.error is None, outcome.error
    assert any("line 3 opens train.log for writing, and each of the 2 ranks does so" in line for line in outcome.said)


def test_a_search_without_gradients_is_told_that_it_is_not_distributed() -> None:
    text = "import torch\nbest = max(torch.nn.Linear(2, 1)(torch.ones(2)).item() for _ in range(3))\n"
    outcome = run_cell(text, Options(ranks=2, strategy="ddp"))
    assert any("the cell calls no backward()" in line for line in outcome.said), outcome.said


ATTRIBUTES = """
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for name, parameter in model.named_parameters():
    parameter.scale = 0.5 if "bias" in name else 1.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(3):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad *= parameter.scale
        parameter.steps = step
    optimizer.step()
    losses.append(loss.item())
kept = [(parameter.scale, parameter.steps) for parameter in model.parameters()]
"""


def test_attributes_of_parameters_stay() -> None:
    outcome = run_cell(ATTRIBUTES, Options(ranks=2, strategy="fsdp"))
    assert outcome.error is None, outcome.error
    assert outcome.names["kept"] == [(1.0, 2), (0.5, 2)] * 2
    assert [vars(one) for one in outcome.names["model"].parameters()] == [
        {"scale": scale, "steps": 2} for scale in (1.0, 0.5, 1.0, 0.5)
    ]


_MISTAKE = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(15, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(12, 8)).square().mean().backward()
optimizer.step()
"""


def test_a_mistake_in_the_model_raises_what_it_raises_on_one_device() -> None:
    error = run_cell(_MISTAKE, Options(ranks=2, strategy="ddp")).error
    assert error is not None and "mat1 and mat2 shapes cannot be multiplied (12x16 and 15x3)" in str(error)
    assert "cannot be divided" not in str(error)
