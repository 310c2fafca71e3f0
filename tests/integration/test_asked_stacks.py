"""``%dist stacks JOB``: where the ranks of a running job are, on request. Real ranks, in the kernel's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import client
from jupyter_torchdist.cli import main
from jupyter_torchdist.protocol.errors import TorchDistError, UserError
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.verbs import parse
from jupyter_torchdist.verbs.perform import perform
from tests.leaks import wait_until

PATIENCE = 90.0

SOURCE = """
import re, time
import torch.distributed as dist

def wait():
    time.sleep(600)

def hold():  # C code that keeps the GIL
    re.match("(a+)+b", "a" * 64)

hold() if dist.get_rank() == 2 else wait()
"""


def said(words: str) -> str:
    return "".join(perform(parse.parse(words, "%dist")))


@pytest.fixture
def job(notebook: dict[str, Any]) -> client.Job:
    return client.submit(client.Request(SOURCE, "Cell In[3]", 2, Options(ranks=3, name="asked"), notebook))


@pytest.mark.timeout(240)
def test_ranks_are_grouped_by_the_users_line(job: client.Job, capsys: pytest.CaptureFixture[str]) -> None:
    expected = "2 ranks (0-1): Cell In[3], line 7, in wait\nrank 2: Cell In[3], line 10, in re.match\n"
    expected = expected.replace("(0-1)", "(0, 1)")
    assert wait_until(lambda: job.state.state == "running", PATIENCE), (job.state, job.logs())
    assert wait_until(lambda: said("stacks asked") == expected, PATIENCE), said("stacks asked")

    assert main(["stacks", "asked", "--full"]) == 0
    full = capsys.readouterr().out
    assert [line for line in full.split("\n") if line.startswith("rank ")] == [
        f"rank {rank} on {job.state.ranks[rank].host}: {place}"
        for rank, place in enumerate([*["Cell In[3], line 7, in wait"] * 2, "Cell In[3], line 10, in re.match"])
    ]
    assert '    File "Cell In[3]", line 12 in <module>' in full

    told = json.loads(said("stacks asked --json"))["stacks"]
    assert [(one["rank"], one["place"]) for one in told][2] == (2, "Cell In[3], line 10, in re.match")
    assert all("most recent call first" in one["text"] for one in told)

    job.kill()
    assert job.wait(PATIENCE).state == "cancelled"
    with pytest.raises(UserError, match=f"job {job.id} has ended: its ranks have no stacks any more"):
        said(f"stacks {job.id}")


def test_a_job_that_is_not_there() -> None:
    with pytest.raises(TorchDistError, match="there is no job"):
        said("stacks nothing")


class Late:
    """Needs a moment on a rank before user code begins, until a file is there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __reduce__(self) -> Any:
        wait = "import os, time\nwhile not os.path.exists(gate): time.sleep(0.05)"
        return exec, (wait, {"gate": str(self.gate)})


@pytest.mark.timeout(240)
def test_a_rank_before_its_first_line(notebook: dict[str, Any], tmp_path: Path) -> None:
    notebook["late"] = Late(tmp_path / "gate")
    job = client.submit(client.Request("late", "Cell In[4]", 2, Options(ranks=1, name="late"), notebook))
    no_rank = f"no rank of job {job.id} has started yet"

    def asked() -> str:
        try:
            return said("stacks late")
        except UserError as error:
            assert no_rank in str(error)
            return ""

    assert wait_until(lambda: "rank 0: <string>, line 2" in asked(), PATIENCE), (asked(), job.logs(), job.state)
    (tmp_path / "gate").touch()
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
