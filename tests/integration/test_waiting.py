"""A rank says when it waits in a collective, the others how far they are: two real ranks, by what is in the journal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import client
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


@pytest.fixture
def notebook(notebook: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    notebook["gates"] = str(tmp_path)
    return notebook


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


HANGS = """
import time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        time.sleep(600)

def load():
    for batch in DataLoader(Slow(), num_workers=1):
        pass

def hold():  # C code that keeps the GIL
    import re
    re.match("(a+)+b", "a" * 64)

ones = torch.ones(4)
if dist.get_rank() == 0:
    dist.all_reduce(ones)
else:
    {}
"""


REDUCES, WAITS = "    dist.all_reduce(ones)\n", "rank 0 waits in all_reduce #1 for rank 1"
WORKER = "; its worker is at Cell In[3], line 11, in __getitem__"
DIFFERENT = "ranks call different collectives: rank 0 all_reduce #1 (16 B) at Cell In[3], line {}; rank 1 {}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("does", "at", "lines"),
    [
        ("time.sleep(600)", "    time.sleep(600)", [WAITS, "  rank 1 is at Cell In[3], line {1}"]),
        (
            "load()",
            "for batch in",
            [WAITS, "  rank 1 is at Cell In[3], line {1}, in DataLoader" + WORKER],
        ),
        (
            "hold()",
            "re.match",
            ["rank 0 waits in all_reduce #1", "  rank 1 is at Cell In[3], line {1}, in re.match"],
        ),
        (
            "dist.broadcast(ones, 0)",
            "dist.broadcast",
            [
                "rank 0 waits in all_reduce #1",
                "rank 1 waits in broadcast #1",
                DIFFERENT.format("{0}", "broadcast #1 (16 B) at Cell In[3], line {1}"),
            ],
        ),
    ],
    ids=["user code", "data loader", "the GIL held", "another operation"],
)
def test_a_hang_names_rank_and_line(notebook: dict[str, Any], does: str, at: str, lines: list[str]) -> None:
    source = HANGS.format(does)
    numbers = [source[: source.rindex(text)].count("\n") + 2 for text in (REDUCES.strip("\n"), at)]
    expected = [line.format(*numbers) for line in lines]
    job = client.submit(client.Request(source, "Cell In[3]", 2, Options(ranks=2), notebook))

    def said() -> list[str]:
        return [line.partition(", for ")[0] for line in job_text.waiting_lines(job.state, time.time())]

    assert wait_until(lambda: said() == expected), (said(), expected, job.logs(), job.state)
    job.kill()
    assert job.wait(PATIENCE).state == "cancelled"


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
    assert job_text.waiting_lines(state, waiting.since + 12)[0] == sentence  # then where rank 1 is, after 5 s

    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    kinds = [(event.kind, event.rank) for event in job.events()]
    assert kinds.count(("rank.waiting", 0)) == kinds.count(("rank.resumed", 0)) == 2
    assert ("rank.waiting", 1) not in kinds
    assert job.logs(stream="err") == ""
