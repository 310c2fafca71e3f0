"""A job of which no rank makes progress says so, and who holds up the others: real ranks, each kind of hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import client
from jupyter_torchdist.protocol.errors import JobStalled
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.views import job_text
from tests.leaks import wait_until
from tests.notebook import Notebook

PATIENCE = 150.0

HEAD = """
import re, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
rank, ones = dist.get_rank(), torch.ones(4)
class Slow(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        time.sleep(600)
"""


@dataclass(frozen=True)
class Hang:
    """A cell after ``HEAD``, whose first line is 12, and what is said of it."""

    source: str
    code: str
    said: str
    stall: float = 2.0
    names: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """What makes each: an object in this module would go along with functions of other tests, and hang their ranks."""


class Sleeps:
    """Hangs when it is built anew on rank 1."""

    def __reduce__(self) -> Any:
        return exec, ("import os, time\nwhile os.environ.get('RANK') == '1': time.sleep(0.5)", {})


HANGS = {
    "user code": Hang(
        "if rank == 0:\n    dist.all_reduce(ones)\ntime.sleep(600)",
        "rank-stuck",
        "rank 1 has not entered all_reduce #1; it is at Cell In[3], line 14; rank 0 waits for it",
    ),
    "the GIL held": Hang(
        "if rank == 0:\n    dist.all_reduce(ones)\nre.match('(a+)+b', 'a' * 64)",
        "rank-stuck",
        "rank 1 has not entered all_reduce #1; it is at work at Cell In[3], line 14, in re.match; rank 0 waits for it",
        stall=1.0,
    ),
    "before the first line": Hang(
        "late\ndist.all_reduce(ones)",
        "rank-not-begun",
        "rank 1 hangs before the first line of the cell; it is at <string>, line 2; rank 0 waits for it",
        names={"late": Sleeps},
    ),
    "a store": Hang(
        "store = dist.distributed_c10d._get_default_store()\nstore.wait(['never'])",
        "store-stuck",
        "ranks 0, 1 make no progress; they are at Cell In[3], line 13 (store.wait(['never']))",
    ),
    "new_group": Hang(
        "if rank == 0:\n    dist.new_group([0, 1])\ntime.sleep(600)",
        "store-stuck",
        (
            "ranks 0, 1 make no progress; rank 0 is at Cell In[3], line 13, in new_group, "
            "rank 1 is at Cell In[3], line 14"
        ),
    ),
    "two groups": Hang(
        "one, two = dist.new_group([0, 1]), dist.new_group([0, 1])\n"
        "dist.all_reduce(ones, group=(one, two)[rank])\n"
        "dist.all_reduce(ones, group=(two, one)[rank])",
        "groups-deadlocked",
        (
            "ranks wait for each other: "
            "rank 0 waits in all_reduce #1 of group gloo:1 for rank 1 at Cell In[3], line 13; "
            "rank 1 waits in all_reduce #1 of group gloo:2 for rank 0 at Cell In[3], line 13"
        ),
    ),
    "a worker of a DataLoader": Hang(
        "if rank == 0:\n    dist.all_reduce(ones)\nfor batch in DataLoader(Slow(), num_workers=1):\n    pass",
        "dataloader-stuck",
        (
            "rank 1 has not entered all_reduce #1; it is at Cell In[3], line 14, in DataLoader; "
            "its worker is at Cell In[3], line 11, in __getitem__; rank 0 waits for it"
        ),
    ),
    "different collectives": Hang(
        "if rank == 0:\n    dist.all_reduce(ones)\ndist.broadcast(ones, 0)",
        "collective-mismatch",
        (
            "ranks call different collectives: rank 0 all_reduce #1 at Cell In[3], line 13; "
            "rank 1 broadcast #1 at Cell In[3], line 14"
        ),
    ),
}


def submitted(source: str, names: dict[str, Any], **options: Any) -> client.Job:
    request = client.Request(HEAD + source, "Cell In[3]", 2, Options(ranks=2, **options), names)
    return client.submit(request)


@pytest.mark.timeout(400)
def test_each_kind_of_hang_is_told_apart(notebook: dict[str, Any]) -> None:
    """All at once, as each is a job that does nothing."""
    jobs = {}
    for name, hang in HANGS.items():
        notebook.clear()
        notebook.update({"__name__": "__main__", **{name: make() for name, make in hang.names.items()}})
        jobs[name] = submitted(hang.source, notebook, stall=hang.stall)
    for name, job in jobs.items():
        assert wait_until(lambda job=job: job.state.stalled, PATIENCE), (name, job.state, job.logs())  # type: ignore[misc]
        stall = job.state.stall
        assert stall is not None
        assert (stall.finding.code, stall.finding.sentence, stall.ends) == (HANGS[name].code, HANGS[name].said, False)
        line = job_text.stall_line(job.state, time.time())
        assert line.startswith("stalled ") and line.endswith(f": {HANGS[name].said}")
        assert job_text.headline(job.state, time.time()).startswith("stalled · 2 ranks")
        job.kill()
    for job in jobs.values():
        assert job.wait(PATIENCE).state == "cancelled"


STEPS = """
from pathlib import Path
for pause in (3.0, 5.0, 3.0, 5.0):
    time.sleep(pause)
    dist.all_reduce(ones)
print("steps")
while rank == 1 and not Path(gate).exists():
    time.sleep(0.1)
for _ in range(4):
    dist.all_reduce(ones)
    time.sleep(1)
"""


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_slow_steps_are_no_stall_and_a_hang_after_them_is(notebook: dict[str, Any], tmp_path: Path) -> None:
    """Steps of five seconds after one of three: with ``--stall 4`` the second would be one if nothing was learned."""
    notebook["gate"] = str(tmp_path / "gate")
    job = submitted(STEPS, notebook, stall=4.0)
    assert wait_until(lambda: job.state.stalled, PATIENCE), (job.state, job.logs())
    assert "steps" in job.logs()
    kinds = [event.kind for event in job.events()]
    assert kinds.count("job.stalled") == 1, "the steps were called a stall"
    stall = job.state.stall
    assert stall is not None and stall.told - stall.since > 8, "twice the longest step"
    (tmp_path / "gate").touch()
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert [event.kind for event in job.events()].count("job.resumed") == 1


def test_a_cell_that_computes_without_a_word_is_no_stall(notebook: dict[str, Any]) -> None:
    source = "end = time.monotonic() + 20\nwhile time.monotonic() < end:\n    sum(range(1000))"
    job = submitted(source, notebook, stall=5.0)
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert "job.stalled" not in [event.kind for event in job.events()]


SCRIPT = """
import time
import torch, torch.distributed as dist
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(4))
time.sleep(600)
"""
SAID = "rank 1 has not entered all_reduce #1; it is at {}, line {}; rank 0 waits for it"


@pytest.mark.timeout(240)
def test_a_job_that_is_ended_says_why_everywhere(one_kernel: Notebook) -> None:
    """Exception, picture of the saved notebook and ``%dist show`` have the same sentence."""
    cell = one_kernel.try_run("%%distribute --ranks 2 --stall 2 --stall-kill --name ends\n" + SCRIPT[1:], PATIENCE)
    assert cell.error is not None and cell.error.name == "JobStalled"
    said = SAID.format(re.search(r"Cell In\[\d+\]", cell.error.value)[0], 6)  # type: ignore[index]
    assert said in cell.error.value and "py-spy" in cell.error.value
    assert said in cell.displays[-1]["text/plain"].replace("\n", " ")
    shown = one_kernel.run("%dist show ends").stdout
    assert f"✗ failed · 2 ranks on {os.uname().nodename} · " in shown and said in shown
    assert "before the end" not in cell.error.value


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("ends", "title"),
    [
        ("--stall-kill", "✗ failed"),
        pytest.param("--timeout=45s --grace=1s", "✗ timed out", marks=pytest.mark.soak),
    ],
    ids=["stall", "time"],
)
def test_a_script_that_hangs_and_is_ended(tmp_path: Path, home: Path, ends: str, title: str) -> None:
    """The terminal says it when it is seen, and at the end."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "2", "--stall", "5", *ends.split()]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, "script.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 1
    while_it_ran, at_its_end = done.stderr.split(title)
    said = SAID.format(tmp_path / "script.py", 6)
    assert re.search(rf"^stalled [\d.]+ s: {re.escape(said)}\n  → ", while_it_ran, re.MULTILINE), done.stderr
    assert said in at_its_end and "py-spy" in at_its_end


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_ranks_that_all_hang_before_their_first_line(notebook: dict[str, Any]) -> None:
    """They are started again in new interpreters, once; then the job ends with what holds them up."""
    notebook["late"] = type("Late", (Sleeps,), {"__reduce__": _sleep_everywhere})()
    job = submitted("late", notebook)
    state = job.wait(200)
    assert state.state == "failed"
    assert "ranks 0, 1 hang before the first line of the cell; they are at <string>, line 2" in state.reason
    assert any("started again with --fresh" in note for note in state.notes)
    error = job.exception()
    assert isinstance(error, JobStalled) and "--exclude NAME" in error.hint


def _sleep_everywhere(_self: object) -> Any:
    return exec, ("import os, time\nwhile 'RANK' in os.environ: time.sleep(0.5)", {})
