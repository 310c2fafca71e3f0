"""What ``--plan`` says of memory: by a rehearsal, beside what real ranks allocate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jupyter_torchdist.client.submit import Request, prepare, submit
from jupyter_torchdist.planning.memory import need
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.strategy import StrategyPlan
from jupyter_torchdist.views import plan_tables, wording
from tests.memory import MEASURED, MODEL, Cell, gpt
from tests.nvml import compiled

pytestmark = pytest.mark.strategies

LAYERS = 2
PARAMETERS = 500 * 128 * 2 + LAYERS * (2 * 128 + 3 * 128 * 129 + 4 * 128 * 129 + 128 * 513)


def test_strategies_and_worlds(tmp_path: Path) -> None:
    ddp, fsdp = StrategyPlan("ddp", {"dp_replicate": 2}), StrategyPlan("fsdp", {"dp_shard": 2})
    with Cell(gpt(layers=LAYERS), tmp_path) as rehearse:
        copies = rehearse(ddp)
        assert (copies.reason, copies.samples) == ("", 16)
        whole = need(copies, ddp)
        assert whole.parameters == whole.gradients == 4 * PARAMETERS
        assert 0 <= whole.optimizer - 8 * PARAMETERS < 1000  # and a step for each parameter
        shards = need(rehearse(fsdp), fsdp)
        assert shards.parameters == shards.gradients == 2 * PARAMETERS
        zero2 = StrategyPlan("fsdp", {"dp_shard": 2}, {"sharding_strategy": "SHARD_GRAD_OP"})
        kept = need(rehearse(zero2), zero2)
        assert kept.parameters == shards.parameters
        assert kept.peak is not None and shards.peak is not None and whole.peak is not None
        assert shards.peak < kept.peak < whole.peak
        light = StrategyPlan("fsdp", {"dp_shard": 2}, activation_checkpointing=True)
        assert shards.activations is not None
        assert (need(rehearse(light), light).activations or 0) < 0.6 * shards.activations
        half = StrategyPlan("fsdp", {"dp_shard": 2}, precision="bf16")
        assert (need(rehearse(half), half).activations or 0) < 0.8 * shards.activations
        parts = StrategyPlan("fsdp", {"dp_shard": 2}, {"batch": "slices"})  # without the other ranks' outputs
        sliced = need(rehearse(parts), parts)
        assert (sliced.activations or 0) < shards.activations and (sliced.peak or 0) < shards.peak
        many = StrategyPlan("fsdp", {"dp_shard": 1024})
        found = rehearse(many)
        assert need(found, many).parameters == sum(
            4 * -(-one.shape[0] // 1024) * one.shape[1] if len(one.shape) > 1 else 4 for one in found.parameters
        )
        assert "a batch has 16 samples for 1024 ranks" in found.notes[0]
        hybrid = StrategyPlan("hsdp", {"dp_replicate": 4, "dp_shard": 4})
        assert need(rehearse(hybrid), hybrid).parameters == PARAMETERS


def test_before_its_first_step(tmp_path: Path) -> None:
    """A rank has the whole model and tries it, unless it is built within ``td.meta``."""
    tp, pp = StrategyPlan("tp", {"tp": 2}), StrategyPlan("pp", {"pp": 2})
    source = gpt(layers=LAYERS)
    with Cell(source, tmp_path / "whole") as rehearse:
        split, staged = rehearse(tp), rehearse(pp)
        for plan, found in ((tp, split), (pp, staged)):
            wanted = need(found, plan)
            assert wanted.parameters < 0.7 * 4 * PARAMETERS
            assert wanted.building == 4 * PARAMETERS + found.trying and found.trying > 0
        assert staged.elsewhere == 4 * PARAMETERS - need(staged, pp).parameters
        assert "of pp needs the most" in staged.notes[0]
    aside = "import jupyter_torchdist as td\nwith td.meta():\n    model = GPT("
    with Cell(source.replace("model = GPT(", aside), tmp_path / "outlined") as rehearse:
        wanted = need(rehearse(tp), tp)
    assert wanted.building == 0
    assert wanted.peak == need(split, tp).peak


def test_what_is_offloaded_is_not_on_the_gpu(tmp_path: Path) -> None:
    here = StrategyPlan("fsdp", {"dp_shard": 2})
    away = StrategyPlan("fsdp", {"dp_shard": 2}, {"cpu_offload": True})
    with Cell(gpt(layers=LAYERS), tmp_path, gpus=True) as rehearse:
        kept, waiting = need(rehearse(here), here), need(rehearse(away), away)
    assert (waiting.parameters, waiting.gradients, waiting.optimizer) == (
        kept.parameters,
        kept.gradients,
        kept.optimizer,
    )
    assert kept.peak is not None and waiting.peak is not None
    assert waiting.peak <= kept.peak - kept.parameters - kept.optimizer


SOME = ("--ranks 2 --strategy fsdp", "--ranks 2 --strategy tp", "--ranks 2 --strategy pp")
MORE = (
    "--ranks 1 --strategy ddp",
    "--ranks 2 --strategy ddp -O zero1=1",
    "--ranks 2 --strategy cp",
    "--ranks 2 --strategy ddp --grad-accumulation 4",
    "--ranks 2 --strategy fsdp --grad-accumulation 4",
    "--ranks 4 --strategy fsdp+tp -O tp=2",
    "--ranks 4 --strategy ddp+tp -O tp=2",
    "--ranks 4 --strategy ddp+pp -O pp=2",
    "--ranks 2 --strategy pp -O microbatches=8",
    "--ranks 2 --strategy pp -O microbatches=8 -O schedule=1f1b",
    "--ranks 2 --strategy pp -O microbatches=4 -O schedule=interleaved_1f1b",
    "--ranks 2 --strategy pp -O microbatches=8 -O schedule=interleaved_1f1b",
    "--ranks 2 --strategy pp -O microbatches=4 -O schedule=looped_bfs",
    "--ranks 2 --strategy pp -O microbatches=4 -O schedule=interleaved_zero_bubble",
    "--ranks 2 --strategy pp -O microbatches=8 -O schedule=interleaved_zero_bubble",
    "--ranks 4 --strategy pp -O microbatches=8 -O schedule=1f1b",
    "--ranks 2 --strategy pp -O microbatches=4 -O schedule=zbv",
    "--ranks 2 --strategy pp -O microbatches=8 -O schedule=zbv",
    "--ranks 2 --strategy pp -O microbatches=8 -O schedule=dualpipev",
    "--ranks 2 --strategy pp --precision bf16",
)


@pytest.mark.parametrize("line", [*SOME, *(pytest.param(line, marks=pytest.mark.soak) for line in MORE)])
def test_the_peak_is_what_ranks_allocate(home: Path, line: str) -> None:
    source = gpt(width=64, length=129)
    model, loop = source[: len(MODEL)], source[len(MODEL) :]
    planned = prepare(Request(source=source, options=parse_options(f"{line} --plan"))).memory()
    assert planned is not None
    job = submit(Request(source=model + MEASURED.format(loop=loop), options=parse_options(line)))
    job.wait(120)
    job.raise_for_state()
    names: dict[str, Any] = {}
    job.bring(names)
    peaks = names["peaks"]
    assert planned.need.peak == pytest.approx(max(peak["later"] for peak in peaks), rel=0.1), peaks
    if line in SOME:  # with less for a rank to compute, the trial of so small a model takes more than its steps
        first = max(planned.need.peak or 0, planned.need.building)
        assert first == pytest.approx(max(peak["first"] for peak in peaks), rel=0.1), peaks
    assert planned.fits is True
    assert f"peak             {wording.size(planned.need.peak or 0)}" in plan_tables.memory_table(planned)


BEGIN = "import torch\nmodel = torch.nn.Linear(10, 10)\nopt = torch.optim.Adam(model.parameters())\n"
STEP = "model(torch.randn(4, 10)).sum().backward()\nopt.step()\n"
READS = "n = torch.randint(0, 9, ()).item()\n"
WRITES = "try:\n    open('written', 'w')\nexcept OSError:\n    pass\n"


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (READS, "it reads a number of a tensor (int64), line 4"),
        (WRITES, "it writes the file"),
        pytest.param("raise ValueError('no data')\n", "ValueError: no data, line 4", marks=pytest.mark.soak),
    ],
)
def test_a_cell_that_cannot_be_rehearsed(tmp_path: Path, middle: str, reason: str) -> None:
    plan = StrategyPlan("ddp", {"dp_replicate": 2})
    written = tmp_path / "written"
    with Cell(BEGIN + middle.replace("'written'", repr(str(written))) + STEP, tmp_path) as rehearse:
        found = rehearse(plan)
    assert reason in found.reason
    wanted = need(found, plan)
    assert (wanted.parameters, wanted.gradients, wanted.optimizer) == (440, 440, 888)
    assert wanted.peak is None
    assert not written.exists()


def test_what_was_captured_is_rehearsed_and_stays_as_it_was(tmp_path: Path) -> None:
    first = nn.Linear(10, 20)
    model = nn.Sequential(first, nn.BatchNorm1d(20), nn.Linear(20, 1))
    before = first.weight.clone()
    names = {"model": model, "x": torch.randn(8, 10)}
    source = "import torch\nopt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)\n"
    source += "for _ in range(3):\n    opt.zero_grad()\n    model(x.to('cuda:0')).mean().backward()\n    opt.step()\n"
    with Cell(source, tmp_path, names, gpus=True) as rehearse:
        found = rehearse(StrategyPlan("ddp", {"dp_replicate": 2}))
    wanted = need(found, StrategyPlan("ddp", {"dp_replicate": 2}))
    assert found.reason == ""
    assert wanted.parameters == wanted.optimizer == 4 * (220 + 40 + 21)
    assert wanted.buffers == 2 * 20 * 4 + 8
    assert torch.equal(first.weight, before)


CHOSEN = """
import sys
from pathlib import Path
from jupyter_torchdist.client.submit import Request, prepare
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.spec import Options

options = Options(gpus=2, strategy="auto")
plan = prepare(Request(sys.stdin.read(), "Cell In[1]", 1, options, {}), Home(Path(sys.argv[1]))).plan
print(plan.strategy.name, plan.strategy.degrees, *plan.strategy.notes)
"""


@pytest.mark.parametrize(
    ("megabytes", "chosen", "why"),
    [
        (80 << 10, "ddp", "the model, its gradients and optimizer state fit on each rank"),
        (25, "fsdp", "the model, its gradients and optimizer state do not fit on one rank"),
    ],
)
def test_auto_chooses_by_whether_a_gpu_holds_a_whole_copy(
    home: Path, tmp_path: Path, megabytes: int, chosen: str, why: str
) -> None:
    """In a process of its own, which keeps the NVML that it has loaded. The cell needs 36 MB a rank."""
    environ = {**os.environ, "TORCHDIST_NVML": str(compiled(tmp_path, TOTAL=megabytes))}
    done = subprocess.run(
        [sys.executable, "-c", CHOSEN, home], env=environ, input=gpt(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{chosen} ")
    assert f"auto chose {chosen}: {why}" in done.stdout
