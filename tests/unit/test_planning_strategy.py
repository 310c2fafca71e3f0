"""Strategies as asked for: degrees, options, and every contradiction in words."""

from __future__ import annotations

import pytest

from jupyter_torchdist.planning.strategy import plan_strategy
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.plan import Gpu, NodePlan
from jupyter_torchdist.protocol.spec import parse_options
from jupyter_torchdist.protocol.strategy import StrategyPlan

GPUS = (Gpu("GPU-0", 0, "NVIDIA H100", 80 * 1024**3, 0),)


def nodes(*sizes: int) -> tuple[NodePlan, ...]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(
        NodePlan(f"node{index}", tuple(range(start, start + size)))
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )


def planned(line: str, *sizes: int, gpus: tuple[Gpu, ...] = (), fits: bool | None = None) -> StrategyPlan:
    """The strategy of an option line on nodes with ``sizes`` ranks."""
    return plan_strategy(parse_options(line), sum(sizes), nodes(*sizes), gpus, fits=fits)


@pytest.mark.parametrize(
    ("line", "sizes", "degrees"),
    [
        ("--strategy ddp", (4,), {"dp_replicate": 4}),
        ("--strategy fsdp", (4,), {"dp_shard": 4}),
        ("--strategy fsdp", (1,), {}),
        ("--strategy hsdp", (4, 4), {"dp_replicate": 2, "dp_shard": 4}),
        ("--strategy hsdp -O dp_shard=2", (8,), {"dp_replicate": 4, "dp_shard": 2}),
        ("--strategy hsdp -O dp_replicate=2", (8,), {"dp_replicate": 2, "dp_shard": 4}),
        ("--strategy hsdp+tp -O tp=2", (4, 4), {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ("--strategy tp", (4,), {"tp": 4}),
        ("--strategy fsdp+tp -O tp=2", (8,), {"dp_shard": 4, "tp": 2}),
        ("--strategy fsdp+tp -O dp_shard=2", (8,), {"dp_shard": 2, "tp": 4}),
        ("--strategy pp+ddp -O pp=2", (4,), {"pp": 2, "dp_replicate": 2}),
        ("--strategy fsdp+tp+pp -O tp=2 -O pp=2", (8,), {"dp_shard": 2, "tp": 2, "pp": 2}),
        ("--strategy deepspeed", (2,), {"dp_replicate": 2}),
    ],
)
def test_degrees(line: str, sizes: tuple[int, ...], degrees: dict[str, int]) -> None:
    assert planned(line, *sizes).degrees == degrees


def test_without_a_strategy_nothing_is_planned() -> None:
    assert planned("", 2) == planned("--strategy none", 2) == StrategyPlan()


@pytest.mark.parametrize(
    ("line", "sizes", "message", "hint"),
    [
        ("--strategy fsdp+tp -O tp=3", (8,), "fsdp+tp: tp=3 does not divide the 8 ranks", "-O tp=2: dp_shard gets 4"),
        ("--strategy tp -O tp=4", (8,), "tp: tp=4 is not the 8 ranks", "leave -O tp out: it gets 8"),
        (
            "--strategy fsdp+tp -O tp=2 -O dp_shard=2",
            (8,),
            "dp_shard=2 × tp=2 = 4 is not the 8 ranks",
            "-O tp=2: dp_shard gets 4",
        ),
        ("--strategy fsdp+tp", (8,), "how many of them along tp?", "-O tp=2: dp_shard gets 4"),
        ("--strategy fsdp+tp", (2,), "how many of them along tp?", "4 ranks"),
        ("--strategy ddp+fsdp", (2,), "ddp and fsdp both divide the batch", "hsdp"),
        ("--strategy hsdp", (4,), "here is one node", "-O dp_shard=2"),
        ("--strategy hsdp", (4, 2), "node0 has 4, node1 has 2", "-O dp_shard=N"),
        ("--strategy tp", (1,), "this job has one", "--ranks 2"),
        ("--strategy fsdp -O cpu_ofload=1", (2,), "fsdp has no option 'cpu_ofload'", "did you mean -O cpu_offload=…?"),
        ("--strategy ddp -O cpu_offload=1", (2,), "an option of fsdp and hsdp, not of ddp", "--strategy fsdp"),
        ("--strategy fsdp -O sharding_strategy=6", (2,), "expected one of FULL_SHARD", "|1-5"),
        ("--strategy ddp --resume", (2,), "from which checkpoint?", "--checkpoint DIR"),
        ("--precision bf16 --compile", (2,), "--precision, --compile: without a strategy", "--strategy auto"),
    ],
)
def test_contradictions(line: str, sizes: tuple[int, ...], message: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        planned(line, *sizes)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("line", "sizes", "gpus", "fits", "name", "why"),
    [
        ("", (2,), (), None, "ddp", "CPU ranks"),
        ("", (1,), GPUS, None, "ddp", "one rank"),
        ("", (4,), GPUS, True, "ddp", "fits"),
        ("", (4,), GPUS, None, "fsdp", "does not fit as a whole"),
        ("", (4,), GPUS, False, "fsdp", "does not fit"),
        ("", (4, 4), GPUS, False, "hsdp", "between nodes"),
        ("", (4, 2), GPUS, False, "fsdp", "does not fit"),
        ("-O cpu_offload=1", (4,), GPUS, True, "fsdp", "-O cpu_offload"),
        ("-O tp=4", (4,), GPUS, None, "tp", "-O tp"),
    ],
)
def test_auto_says_why(
    line: str, sizes: tuple[int, ...], gpus: tuple[Gpu, ...], fits: bool | None, name: str, why: str
) -> None:
    plan = planned(f"--strategy auto {line}", *sizes, gpus=gpus, fits=fits)
    assert plan.name == name
    assert why in plan.notes[0]


def test_what_is_set_is_converted_and_what_is_not_is_absent() -> None:
    plan = planned("--strategy fsdp -O sharding-strategy=2 -O min_num_params=1e6 -O cpu_offload=1 --precision bf16", 2)
    assert plan.options == {"sharding_strategy": "SHARD_GRAD_OP", "min_num_params": 1_000_000, "cpu_offload": True}
    assert plan.precision == "bf16"
