"""``--launcher slurm`` on a real Slurm of two nodes: what a job gives, its end, its place in the queue, attaching."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client import Job, attach
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.store import catalog
from tests.cluster.cells import MEET, PATIENCE, PYTHON, SLEEP, kill_driver
from tests.cluster.cells import start as started
from tests.engines.jobs import AGAIN, SAVE, asleep
from tests.engines.slurm import Slurm
from tests.integration.test_gallery import execute
from tests.leaks import wait_until
from tests.notebook import Notebook, apart


def start(pool: DriverPool, source: str, options: str = "", names: dict[str, Any] | None = None) -> Job:
    """Two nodes with two ranks each, unless ``options`` say otherwise."""
    return started(pool, source, f"--launcher slurm --nodes 2 --ranks 4 {options}", names)


def test_ranks_of_two_nodes_meet_and_their_values_come_back(pool: DriverPool, notebook: dict[str, Any]) -> None:
    exec("import torch\nweights = torch.zeros(3)", notebook)
    job = start(pool, MEET + "weights += total\nfloat(weights.sum())", names=notebook)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    for rank in range(4):
        assert f"rank {rank} on node{rank // 2 + 1} sum 6.0" in job.logs(rank)
    job.bring(notebook)
    assert notebook["weights"].tolist() == [6.0, 6.0, 6.0]
    assert job.value == 18.0


def test_in_a_notebook_the_exception_of_a_rank_is_raised(slurm: Slurm, kernel: Notebook) -> None:
    cell = kernel.try_run(
        f"%%distribute --launcher slurm --nodes 2 --ranks 2 --host-option python={PYTHON} --watch text\n"
        f"{MEET}if dist.get_rank() == 1:\n    raise ValueError('no good')\ndist.barrier()\n",
    )
    assert "[rank 1] rank 1 on node2 sum 1.0" in cell.stdout
    assert cell.error is not None and cell.error.name == "ValueError"
    assert "raise ValueError('no good')" in cell.error.traceback
    assert "rank 1 on node2" in cell.error.traceback
    assert wait_until(lambda: not slurm.queue())


def test_a_cancel_ends_the_ranks_and_the_job_in_the_queue(pool: DriverPool, slurm: Slurm) -> None:
    job = start(pool, SLEEP, "--ranks 2")
    assert wait_until(lambda: asleep(job), PATIENCE)
    assert slurm.queue() == [f"{slurm.number(job)} torchdist-{job.id} RUNNING"]
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"
    assert wait_until(lambda: not slurm.queue())


@pytest.mark.soak
def test_a_job_waits_in_the_queue_and_then_runs(pool: DriverPool, slurm: Slurm) -> None:
    holder = slurm.occupy()
    first, second = start(pool, MEET, "--ranks 2"), start(pool, MEET, "--ranks 2")
    assert wait_until(lambda: "position 1: waiting for nodes" in first.state.queued), first.state.queued
    assert wait_until(lambda: second.state.queued.startswith("position 2: ")), second.state.queued
    second.interrupt()
    assert second.wait(PATIENCE).state == "cancelled"
    assert not second.state.ranks
    assert [line.split()[1] for line in slurm.queue()] == [f"torchdist-{first.id}", "wrap"]
    slurm.run("scancel", holder)
    assert first.wait(PATIENCE).state == "succeeded", first.state.reason


COUNT = (
    MEET
    + "import time\nwhile True:\n    print('line', i := globals().get('i', -1) + 1, flush=True)\n    time.sleep(0.1)\n"
)


def test_a_job_is_found_again_and_ends_with_slurms_own_cancel(pool: DriverPool, slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    words = f"--launcher slurm --nodes 2 --ranks 2 --host-option python={PYTHON} {script}".split()
    with subprocess.Popen([sys.executable, "-m", "jupyter_torchdist", "run", *words], stdout=subprocess.PIPE) as shell:
        assert wait_until(lambda: len(catalog.jobs()) == 1, PATIENCE)
        job = attach(catalog.jobs()[0].job, pool=pool)
        assert wait_until(lambda: "line 3" in job.logs(1), PATIENCE), job.state
        shell.kill()
    kill_driver(job)
    seen = job.logs(1).count("line ")

    def goes_on() -> bool:
        job.revive()
        return job.logs(1).count("line ") > seen + 5

    assert wait_until(goes_on, PATIENCE)
    for rank in range(2):
        numbers = [int(line.split()[-1]) for line in job.logs(rank).splitlines() if "line " in line]
        assert numbers == list(range(len(numbers))), "each line once, in order"
    slurm.run("scancel", slurm.number(job))
    assert job.wait(PATIENCE).state == "lost"
    assert job.state.reason == "the launcher ended it: it was cancelled in Slurm (scancel)"


LINKS = """
import os
blobs = os.path.join(os.environ["TORCHDIST_SCRATCH"], "blobs")
print("links", [os.path.islink(os.path.join(blobs, name)) for name in os.listdir(blobs)])
"""


@pytest.mark.soak
def test_inside_an_allocation_only_the_jobs_own_step_ends(
    pool: DriverPool, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = slurm.occupy()
    monkeypatch.setenv("SLURM_JOB_ID", allocation)
    monkeypatch.setenv("TORCHDIST_HOME", str(slurm.directory / "home"))
    job = started(pool, LINKS + SLEEP, "--launcher slurm --ranks 2")
    assert [node.host for node in job.plan.nodes] == ["node1", "node2"]
    assert wait_until(lambda: asleep(job), PATIENCE), job.state
    assert "links [True, True]" in job.logs(1), "captured data is read where the driver has it"
    kill_driver(job)
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"
    assert wait_until(lambda: not any("torchdist" in step for step in slurm.steps())), slurm.steps()
    assert slurm.queue() == [f"{allocation} wrap RUNNING"]
    slurm.run("scancel", allocation)


@pytest.mark.parametrize(
    "warning",
    [
        "scancel --batch --signal=USR1 {job}",
        pytest.param("scontrol update jobid={job} timelimit=1", marks=pytest.mark.soak),  # Slurm looks every 30 s
    ],
    ids=["signal", "limit"],
)
def test_before_the_time_limit_the_ranks_can_save(pool: DriverPool, slurm: Slurm, warning: str) -> None:
    job = start(pool, SAVE, "--ranks 2 -O time=30")
    assert wait_until(lambda: asleep(job), PATIENCE), job.state
    slurm.run(*warning.format(job=slurm.number(job)).split())
    assert job.wait(PATIENCE).state == "timed_out"
    assert job.state.reason == "the time limit of Slurm: -O time=TIME asks for more"
    assert job.logs(stream="out").count("saved") == 2


def test_a_job_whose_nodes_are_taken_waits_for_others(pool: DriverPool, slurm: Slurm) -> None:
    job = start(pool, AGAIN, "--ranks 2 --restarts 2 --grace 1s")
    assert wait_until(lambda: job.logs(stream="out").count("start 0") == 2, PATIENCE), job.state
    urgent = slurm.occupy("urgent")
    assert wait_until(lambda: job.state.restarts == 1 and "waiting for nodes" in job.state.queued, PATIENCE), job.state
    slurm.run("scancel", urgent)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert job.value == 1
    assert any(note.endswith("started again on other nodes (1 of 2)") for note in job.state.notes), job.state.notes
    for node in slurm.bed.nodes:  # Slurm kills at once what it preempts, so nobody removes its files
        slurm.bed.run(node, "rm", "-rf", "/tmp/torchdist-0")


def test_at_its_time_limit_a_job_goes_into_the_queue_again(pool: DriverPool, slurm: Slurm) -> None:
    job = start(pool, AGAIN, "--ranks 2 --restarts 1 -O time=30")
    assert wait_until(lambda: job.logs(stream="out").count("start 0") == 2, PATIENCE), job.state
    slurm.run("scancel", "--batch", "--signal=USR1", slurm.number(job))
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert job.value == 1
    limit = "the time limit of Slurm: -O time=TIME asks for more; all ranks are started again on other nodes (1 of 1)"
    assert limit in job.state.notes


TRAINS = """
import time, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
seen = []
for x, y in torch.utils.data.DataLoader(data, batch_size=4):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen.append(len(seen))
    print("step", len(seen), flush=True)
    time.sleep(0.1)
