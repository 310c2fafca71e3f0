"""What is said of ranks on two hosts: which one holds up the others, where each is, and on what a step is spent."""

from __future__ import annotations

import json
import time

import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.verbs import parse
from jupyter_torchdist.verbs.perform import perform
from jupyter_torchdist.views import job_text
from tests.cluster.cells import start
from tests.leaks import wait_until

PATIENCE = 150.0
STUCK = """
import time
import torch, torch.distributed as dist

def read():
    time.sleep(600)

if dist.get_rank() == 3:
    read()
dist.all_reduce(torch.ones(4))
"""
TRAINED = """
import torch
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while True:
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""


def said(words: str) -> str:
    return "".join(perform(parse.parse(words, "%dist")))


def ended(job: Job) -> None:
    job.kill()
    assert job.wait(PATIENCE).state == "cancelled"


@pytest.mark.timeout(300)
def test_the_rank_that_holds_up_both_hosts_is_named_with_its_host(pool: DriverPool) -> None:
    job = start(pool, STUCK, "--hosts node1,node2 --ranks 4 --stall 2")
    assert wait_until(lambda: job.state.stalled, PATIENCE), (job.state, job.logs())
    line = job_text.stall_line(job.state, time.time())
    assert "rank 3 (node2) has not entered all_reduce #1; it is at Cell In[3], line 7, in read" in line
    assert line.endswith("3 ranks wait for it")
    told = {one["rank"]: one["place"] for one in json.loads(said(f"stacks {job.id} --json"))["stacks"]}
    assert told == {**dict.fromkeys(range(3), "Cell In[3], line 11"), 3: "Cell In[3], line 7, in read"}
    ended(job)


@pytest.mark.timeout(300)
def test_a_profile_has_the_ranks_of_both(pool: DriverPool) -> None:
    job = start(pool, TRAINED, "--hosts node1,node2 --ranks 2")
    assert wait_until(lambda: job.state.state == "running", PATIENCE), (job.state, job.logs())
    lines = said(f"profile {job.id} --steps 2").split("\n")
    assert [line.split()[:4] for line in lines[1:3]] == [["rank", "0", "(node1)", "2"], ["rank", "1", "(node2)", "2"]]
    ended(job)
