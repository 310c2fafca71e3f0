"""Plans, and every refusal in words: what there is, and what to ask for instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.planning.topology import make_plan
from jupyter_torchdist.protocol import releases
from jupyter_torchdist.protocol.errors import ResourceError
from jupyter_torchdist.protocol.plan import Gpu, Inventory
from jupyter_torchdist.protocol.spec import JobSpec, Options

GIB = 1024**3


def gpu(index: int, *pids: int, used: int = 0) -> Gpu:
    return Gpu(f"GPU-{index:04d}", index, "NVIDIA H100", 80 * GIB, used, pids)


def machine(*gpus: Gpu, cores: int = 8, memory: int = 64 * GIB) -> Inventory:
    return Inventory("here", cores, memory, gpus)


def spec(**options: Any) -> JobSpec:
    return JobSpec("j", "cell", "pass", "Cell In[1]", 2, Options(**options), 0.0)


def refusal(
    inventory: Inventory, busy: dict[str, str] | None = None, own: set[int] | None = None, **options: Any
) -> str:
    with pytest.raises(ResourceError) as caught:
        make_plan(spec(**options), [inventory], busy=busy or {}, own=own or set())
    return str(caught.value)


# -- on the CPU


def test_ranks_share_the_cores() -> None:
    plan = make_plan(spec(ranks=3), [machine(cores=8)])
    assert (plan.world_size, plan.backend, plan.nodes[0].threads) == (3, "gloo", 2)
    (node,) = plan.nodes
    assert (node.ranks, node.gpus, node.address) == ((0, 1, 2), (), "127.0.0.1")


def test_more_ranks_than_cores_is_a_rehearsal() -> None:
    assert make_plan(spec(ranks=8), [machine(cores=2)]).nodes[0].threads == 1


def test_200_ranks_on_2_cores() -> None:
    assert refusal(machine(cores=2), ranks=200) == (
        "200 ranks on 2 cores of here are too many: 100 ranks would share one core\n  → ask for at most --ranks 64 here"
    )
    assert make_plan(spec(ranks=64), [machine(cores=2)]).world_size == 64


def test_more_ranks_than_memory() -> None:
    assert refusal(machine(memory=GIB // 2), ranks=20) == (
        "20 ranks need at least 1.2 GiB; here has 0.5 GiB free\n  → ask for at most --ranks 8"
    )


def test_a_machine_that_does_not_tell_its_memory() -> None:
    assert make_plan(spec(ranks=4), [machine(memory=0)]).world_size == 4


def test_ranks_without_gpus_are_not_bound() -> None:
    assert refusal(machine(), ranks=2, numa_binding="node") == (
        "--numa-binding pins each rank to the cores near its GPU, but CPU ranks have no GPU\n"
        "  → leave it out, or ask for --gpus"
    )


# -- on GPUs


def test_every_free_gpu_is_the_default() -> None:
    plan = make_plan(spec(), [machine(gpu(0), gpu(1, 77), gpu(2))])
    assert (plan.nodes[0].gpus, plan.world_size, plan.backend) == (("GPU-0000", "GPU-0002"), 2, "nccl")
    assert plan.called(1, "box") == "rank 1 (box, GPU 2)"


def test_binding_needs_numactl() -> None:
    with_it = replace(machine(gpu(0)), numactl=True)
    assert make_plan(spec(numa_binding="node"), [with_it]).numa_binding == "node"
    assert refusal(machine(gpu(0)), numa_binding="node") == (
        "--numa-binding: PyTorch needs the program numactl, which is not installed on here\n"
        "  → install the system's package numactl there, or leave --numa-binding out"
    )


def test_8_gpus_with_none() -> None:
    assert refusal(machine(), gpus=8) == (
        "here has no GPU that this kernel can use\n  → --ranks 8 runs the cell on 8 CPU ranks, as a rehearsal"
    )


def test_the_default_with_none() -> None:
    assert "--ranks 2 runs the cell on 2 CPU ranks" in refusal(machine())


def test_8_gpus_with_2() -> None:
    assert refusal(machine(gpu(0), gpu(1)), gpus=8) == (
        "--gpus 8: here has 2 GPUs (NVIDIA H100)\n  → --gpus 2, or --ranks 8 for a rehearsal on the CPU"
    )
    assert "here has 1 GPU (NVIDIA H100)" in refusal(machine(gpu(0)), gpus=8)


def test_gpus_of_an_earlier_job_and_of_a_stranger() -> None:
    inventory = machine(gpu(0), gpu(1, 400, 300, used=3 * GIB), gpu(2))
    assert refusal(inventory, {"GPU-0000": "20260101-a"}, gpus=2) == (
        "1 of 3 GPUs are free: GPU 0 has job 20260101-a; GPU 1 has process 300, 400 (3.0 GiB)\n"
        "  → end the jobs that use them: `%dist cancel JOB`, --replace; on this machine --wait waits"
    )


def test_no_gpu_is_free() -> None:
    assert refusal(machine(gpu(0)), {"GPU-0000": "20260101-a"}).startswith("0 of 1 GPU are free: GPU 0 has job")


def test_what_only_this_kernel_holds_is_free_and_taken_last() -> None:
    inventory = machine(gpu(0, 42, used=GIB), gpu(1), gpu(2))
    assert make_plan(spec(gpus=2), [inventory], own={42}).nodes[0].gpus == ("GPU-0001", "GPU-0002")
    assert make_plan(spec(gpus=3), [inventory], own={42}).nodes[0].gpus == ("GPU-0000", "GPU-0001", "GPU-0002")


def test_what_this_kernel_shares_with_a_stranger_is_not_free() -> None:
    message = refusal(machine(gpu(0, 42, 43, used=GIB)), own={42}, gpus=1)
    assert "GPU 0 has process 43 (1.0 GiB)" in message


def test_ranks_leave_gpus_alone() -> None:
    assert make_plan(spec(ranks=2), [machine(gpu(0), gpu(1))]).nodes[0].gpus == ()


def test_a_backend_of_the_users_choice() -> None:
    assert make_plan(spec(gpus=1, backend="gloo"), [machine(gpu(0))]).backend == "gloo"


def test_the_plan_keeps_names_of_variables_and_no_values() -> None:
    assert make_plan(spec(ranks=1, env=("TOKEN=secret", "HOME")), [machine()]).env_names == ("TOKEN", "HOME")


def test_a_plan_survives_its_journey() -> None:
    plan = make_plan(spec(gpus=2, timeout=60.0, out=("a", "b")), [machine(gpu(0), gpu(1))])
    assert type(plan).from_json(plan.to_json()) == plan


def with_torch(version: str) -> Inventory:
    return replace(machine(gpu(0), gpu(1)), torch=version, numactl=True)


@pytest.mark.parametrize("version", ["2.7.1", "2.6.0+cu124", "1.13.1"])
def test_a_release_of_torch_that_is_too_old(version: str) -> None:
    with pytest.raises(ResourceError) as caught:
        make_plan(spec(ranks=2), [with_torch(version)])
    assert caught.value.message == f"torch {version} is too old: jupyter_torchdist needs torch 2.8 or newer"
    assert caught.value.hint == "pip install 'torch>=2.8'"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"ranks": 4, "strategy": "ddp+tp", "option": ("tp=2",)}, "--strategy ddp+tp"),
        ({"ranks": 2, "strategy": "fsdp", "option": ("sharding_strategy=NO_SHARD",)}, "-O sharding_strategy=NO_SHARD"),
        ({"ranks": 2, "strategy": "pp", "option": ("schedule=dualpipev", "microbatches=4")}, "-O schedule=dualpipev"),
        ({"gpus": 2, "numa_binding": "node"}, "--numa-binding"),
    ],
)
def test_what_a_release_of_torch_cannot_do_is_refused_by_name(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ResourceError) as caught:
        make_plan(spec(**options), [with_torch("2.8.0+cu128")])
    assert caught.value.message == f"{what} needs torch 2.9 or newer; this is torch 2.8.0+cu128"
    assert caught.value.hint.startswith("pip install 'torch>=2.9', or ")
    assert make_plan(spec(**options), [with_torch("2.9.1")])


def test_supported_releases_are_those_that_are_asked_for() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, releases.OLDEST))}"' in text


def test_what_is_no_version_of_torch() -> None:
    with pytest.raises(ValueError, match="'main' is no version of torch"):
        releases.release_of("main")
