"""Ranks end: no destructor of torch's hangs, and who does not end all the same is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from jupyter_torchdist.client import Request, submit
from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.client.job import Job
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.protocol.state import JobState

PATIENCE = 100.0

LAST_IN_CXX = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def train():
    dist.init_process_group("gloo")
    net = DistributedDataParallel(nn.Linear(2, 2))
    net(torch.ones(1, 2)).sum().backward()
    time.sleep(dist.get_rank() / 2)
    done = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    done.then(lambda future: time.sleep(1))
    done.wait()
    time.sleep(0.2)
    dist.destroy_process_group()

train()
print("over")
"""
"""The last reference to the group goes with the model, while a thread of the group's will need the GIL once more."""

TUTORIAL = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def train():
    dist.init_process_group("gloo")
    net = DistributedDataParallel(nn.Linear(20, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        net(torch.rand(32, 20)).mean().backward()
        optimizer.step()
    dist.destroy_process_group()

train()
"""

NEVER_WAITED_FOR = """
import time, torch, torch.distributed as dist
dist.barrier()
if dist.get_rank() == 0:
    dist.all_reduce(torch.zeros(1), async_op=True)
else:
    time.sleep(4)
dist.destroy_process_group()
print("over")
"""

GROUPS = """
import os, torch, torch.distributed as dist
for _ in range(40):
    group = dist.new_group()
    dist.all_reduce(torch.ones(2), group=group)
    dist.destroy_process_group(group)
del group
threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
"""

SITS = """
import atexit, ctypes, os, threading, time

def work():
    time.sleep(9)

def leave():
    for _ in range(3):
        ctypes.PyDLL(None).sleep(3)  # with the GIL held; a signal cuts one short

if os.environ["RANK"] == "0":
    threading.Thread(target=work).start()
else:
    atexit.register(leave)
"""


@pytest.fixture(autouse=True)
def closing(home: object) -> Iterator[None]:
    yield
    pool().close()


def run(source: str, kind: str = "script", fresh: bool = False) -> Job:
    return submit(Request(source, "train.py", 1, Options(ranks=2, fresh=fresh), kind=kind))


def ended(job: Job) -> JobState:
    try:
        return job.wait(PATIENCE)
    finally:
        if not job.state.final:
            job.kill()
            job.wait(PATIENCE)


@pytest.mark.parametrize(("kind", "fresh"), [("script", False), ("script", True), ("cell", False)])
def test_a_model_that_goes_after_its_groups_hangs_nobody(kind: str, fresh: bool) -> None:
    job = run(LAST_IN_CXX, kind, fresh)
    assert ended(job).state == "succeeded"
    assert job.logs(stream="out").count("over") == 2


def test_a_function_whose_model_goes_after_its_groups_hangs_nobody() -> None:
    def call(source: str) -> None:
        exec(source, {"__name__": "train"})

    request = Request(options=Options(ranks=2), kind="function", function=call, args=(LAST_IN_CXX,))
    assert ended(submit(request)).state == "succeeded"


def test_a_collective_that_nobody_waits_for_holds_no_end_up() -> None:
    """Its destructor waits half an hour for the others."""
    state = ended(run(NEVER_WAITED_FOR))
    assert state.state == "succeeded"
    assert state.ranks[0].ended < state.ranks[1].ended


def test_groups_that_were_destroyed_are_kept_for_a_while_only() -> None:
    job = run(GROUPS, "cell")
    assert ended(job).state == "succeeded"
    values = job.result()
    assert values["threads"] < 80 and values["descriptors"] < 200


def test_who_does_not_end_is_named_with_the_place() -> None:
    job = run(SITS)
    state = ended(job)
    assert state.state == "succeeded"
    notes = sorted(state.notes)
    assert len(notes) == 2
    assert notes[0].startswith(
        "rank 0 has run its code but does not exit: it waits for its threads (train.py, line 5, work)"
    )
    assert notes[1].startswith("rank 1 has run its code but does not exit: it is in train.py, line 9, leave")


@pytest.fixture
def busy() -> Iterator[None]:
    """Something computes on every processor."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_tutorial_hangs_at_its_end_on_a_busy_machine(busy: Callable[[], None]) -> None:
    for _ in range(200):
        assert ended(run(TUTORIAL)).state == "succeeded"
