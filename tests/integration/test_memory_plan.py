"""What ``--plan`` says of memory: by a rehearsal, beside what real ranks allocate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jupyter_torchdist import views
from jupyter_torchdist.client.submit import Request, prepare, submit
from jupyter_torchdist.planning.memory import need
from jupyter_torchdist.protocol.spec import parse_options
from jupyter_torchdist.protocol.strategy import StrategyPlan
from tests.memory import MODEL, Cell, gpt

pytestmark = pytest.mark.strategies

LAYERS = 2
PARAMETERS = 500 * 128 * 2 + LAYERS * (2 * 128 + 3 * 128 * 129 + 4 * 128 * 129 + 128 * 513)

MEASURED = """
import os, sys, time

Work = sys.modules["torch.distributed"].Work

def gloo_runs():
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{{thread}}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(") ")
        except OSError:  # it has ended
            continue
        if name.startswith("pt_gloo_run") and rest.startswith("R"):
            return True
    return False

def wait_until_gloo_rests(work, *arguments, wait=Work.wait):
    found = wait(work, *arguments)
    while gloo_runs():
        time.sleep(0)
    return found

Work.wait = wait_until_gloo_rests
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
profiler.start()
{loop}
profiler.stop()
found, events = [], list(profiler.profiler.kineto_results.experimental_event_tree())
while events:
    event = events.pop()
    events += event.children
    if event.tag == torch._C._profiler._EventType.Allocation:
        found.append((event.start_time_ns, event.extra_fields.alloc_size))
now = peak = 0
for _, size in sorted(found):
    now += size
    peak = max(peak, now)
del profiler, events, event, found
"""
"""The allocator's own account: torch's profiler is told by it of every block, workspaces of kernels too.

It is not told of what Gloo's threads let go of, as they do where they are slower than the thread that waited for them:
here that one holds what was sent until they rest.
"""


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
        assert "16 samples is less than 1024 ranks" in found.notes[0]
        hybrid = StrategyPlan("hsdp", {"dp_replicate": 4, "dp_shard": 4})
        assert need(rehearse(hybrid), hybrid).parameters == PARAMETERS


@pytest.mark.parametrize(
    "line", [pytest.param("--ranks 1 --strategy ddp", marks=pytest.mark.soak), "--ranks 2 --strategy fsdp"]
)
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
    assert planned.need.peak == pytest.approx(names["peak"], rel=0.1)
    assert planned.fits is True
    assert f"peak             {views.size(planned.need.peak or 0)}" in views.memory_table(planned)


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
