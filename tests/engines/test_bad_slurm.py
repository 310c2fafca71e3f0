"""What ``--launcher slurm`` refuses, in whose words; most of it before a job is made."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from jupyter_torchdist.client import Request
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.client.submit import prepare
from jupyter_torchdist.protocol.errors import LaunchError, TorchDistError
from jupyter_torchdist.protocol.options.help import help_text
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.store import catalog
from jupyter_torchdist.views.plan_tables import plan_table
from tests.cluster.cells import MEET, PATIENCE, start
from tests.engines import jobs
from tests.engines.slurm import Slurm

planned = partial(jobs.planned, "slurm")


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            "--ranks 2 -O partition=nowhere",
            "Slurm refuses #SBATCH --partition=nowhere: invalid partition specified: nowhere",
            "`sinfo -s` lists the partitions",
        ),
        (
            "--ranks 2 -O partition=small -O account=poor",
            "Slurm refuses #SBATCH --account=poor: allocation failure: Invalid account",
            "sacctmgr",
        ),
        ("--ranks 2 -O time=2h", "Slurm refuses #SBATCH --time=0-02:00:00: ", "sinfo -o '%P %l'"),
        ("--ranks 2 -O constraint=fast", "Slurm refuses #SBATCH --constraint=fast: ", "sinfo -o '%N %f'"),
        ("--ranks 2 -O nodelist=node9", "Slurm refuses #SBATCH --nodelist=node9: ", "`sinfo -N` lists the nodes"),
        (
            "--ranks 2 -O mem=64G",
            "Slurm refuses #SBATCH --nodes=1, --cpus-per-task=2, --mem=64G: ",
            "sinfo -o '%P %D %N %c %m %G'",
        ),
        ("--ranks 2 -O cpus=64", "Slurm refuses #SBATCH --nodes=1, --cpus-per-task=64: ", "sinfo -o '%P"),
        ("--ranks 4 --nodes 3", "--nodes 3: the default partition has 2 nodes", "--nodes 2"),
        ("--gpus 16 --nodes 2", "--gpus 16: 2 nodes of the default partition have 2 each", "--gpus 4, or --nodes 8"),
        ("--gpus 1 --gpu-type H100", "no node of the default partition has a GPU H100", "leave --gpu-type out"),
        ("--ranks 2 --hosts a", "Slurm chooses the nodes", "-O nodelist=NODE,…"),
        ("--ranks 2 -O tiem=5", "--launcher slurm has no option 'tiem'", "did you mean -O time=…?"),
        ("--ranks 2 -O colour=red", "--launcher slurm has no option 'colour'", "it has partition, time"),
        ("--ranks 2 -O time=soon", "-O time=soon: expected a time such as 90 (minutes)", "write -O time=TIME"),
        ("--ranks 2 -O time=5s", "-O time=5s: expected at least a minute", "write -O time=TIME"),
        ("--ranks 2 -O cpus=0", "-O cpus=0: expected a whole number, at least 1", "write -O cpus=N"),
        ("--ranks 2 -O time=1 --grace 2m", "a time limit of 60 s leaves no time before the end", "a shorter --grace"),
        ("--ranks 2 -O partition=$(id)", "expected a name without spaces and quotes", "write -O partition=NAME"),
        ("--ranks 2 -O allocation=mine", "expected new, or the number of a job of Slurm", "write -O allocation=ID|new"),
        ("--ranks 2 -O allocation=999999", "Invalid job id", "squeue"),
        ("--ranks 2 -O allocation=1 -O time=5", "-O time is for a new allocation", "-O allocation=new"),
    ],
)
def test_what_slurm_cannot_give_is_refused_before_a_job_is_made(
    slurm: Slurm, options: str, message: str, hint: str
) -> None:
    with pytest.raises(TorchDistError) as caught:
        planned(options)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert not catalog.jobs()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 2 -O partition=debug", "-O partition is an option of --launcher slurm, not of local"),
        ("--ranks 2 --nodes 2", "--nodes 2 asks an engine (slurm, ray, spark, kubernetes) for nodes"),
    ],
)
def test_options_of_slurm_need_its_launcher(options: str, message: str) -> None:
    with pytest.raises(TorchDistError, match=re.escape(message)):
        prepare(Request("pass\n", "Cell In[3]", 2, parse_options(options)))


def test_without_slurm_the_missing_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("srun", "sinfo"):
        (tmp_path / name).symlink_to(shutil.which("true") or "/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError) as caught:
        planned("--ranks 2")
    assert "there is no sbatch, squeue, scancel, scontrol here" in caught.value.message
    assert "-O login=HOST names a login node that ssh reaches; or run the notebook there" in caught.value.hint


@pytest.mark.soak  # Slurm tries for 9 seconds
def test_a_controller_that_does_not_answer_is_said_in_slurms_words(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(slurm.conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1#"))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(LaunchError, match="Unable to contact slurm controller"):
        planned("--ranks 2")


def test_the_plan_shows_the_script(slurm: Slurm) -> None:
    plan = planned("--nodes 2 --gpus 4 -O time=45 -O mem=1G -O exclusive=1 --grace 20s").plan
    lines = plan.request.splitlines()
    for line in ("nodes=2", "gpus-per-node=2", "cpus-per-task=4", "time=0-00:45:00", "mem=1G", "signal=B:USR1@51"):
        assert f"#SBATCH --{line}" in lines
    assert "#SBATCH --exclusive" in lines
    assert [node.gpus for node in plan.nodes] == [("any-gpu-0", "any-gpu-1")] * 2
    assert "sent to the launcher:\n  #!/bin/sh" in plan_table(plan)
    assert "searched there" in plan_table(plan)
    assert "-O partition=NAME" in help_text(["--launcher", "slurm", "--help"])
    assert not slurm.queue()


def test_a_python_that_the_nodes_lack_ends_the_job_with_words(pool: DriverPool, slurm: Slurm) -> None:
    job = start(pool, MEET, "--launcher slurm --ranks 1 --host-option python=/nowhere/python", python=None)
    assert job.wait(PATIENCE).state == "failed"
    assert job.state.reason.startswith("node1 has no Python at /nowhere/python")
