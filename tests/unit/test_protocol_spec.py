"""Options: every mistake names what was meant; specifications survive JSON without the environment's values."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.plan import Gpu, Inventory, NodePlan, Plan
from jupyter_torchdist.protocol.spec import OPTIONS, JobSpec, Options, options_help
from jupyter_torchdist.protocol.strategy import StrategyPlan

FEW = settings(max_examples=50, deadline=None)

LINE = (
    "--ranks 3 --hosts a,b:2 --host-option a.python=/p "
    "--launcher slurm --nodes 2 --remote --restarts 2 --backend gloo --numa-binding node --out a,b --collect all "
    "--include z --exclude big --exclude x,y --sync data --env-sync --background "
    "--strategy fsdp+tp -O tp=2 --option cpu_offload=1 --config c.yaml --precision bf16 --compile "
    "--activation-checkpointing --grad-accumulation 4 --verify 20 --profile 3 --checkpoint ckpt --resume "
    "--stall 5m --stall-kill "
    "--name 'my run' --timeout 2h --grace=1.5s --lease 2h --env A=1 --env B --fresh --replace --plan "
    "--track mlflow,tensorboard --track wandb --watch off"
)
ALL = Options(
    ranks=3,
    backend="gloo",
    numa_binding="node",
    strategy="fsdp+tp",
    option=("tp=2", "cpu_offload=1"),
    config="c.yaml",
    precision="bf16",
    compile=True,
    activation_checkpointing=True,
    grad_accumulation=4,
    profile=3,
    checkpoint="ckpt",
    resume=True,
    out=("a", "b"),
    hosts=("a", "b:2"),
    host_option=("a.python=/p",),
    launcher="slurm",
    nodes=2,
    remote=True,
    restarts=2,
    collect="all",
    include=("z",),
    exclude=("big", "x", "y"),
    sync=("data",),
    env_sync=True,
    background=True,
    name="my run",
    timeout=7200.0,
    grace=1.5,
    lease=7200.0,
    stall=300.0,
    stall_kill=True,
    verify=20,
    env=("A=1", "B"),
    fresh=True,
    replace=True,
    plan=True,
    track=("mlflow", "tensorboard", "wandb"),
    watch="off",
)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nodes 4", "--launcher slurm, or write --hosts, with which --nodes 1:4"),
        ("--hosts a,b --nodes 2", "asks an engine"),
        ("--hosts a,b --nodes 1:2", "add --restarts 3"),
        ("--launcher slurm --nodes 1:2 --restarts 1", "--nodes 1:2 is for --hosts"),
        ("--hosts a,b --nodes 0:2 --restarts 1", "expected a whole number, or MIN:MAX such as 2:4"),
        ("--hosts a,b --nodes 3:2 --restarts 1", "MIN:MAX"),
        ("--hosts a,b --nodes :2 --restarts 1", "MIN:MAX"),
        ("--hosts a,b --nodes 2: --restarts 1", "MIN:MAX"),
        ("--launcher slurm --nodes 0", "MIN:MAX"),
    ],
)
def test_nodes_that_cannot_be(line: str, words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        parse_options(line)


def test_the_hosts_with_which_a_job_goes_on() -> None:
    options = parse_options("--hosts a,b,c --nodes 2:3 --restarts 1")
    assert (options.least_nodes, options.nodes) == (2, 3)
    assert parse_options("--launcher slurm --nodes 3").least_nodes is None


def test_every_option_can_be_given() -> None:
    assert parse_options(LINE) == ALL
    assert parse_options(shlex.split(LINE)) == ALL
    given_flags = {word.partition("=")[0] for word in shlex.split(LINE) if word.startswith("--")}
    assert given_flags | {"--gpus", "--gpu-type", "--wait"} == {option.flag for option in OPTIONS}


def test_defaults_stand_until_they_are_overridden() -> None:
    defaults = Options(ranks=4, name="mine", exclude=("a",))
    assert parse_options("", defaults) == defaults
    assert parse_options("--ranks 2 --exclude b", defaults) == replace(defaults, ranks=2, exclude=("b",))


def test_options_of_the_strategy_add_to_those_of_files() -> None:
    defaults = Options(strategy="fsdp", option=("cpu_offload=1", "version=2"))
    assert parse_options("-O cpu_offload=0", defaults).option == ("cpu_offload=1", "version=2", "cpu_offload=0")


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("--ranks 0", "at least 1", "--ranks N"),
        ("--ranks -1", "at least 1", "--ranks N"),
        ("--ranks x", "a whole number", "--ranks N"),
        ("--ranks 2.5", "a whole number", "--ranks N"),
        ("--ranks ²", "a whole number", "--ranks N"),
        ("--ranks", "needs a value", "--ranks N"),
        ("--ranks --fresh", "needs a value", "--ranks N"),
        ("--rank 2", "no option --rank", "did you mean --ranks?"),
        ("--gpu 2", "no option --gpu", "did you mean --gpus?"),
        ("--backgruond", "no option --backgruond", "did you mean --background?"),
        ("--zzzz", "no option --zzzz", "--help"),
        ("--quirk", "no option --quirk", "--help"),  # its dashes alone are like those of another one
        ("2", "'2' is not an option", "begin with --"),
        ("--fresh=1", "takes no value", "--fresh alone"),
        ("--collect rank1", "one of rank0, all; did you mean rank0?", "--collect"),
        ("--backend mpi", "one of nccl, gloo", "--backend"),
        ("--timeout soon", "a time such as", "--timeout TIME"),
        ("--timeout 0", "more than 0", "--timeout TIME"),
        ("--timeout 1e3", "a time such as", "--timeout TIME"),
        ("--out a-b", "names separated by commas", "--out"),
        ("--out ,", "at least one name", "--out"),
        ("--env 1A=2", "NAME or NAME=VALUE", "--env"),
        ("--name ''", "1 to 100 printable", "--name"),
        ("--name 'open", "cannot be read", "close the quotation mark"),
        ("--strategy fdsp", "one of none, ddp, fsdp", "--strategy NAME[+NAME]"),
        ("--strategy fdsp", "did you mean fsdp?", "--strategy"),
        ("--strategy fsdp+", "one of none, ddp, fsdp", "--strategy"),
        ("--strategy tp+tp", "each strategy once", "--strategy"),
        ("--strategy auto+tp", "auto alone", "--strategy"),
        ("-O tp", "expected key=value", "--option KEY=VALUE"),
        ("-O =2", "expected key=value", "--option KEY=VALUE"),
        ("-O", "needs a value", "-O KEY=VALUE"),
        ("--precision bf61", "did you mean bf16?", "--precision"),
        ("--grad-accumulation 0", "at least 1", "--grad-accumulation N"),
        ("--profile 0", "from 1 to 1000", "--profile STEPS"),
        ("--checkpoint ''", "expected a path", "--checkpoint DIR"),
        ("--gpus 1 --ranks 1", "--gpus and --ranks cannot be used together", "--gpus N for GPU ranks"),
        ("--ranks 2 --backend nccl", "--backend nccl needs GPUs", "--gpus N"),
    ],
)
def test_mistakes_name_what_was_meant(line: str, message: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(line)
    assert message in caught.value.message
    assert hint in caught.value.hint


@FEW
@given(st.text(max_size=40))
def test_any_line_gives_options_or_an_option_error(line: str) -> None:
    try:
        assert isinstance(parse_options(line), Options)
    except OptionError as error:
        assert error.hint


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("30s", 30.0), ("10m", 600.0), ("1.5h", 5400.0), ("1d", 86400.0), (".5", 0.5)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_options(f"--timeout {text}").timeout == seconds


def test_help_has_every_option_within_a_screen() -> None:
    text = options_help()
    assert all(option.flag in text and option.help in text for option in OPTIONS)


def a_spec(options: Options) -> JobSpec:
    return JobSpec("j", "cell", "x = 1", "Cell In[1]", 2, options, 1.5, ("--lr", "1"), "n.ipynb")


def test_a_specification_without_the_environments_values() -> None:
    text = codec.dumps(a_spec(ALL).to_json())
    assert JobSpec.from_json(codec.loads(text)) == a_spec(replace(ALL, env=("A", "B")))


def test_options_of_a_later_version_are_left_out() -> None:
    value = codec.loads(codec.dumps(a_spec(Options(ranks=2)).to_json()))
    value["options"]["of_tomorrow"] = 1
    assert JobSpec.from_json(value) == a_spec(Options(ranks=2))


def test_plans_and_inventories_come_back() -> None:
    gpu = Gpu("GPU-1", 0, "H200", 2**37, 5, (7, 8))
    inventory = Inventory("h", 2, 2**40, (gpu,), "3.11", "2.13")
    node = NodePlan("node0", (0, 1), ("GPU-1", "GPU-2"), (4, 5), "10.0.0.1", "eth0")
    plan = Plan("j", 2, "nccl", (node,), True, "node", 5.0, 1.0, "all", ("a",), ("E",))
    assert Inventory.from_json(codec.loads(codec.dumps(inventory.to_json()))) == inventory
    strategy = StrategyPlan("fsdp+tp", {"tp": 2}, {"zero": (1, 2)}, "bf16", notes=("why",))
    assert Plan.from_json(codec.loads(codec.dumps(plan.to_json()))) == plan
    assert Plan.from_json(codec.loads(codec.dumps(replace(plan, strategy=strategy).to_json()))).strategy == strategy
    earlier = {key: value for key, value in plan.to_json().items() if key != "strategy"}
    assert Plan.from_json(codec.loads(codec.dumps(earlier))) == plan
    assert plan.node_of(1) is node
    with pytest.raises(KeyError):
        plan.node_of(2)
