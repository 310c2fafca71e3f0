"""Strategies as asked for: degrees, options, and every contradiction in words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.planning.strategy import plan_strategy
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.options.help import help_text
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.options.strategy import (
    BY_NAME,
    REFUSED,
    STRATEGY_OPTIONS,
    StrategyOption,
    options_of,
    strategy_help,
)
from jupyter_torchdist.protocol.plan import Gpu, NodePlan
from jupyter_torchdist.protocol.spec import options_help
from jupyter_torchdist.protocol.strategy import DIMENSIONS, NAMES, StrategyPlan
from jupyter_torchdist.views.plan_tables import strategy_lines

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
        ("--strategy fsdp -O sharding_strategy=3", (4,), {"dp_replicate": 4}),
        ("--strategy fsdp -O sharding_strategy=HYBRID_SHARD", (2, 2), {"dp_replicate": 2, "dp_shard": 2}),
        ("--strategy fsdp -O sharding_strategy=5", (4,), {"dp_shard": 4}),
        ("--strategy fsdp -O sharding_strategy=4 -O dp_shard=2", (4,), {"dp_replicate": 2, "dp_shard": 2}),
        ("--strategy deepspeed -O config={}", (2,), {"dp_replicate": 2}),
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
        ("--strategy fsdp+tp", (8,), "the number of ranks along tp is missing", "-O tp=2: dp_shard gets 4"),
        ("--strategy fsdp+tp", (2,), "the number of ranks along tp is missing", "4 ranks"),
        ("--strategy ddp+fsdp", (2,), "ddp and fsdp both divide the batch", "hsdp"),
        ("--strategy hsdp", (4,), "but this job has one node", "-O dp_shard=2: dp_replicate gets 2"),
        ("--strategy hsdp", (9,), "but this job has one node", "-O dp_shard=3: dp_replicate gets 3"),
        ("--strategy hsdp", (7,), "but this job has one node", "for example 4 ranks), or use --strategy fsdp"),
        (
            "--strategy hsdp+tp",
            (8,),
            "but this job has one node",
            "-O tp=2: dp_replicate gets 2), or use --strategy fsdp+tp",
        ),
        ("--strategy hsdp", (4, 2), "node0 has 4, node1 has 2", "-O dp_shard=N"),
        ("--strategy tp", (1,), "this job has one", "--ranks 2"),
        ("--strategy dpp", (2,), "did you mean ddp?", "--strategy NAME"),
        ("--strategy fdp", (2,), "did you mean fsdp?", "--strategy NAME"),
        ("--strategy fsdp -O cpu_ofload=1", (2,), "fsdp has no option 'cpu_ofload'", "did you mean -O cpu_offload=…?"),
        ("--strategy ddp -O cpu_offload=1", (2,), "an option of fsdp and hsdp, not of ddp", "--strategy fsdp"),
        ("--strategy fsdp -O sharding_strategy=6", (2,), "expected one of FULL_SHARD", "|1-5"),
        ("--strategy ddp --resume", (2,), "--resume needs a directory with checkpoints", "--checkpoint DIR"),
        (
            "--strategy hsdp -O sharding_strategy=1 -O dp_shard=2",
            (4,),
            "--strategy hsdp and -O sharding_strategy=FULL_SHARD contradict",
            "HYBRID_SHARD",
        ),
        ("--strategy fsdp -O dp_replicate=2", (4,), "-O dp_replicate contradict each other", "--strategy hsdp"),
        ("--strategy fsdp -O sharding_strategy=3 -O dp_shard=2", (4,), "NO_SHARD and -O dp_shard contradict", "hsdp"),
        (
            "--strategy fsdp -O sharding_strategy=2 -O reshard_after_forward=1",
            (2,),
            "SHARD_GRAD_OP and -O reshard_after_forward=1 contradict",
            "keep one",
        ),
        ("--strategy fsdp -O reshard_after_forward=4", (4,), "groups of 4 do not divide the 4 ranks", "divisor of 4"),
        ("--strategy fsdp -O reshard_after_forward=3", (4,), "groups of 3 do not divide the 4 ranks", "divisor of 4"),
        (
            "--strategy fsdp -O cpu_ram_efficient_loading=1 -O sync_module_states=0",
            (2,),
            "-O cpu_ram_efficient_loading needs -O sync_module_states=1: other ranks get their weights from rank 0",
            "sync_module_states=0 out",
        ),
        (
            "--strategy fsdp -O auto_wrap_policy=SIZE_BASED_WRAP -O transformer_layer_cls_to_wrap=Block",
            (2,),
            "-O transformer_layer_cls_to_wrap and -O auto_wrap_policy=SIZE_BASED_WRAP contradict",
            "TRANSFORMER_BASED_WRAP",
        ),
        (
            "--strategy fsdp -O min_num_params=100 -O transformer_layer_cls_to_wrap=Block",
            (2,),
            "-O transformer_layer_cls_to_wrap and -O min_num_params contradict",
            "keep one",
        ),
        (
            "--strategy ddp -O nonfinite=ignore",
            (2,),
            "expected one of go-on, stop, skip",
            "-O nonfinite=go-on|stop|skip",
        ),
        ("--strategy ddp+pp -O pp=2 --verify 3", (4,), "--verify and --strategy pp", "leave one of the two out"),
        ("--strategy ddp --precision bf16 --verify 3", (2,), "one device would compute in fp32", "leave one"),
        ("--strategy ddp -O comm_hook=fp16 --verify 3", (2,), "--verify and -O comm_hook=fp16", "leave one"),
        ("--strategy ddp --checkpoint c --resume --verify 3", (2,), "--verify and --resume", "leave one"),
        ("--verify 3", (2,), "--verify works only with a strategy", "add --strategy auto"),
        ("--strategy fsdp -O nonfinite=skp", (2,), "did you mean skip?", "-O nonfinite="),
        ("--strategy deepspeed -O nonfinite=skip", (2,), "-O nonfinite is an option of ddp", "--strategy ddp"),
        ("--strategy ddp -O comm_hook=batched_powersgd", (2,), "one of none, fp16, bf16, powersgd", "-O comm_hook="),
        (
            "--strategy ddp -O trust_loss=1 -O loss=sum",
            (2,),
            "-O trust_loss says that the loss is a mean, and -O loss=sum that it is a sum",
            "trust_loss out",
        ),
        (
            "--strategy ddp -O checkpoint_steps=5",
            (2,),
            "-O checkpoint_steps needs a directory for checkpoints",
            "--checkpoint DIR",
        ),
        (
            "--strategy pp -O schedule=1f1b -O microbatches=2",
            (4,),
            "at least as many microbatches as stages: 4, not 2",
            "microbatches=4",
        ),
        (
            "--strategy pp -O schedule=dualpipev",
            (2,),
            "dualpipev needs at least as many microbatches as stages: 4, not 2",
            "-O microbatches=4",
        ),
        (
            "--strategy pp -O schedule=interleaved_1f1b -O microbatches=5",
            (2,),
            "5 cannot be divided into 2 equal rounds",
            "microbatches=4",
        ),
        ("--strategy pp -O schedule=zbv -O balance=1,2", (2,), "2 parts for 2 ranks along pp (zbv)", "4 numbers"),
        ("--strategy pp -O balance=1,2,3", (2,), "3 parts for 2 ranks along pp", "2 numbers"),
        ("--strategy pp -O balance=fast", (2,), "one of cost, parameters, manual", "-O balance="),
        ("--strategy tp -O tp_plan=a:sideways", (2,), "STYLE is one of colwise", "-O tp_plan="),
        ("--strategy deepspeed", (2,), "--strategy deepspeed needs a configuration", "--config ds.json"),
        ("--strategy deepspeed -O config=3", (2,), "expected a JSON object", "-O config=JSON"),
        ("--strategy deepspeed -O tp=2", (2,), "an option of tp, not of deepspeed", "--strategy tp"),
        ("--precision bf16 --compile", (2,), "--precision, --compile works only with a strategy", "--strategy auto"),
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
        ("", (2,), (), None, "ddp", "the ranks are on CPUs, whose memory is not checked"),
        ("", (1,), GPUS, None, "ddp", "one rank"),
        ("", (4,), GPUS, True, "ddp", "the model, its gradients and optimizer state fit on each rank"),
        ("", (4,), GPUS, None, "fsdp", "it trains models that do not fit on one rank"),
        ("", (4,), GPUS, False, "fsdp", "optimizer state do not fit on one rank"),
        ("", (4, 4), GPUS, False, "hsdp", "between nodes"),
        ("", (4, 2), GPUS, False, "fsdp", "optimizer state do not fit on one rank"),
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
    assert plan.options == {
        "sharding_strategy": "SHARD_GRAD_OP",
        "reshard_after_forward": False,  # implied, as the next one
        "auto_wrap_policy": "SIZE_BASED_WRAP",
        "min_num_params": 1_000_000,
        "cpu_offload": True,
    }
    assert plan.precision == "bf16"


def test_what_is_done_anyway_is_said() -> None:
    assert "a cell needs none" in planned("--strategy ddp -O find_unused_parameters=1", 2).notes[0]


def test_what_means_the_same_in_fsdp2_is_said() -> None:
    plan = planned("--strategy fsdp -O version=1 -O use_orig_params=0", 2)
    assert "version 1: run as FSDP2" in plan.notes[0] and "use_orig_params=0" in plan.notes[1]


def test_what_is_so_anyhow_is_said() -> None:
    (note,) = planned("--strategy ddp -O uneven_inputs=1", 2).notes
    assert "always taken" in note and "changes nothing" in note


def test_what_belongs_to_others_is_refused_and_not_offered() -> None:
    for name in REFUSED:
        with pytest.raises(OptionError, match=name) as caught:
            planned(f"--strategy pp -O {name}=1", 2)
        assert "leave it out" in caught.value.hint
        assert name not in strategy_help("pp") and name not in BY_NAME


def test_one_rank_is_a_rehearsal() -> None:
    assert planned("--strategy fsdp", 1).notes == ("the job has one rank, so nothing is divided",)


@pytest.mark.parametrize("option", STRATEGY_OPTIONS, ids=lambda option: option.name)
def test_every_option_takes_the_values_that_it_names(option: StrategyOption) -> None:
    for choice in option.choices:
        assert option.convert(choice) is not None
    default = option.default
    if default is not None and not isinstance(default, bool):
        assert option.convert(f"{default:g}" if isinstance(default, float) else str(default)) == default
    assert set(option.strategies) <= set(NAMES)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["ddp", "fsdp", "hsdp", "tp", "cp", "pp"]), min_size=1, max_size=3, unique=True),
    st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(1, 5), max_size=3),
    st.sampled_from([(1,), (2,), (4,), (6,), (8,), (2, 2), (4, 2), (4, 4)]),
)
def test_degrees_multiply_to_the_ranks_or_are_refused_with_a_remedy(
    names: list[str], degrees: dict[str, int], sizes: tuple[int, ...]
) -> None:
    line = " ".join([f"--strategy {'+'.join(names)}", *(f"-O {name}={degree}" for name, degree in degrees.items())])
    try:
        plan = planned(line, *sizes)
    except OptionError as error:
        assert error.hint
    else:
        assert math.prod(plan.degree(dimension) for dimension in DIMENSIONS) == sum(sizes)
        assert all(plan.degree(name) == degree for name, degree in degrees.items())


def test_the_help_of_a_strategy_has_its_options_and_no_others() -> None:
    text = help_text(["--strategy", "fsdp+tp", "--help"])
    rows = options_of("fsdp+tp")
    assert all(f"-O {row.name}={row.metavar}" in text and row.help in text for row in rows)
    assert {"cpu_offload", "tp", "batch"} <= {row.name for row in rows}
    assert "static_graph" not in text and "microbatches" not in text
    assert "takes no options" in help_text(["--strategy=none", "--help"])
    assert help_text(["--help"]) == options_help()


def test_a_plan_says_what_was_decided() -> None:
    line = "--strategy fsdp+tp -O tp=2 -O version=1 -O tp_plan=a:colwise --precision bf16 --compile --checkpoint /c"
    assert strategy_lines(planned(f"{line} --resume --activation-checkpointing --grad-accumulation 2", 8)) == [
        "strategy: fsdp+tp, dp_shard=4 × tp=2, bf16",
        "  options: version=1, tp_plan=a:colwise",
        "  each repeated block compiled",
        "  activations computed again in backward()",
        "  batches in 2 parts",
        "  checkpoints in /c",
        "  begins at the last of them",
        "  note: version 1: run as FSDP2, which shards each parameter by itself; losses and weights are the same",
    ]
    assert strategy_lines(planned("", 2)) == []


def test_hybrid_sharding_on_one_node_is_one_copy() -> None:
    plan = planned("--strategy fsdp -O sharding_strategy=HYBRID_SHARD_ZERO2", 4)
    assert (plan.degrees, plan.options["sharding_strategy"]) == ({"dp_shard": 4}, "SHARD_GRAD_OP")
    assert "one copy, sharded over its ranks" in plan.notes[0]
