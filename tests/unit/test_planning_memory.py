"""What a rank needs by hand, and the words for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_torchdist.planning.memory import judge, need, replicated, with_checkpointing
from jupyter_torchdist.planning.topology import make_plan
from jupyter_torchdist.protocol.memory import ParameterSize, Rehearsed, elements
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.plan import Gpu, Inventory, Plan, open_gpu
from jupyter_torchdist.protocol.spec import JobSpec
from jupyter_torchdist.protocol.strategy import StrategyPlan
from jupyter_torchdist.views import plan_tables

GB = 10**9


def adam(*shape: int, sharded: bool = True, trained: bool = True) -> ParameterSize:
    """fp32, with two moments and a step of 4 bytes."""
    state = (8, 4) if trained else (0, 0)
    return ParameterSize(shape, 4, trained, sharded and bool(shape), *state)


def found(*parameters: ParameterSize, working: int | None = 1000, batch: int = 7) -> Rehearsed:
    return Rehearsed(parameters, buffers=40, batch=batch, activations=500, working=working)


def test_shards_are_cut_along_the_first_dimension_and_padded() -> None:
    assert [elements((10, 3), ranks) for ranks in (1, 2, 4, 8, 1024)] == [30, 15, 9, 6, 3]
    assert elements((), 8) == 1


@pytest.mark.parametrize(
    ("degrees", "rows"),
    [
        ({"dp_replicate": 2}, 10),
        ({"dp_shard": 2}, 5),
        ({"dp_shard": 8}, 2),
        ({"dp_shard": 1024}, 1),
        ({"dp_replicate": 128, "dp_shard": 8}, 2),
    ],
)
def test_states_by_hand(degrees: dict[str, int], rows: int) -> None:
    parts = (adam(10, 3, sharded="dp_shard" in degrees), adam(), adam(6, sharded="dp_shard" in degrees, trained=False))
    frozen = elements((6,), degrees.get("dp_shard", 1)) * 4
    wanted = need(found(*parts), StrategyPlan("x", degrees))
    assert wanted.parameters == rows * 3 * 4 + 4 + frozen
    assert wanted.gradients == rows * 3 * 4 + 4
    assert wanted.optimizer == rows * 3 * 8 + 4 + 8 + 4
    assert wanted.peak == wanted.parameters + wanted.optimizer + 40 + 7 + 1000
    assert wanted.building == (30 + 1 + 6) * 4 + 40


def test_zero1_deals_out_whole_parameters() -> None:
    parts = [adam(100, sharded=False), adam(60, sharded=False), adam(60, sharded=False)]
    plan = StrategyPlan("ddp", {"dp_replicate": 2}, {"zero1": True})
    assert need(found(*parts), plan).optimizer == 2 * (60 * 8 + 4)
    assert need(found(*parts), replace(plan, options={})).optimizer == 220 * 8 + 3 * 4


def plan_of(line: str, inventory: Inventory) -> Plan:
    return make_plan(JobSpec("j", "cell", "", "", 1, parse_options(line), 0.0), [inventory])


def machine(memory: int = 0, *gpus: int) -> Inventory:
    named = tuple(Gpu(f"GPU-{index}", index, "H100", size, 0) for index, size in enumerate(gpus))
    return Inventory("box", 8, memory, named)


LARGE = found(adam(10**9), working=75 * GB)
"""With its optimizer state and itself 91 GB: 4 + 8 of it, working 75, and what 4 GB of a batch are."""


def test_verdict_on_gpus() -> None:
    inventory = machine(0, 80 * GB, 80 * GB)
    plan = plan_of("--gpus 2 --strategy ddp", inventory)
    large = replace(LARGE, parameters=(adam(10**9, sharded=False),), batch=4 * GB)
    judged = judge(large, plan, inventory)
    assert judged.fits is False
    assert judged.verdict == "does not fit: 91 of 80 GB (each H100)"
    lighter = replace(large, working=46 * GB)
    assert judge(large, plan, inventory, lighter).verdict.endswith("; with activation checkpointing 62")
    assert judge(lighter, plan, inventory).verdict == "fits: 62 of 80 GB (each H100)"


def test_no_verdict_on_nodes_that_the_launcher_has_not_given() -> None:
    inventory = replace(machine(0), gpus=(open_gpu(0), open_gpu(1)))
    plan = plan_of("--gpus 2 --strategy ddp", inventory)
    assert judge(LARGE, plan, inventory).fits is None
    assert "what the nodes have is not known" in judge(LARGE, plan, inventory).verdict
    here = machine(8 * GB)
    batch = replace(plan_of("--ranks 2 --strategy ddp", here), request="#!/bin/sh")
    assert judge(LARGE, batch, here).fits is None


def test_verdict_on_this_machine_counts_all_its_ranks() -> None:
    inventory = machine(8 * GB)
    plan = plan_of("--ranks 4 --strategy ddp", inventory)
    judged = judge(found(adam(10**6, sharded=False), working=3 * GB), plan, inventory)
    assert (judged.room, judged.fits) == (2 * GB, False)
    assert "a rank's part of 8.0 GB free on box" in judged.verdict


def test_more_ranks_than_this_machine_runs_are_planned_without_a_verdict() -> None:
    inventory = machine(8 * GB)
    plan = plan_of("--ranks 1024 --strategy fsdp --plan", inventory)
    assert plan.world_size == 1024
    judged = judge(found(adam(2048, 1000)), plan, inventory)
    assert judged.fits is None
    assert "so many ranks do not run on box" in judged.verdict


def test_what_was_not_rehearsed_may_still_not_fit() -> None:
    inventory = machine(0, GB, GB)
    plan = plan_of("--gpus 2 --strategy ddp", inventory)
    part = Rehearsed((adam(10**9, sharded=False),), reason="it reads a number of a tensor (int64), line 3")
    judged = judge(part, plan, inventory)
    assert judged.verdict == "does not fit: at least 16 of 1.0 GB (each H100)"
    text = plan_tables.memory_table(judged)
    assert "note: not rehearsed: it reads a number of a tensor (int64), line 3" in text
    assert "not known" in text
    assert "at least 16 GB" in text
    small = replace(part, parameters=(adam(10**3, sharded=False),))
    assert judge(small, plan, inventory).fits is None


def test_what_divides_further_is_no_reason_to_refuse() -> None:
    small = machine(0, *[GB] * 4)
    plan = plan_of("--gpus 4 --strategy ddp", small)
    judged = judge(LARGE, replace(plan, strategy=replace(plan.strategy, name="deepspeed")), small)
    assert "deepspeed not counted: it divides what stands here further" in judged.notes
    assert judged.fits is None
    assert "at most" in judged.verdict


def test_what_waits_in_host_memory_is_not_in_the_peak() -> None:
    inventory = machine(0, *[80 * GB] * 4)
    plan = plan_of("--gpus 4 --strategy fsdp -O cpu_offload=1", inventory)
    judged = judge(replace(LARGE, offloaded=True), plan, inventory)
    assert judged.need.peak == 75 * GB + LARGE.batch + LARGE.buffers
    assert "cpu_offload: 4.0 GB a rank wait in host memory, not counted in the peak" in judged.notes
    unknown = judge(replace(LARGE, offloaded=True, working=None), plan, inventory)
    assert unknown.need.least == LARGE.buffers


def test_what_tp_splits_is_whole_at_first_and_so_are_other_stages() -> None:
    parts = (replace(adam(10, 3, sharded=False), split=2), adam(6, sharded=False))
    split = need(replace(found(*parts), trying=50), StrategyPlan("tp", {"tp": 2}))
    assert split.parameters == (30 + 6) * 4
    assert split.building == (60 + 6) * 4 + 40 + 50
    staged = need(replace(found(*parts), elsewhere=1000), StrategyPlan("pp", {"pp": 2}))
    assert staged.building == (60 + 6) * 4 + 40 + 1000


def test_auto_asks_for_a_copy_a_rank() -> None:
    inventory = machine(0, *[80 * GB] * 4)
    plan = plan_of("--gpus 4 --strategy auto", inventory)
    assert plan.strategy.name == "fsdp"
    asked = replicated(plan).strategy
    assert (asked.name, asked.degrees) == ("ddp", {"dp_replicate": 4})
    spec = JobSpec("j", "cell", "", "", 1, parse_options("--gpus 4 --strategy auto"), 0.0)
    assert make_plan(spec, [inventory], fits=lambda plan: True).strategy.name == "ddp"
    assert make_plan(spec, [inventory], fits=lambda plan: False).strategy.name == "fsdp"
    assert with_checkpointing(asked).activation_checkpointing


def test_what_a_rehearsal_says_travels_as_json() -> None:
    said = replace(found(adam(3, 4), adam()), notes=("one",), reason="why", samples=4)
    assert Rehearsed.from_json(said.to_json()) == said
