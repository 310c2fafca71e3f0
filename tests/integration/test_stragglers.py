"""Ranks for which the others wait again and again: named with what they do and their line. Real ranks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from jupyter_torchdist import client
from jupyter_torchdist.feed.feed import Feed
from jupyter_torchdist.protocol.paths import home
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store import gauges
from jupyter_torchdist.verbs import parse
from jupyter_torchdist.verbs.perform import perform
from tests.leaks import wait_until

PATIENCE = 150.0

SOURCE = """
import socket, time, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

rank, left, right = dist.get_rank(), *socket.socketpair()

class Rows(Dataset):
    def __len__(self):
        return 1000000

    def __getitem__(self, row):
        time.sleep(LOADS[rank])
        return torch.ones(8)

def work():
    time.sleep(WORKS[rank])

def ask():
    right.settimeout(ASKS[rank])
    try:
        right.recv(1)
    except TimeoutError:
        pass

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for x in DataLoader(Rows(), 2):
    work()
    ask()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""

LOAD, WORK, ASK = 14, 18, 23
"""Lines of the cell, as its user counts them."""


def said(words: str) -> str:
    return "".join(perform(parse.parse(words, "%dist")))


def begun(notebook: dict[str, Any], name: str, **times: list[float]) -> client.Job:
    even = [0.002] * 3
    notebook.update({"LOADS": even, "WORKS": even, "ASKS": even, **times})
    return client.submit(client.Request(SOURCE, "Cell In[3]", 2, Options(ranks=3, name=name), notebook))


def ended(job: client.Job) -> None:
    job.kill()
    job.wait(PATIENCE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("times", "code", "does"),
    [
        ({"LOADS": [0.01, 0.06, 0.01]}, "late-by-input", f"it waits for data at Cell In[3], line {LOAD}"),
        ({"WORKS": [0.02, 0.12, 0.02]}, "late-by-work", f"it works at Cell In[3], line {WORK}"),
        ({"ASKS": [0.02, 0.12, 0.02]}, "late-by-network", f"it waits for the network at Cell In[3], line {ASK}"),
    ],
)
def test_a_slow_rank(notebook: dict[str, Any], times: dict[str, list[float]], code: str, does: str) -> None:
    job = begun(notebook, "slow", **times)
    assert wait_until(lambda: code in said("show slow"), PATIENCE), (said("show slow"), gauges.read(job.paths))
    page = said("show slow")
    [line] = [line for line in page.split("\n") if line.startswith("warning ")]
    assert line.startswith(f"warning {code}: rank 1 holds up the others for "), page
    assert does in line, page
    assert "\n  → " in page

    feed = Feed(job.paths, home())
    feed.receive({"type": "open", "logs": {}})
    statuses: list[dict[str, Any]] = []

    def told() -> bool:
        statuses.extend(message for message in feed.poll(time.monotonic()) if message["type"] == "status")
        return bool(statuses)

    assert wait_until(told, PATIENCE)
    [finding] = statuses[0]["findings"]
    assert (finding["code"], finding["rank"], finding["severity"]) == (code, 1, "warning")
    assert finding["evidence"][0]["text"] in SOURCE
    ended(job)
    assert "late-by" not in said("show slow"), "of a job that has ended nobody waits"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_equal_ranks_raise_nothing(notebook: dict[str, Any]) -> None:
    job = begun(notebook, "even", WORKS=[0.05] * 3)

    def looked_at() -> bool:
        found = gauges.read(job.paths)
        return len(found) == 3 and all((one.looks or 0) >= 160 for one in found.values())

    seen: list[str] = []

    def watched() -> bool:
        seen.append(said("show even"))
        return looked_at()

    assert wait_until(watched, PATIENCE), gauges.read(job.paths)
    assert not [page for page in seen if "late-by" in page]
    waits = json.loads(said("show even --json"))["gauges"]["0"]["waits"]
    assert waits is not None and waits < 90
    ended(job)
