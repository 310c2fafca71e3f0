"""A rank says when it waits in a collective, the others how far they are: two real ranks, by what is in the journal."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import client
from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.protocol.state import JobState, Waiting
from jupyter_torchdist.views import job_text
from tests.leaks import wait_until

PATIENCE = 90.0

SOURCE = """
import os, time
import torch, torch.distributed as dist
rank = dist.get_rank()
def gate(number):
    while rank == 1 and not os.path.exists(f"{gates}/{number}"):
        time.sleep(0.02)
ones = torch.ones(1000)
pair = dist.new_group([0, 1])
gate(1)
dist.all_reduce(ones, group=pair)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
loss = model(torch.ones(2, 10)).sum()
gate(2)
loss.backward()
# A collective of each is under way for seconds while it waits for nobody: one rank sleeps, the other computes.
first, second = (None, pair) if rank == 0 else (pair, None)
work = dist.all_reduce(ones, group=first, async_op=True)
end = time.monotonic() + 3.5
time.sleep(3.5 if rank == 0 else 0)
while time.monotonic() < end:
    sum(range(1000))
dist.all_reduce(torch.ones(1000), group=second)
work.wait()
"""


@pytest.fixture(autouse=True)
def closing(home: Path) -> Iterator[None]:
    yield
    pool().close()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__dict__["gates"] = str(tmp_path)
    return main.__dict__


def waited(job: client.Job, gate: Path) -> tuple[JobState, Waiting]:
    """The state once rank 0 waits for rank 1 in one more collective; then rank 1 is let go on, and so does rank 0."""

    def said() -> Waiting | None:
        return job.state.ranks[0].waiting if 0 in job.state.ranks else None

    def says_for_whom() -> bool:
        waiting = said()
        return waiting is not None and job.state.awaited(waiting) == [1]

    assert wait_until(says_for_whom, PATIENCE), (job.state, job.logs())
    state, waiting = job.state, said()
    assert waiting is not None
    gate.touch()
    assert wait_until(lambda: said() is None, PATIENCE), (job.state, job.logs())
    return state, waiting


@pytest.mark.timeout(240)
def test_a_rank_in_a_collective_says_so_and_for_whom(notebook: dict[str, Any], tmp_path: Path) -> None:
    job = client.submit(client.Request(SOURCE, "Cell In[3]", 2, Options(ranks=2), notebook))

    state, waiting = waited(job, tmp_path / "1")
    assert (waiting.operation, waiting.group, waiting.number) == ("all_reduce", "gloo:1", 1)
    assert (waiting.size, waiting.members) == (4000, None)
    assert state.ranks[0].ready <= waiting.since

    state, waiting = waited(job, tmp_path / "2")
    assert (waiting.operation, waiting.group, waiting.size) == ("all_reduce", "gloo:0", 440)  # DDP's, issued from C++
    assert state.ranks[1].entered["gloo:0"] == waiting.number - 1
    sentence = f"rank 0 waits in all_reduce #{waiting.number} for rank 1, for 12.0 s"
    assert job_text.waiting_lines(state, waiting.since + 12) == [sentence]

    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    kinds = [(event.kind, event.rank) for event in job.events()]
    assert kinds.count(("rank.waiting", 0)) == kinds.count(("rank.resumed", 0)) == 2
    assert ("rank.waiting", 1) not in kinds
    assert job.logs(stream="err") == ""