len(seen)
"""


@pytest.mark.soak
def test_it_goes_on_from_its_checkpoint(pool: DriverPool, slurm: Slurm) -> None:
    place = slurm.directory / "checkpoints"
    job = start(pool, TRAINS, f"--ranks 2 --strategy ddp --checkpoint {place} --restarts 1 -O time=30 --grace 20s")
    assert wait_until(lambda: "step 20\n" in job.logs(0), PATIENCE), job.state
    slurm.run("scancel", "--batch", "--signal=USR1", slurm.number(job))
    assert job.wait(2 * PATIENCE).state == "succeeded", job.state.reason
    assert job.value == 60
    assert job.logs(0).count("step 1\n") == 1 and job.logs(0).count("step 60\n") == 1


@pytest.mark.soak  # Slurm and the driver wait 30 s for the node
def test_a_node_that_dies_in_the_middle_is_named(pool: DriverPool, slurm: Slurm) -> None:
    job = start(pool, SLEEP, "--ranks 2")
    assert wait_until(lambda: asleep(job), PATIENCE), job.state
    slurm.bed.poweroff("node2")
    try:
        assert job.wait(3 * PATIENCE).state in ("lost", "failed")
        assert "node2" in job.state.reason or "NODE_FAIL" in job.state.reason
    finally:
        slurm.bed.heal()
        slurm.bed.start("node2")
        slurm.start_node("node2")


@pytest.mark.timeout(400)
def test_the_notebook(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "torchdist.toml").write_text(f'[hosts]\npython = "{PYTHON}"\n')
    texts = execute("slurm", tmp_path)
    assert "#SBATCH --nodes=2" in texts["plan"]
    for rank in range(4):
        assert f"rank {rank} of 4 on node{rank // 2 + 1}" in apart(texts["run"])
    assert "Sequential (64, 8) loss 0." in texts["back"] and "'succeeded'" in texts["back"]
    assert "'cancelled'" in texts["ended"]
    assert wait_until(lambda: not slurm.queue())
