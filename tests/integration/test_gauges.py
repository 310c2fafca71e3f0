"""What real ranks take, from the agent that looks at them to the view, while they run and after their end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist import client
from jupyter_torchdist.client import Request, submit
from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.feed.feed import Feed
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.gauges import Gauges
from jupyter_torchdist.protocol.paths import home as data
from jupyter_torchdist.protocol.process import ProcessId, processes_of_job
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store import gauges
from jupyter_torchdist.verbs.parse import parse
from jupyter_torchdist.verbs.perform import perform
from tests.leaks import wait_until

PATIENCE = 60.0
MB = 1_000_000

UNLIKE = """
import os, time, torch
if os.environ["RANK"] == "0":
    kept = torch.ones(300_000_000, dtype=torch.uint8)
    while not os.path.exists(stop):
        pass
else:
    while not os.path.exists(stop):
        time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def closing(home: Path) -> Iterator[None]:
    yield
    pool().close()


def told(job: client.Job) -> dict[str, dict[str, int]]:
    """What a view that opens now is told of the ranks."""
    feed = Feed(job.paths, data())
    feed.receive({"type": "open", "logs": {}})
    said = feed.poll(time.monotonic())
    feed.close()
    (status,) = [message for message in said if message["type"] == "status"]
    return dict(status["gauges"])


def test_a_rank_that_computes_and_holds_memory_and_one_that_does_not(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = submit(Request(UNLIKE, "Cell In[3]", 2, Options(ranks=2), {"stop": str(stop)}))

    def seen() -> bool:
        found = gauges.read(job.paths)
        return len(found) == 2 and all(one.cpu is not None for one in found.values()) and (found[0].cpu or 0) > 30

    try:
        assert wait_until(seen, PATIENCE), gauges.read(job.paths)
        busy, idle = (gauges.read(job.paths)[rank] for rank in (0, 1))
        assert told(job)["0"]["memory"] >= 300 * MB
    finally:
        stop.touch()
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert 30 < (busy.cpu or 0) <= 110  # a busy machine gives it less than a core
    assert (idle.cpu or 0) <= 25
    assert (busy.memory or 0) - (idle.memory or 0) > 290 * MB
    assert (busy.gpu, busy.gpu_memory, busy.gpu_total) == (None, None, None)

    assert processes_of_job(job.id) == []
    assert told(job)["0"]["memory_peak"] >= 300 * MB
    page = "".join(perform(parse(["show", job.id], "torchdist")))
    assert "MEMORY" in page and "peak" in page and "GPU MEMORY" not in page
    left = sorted(path.name for path in job.paths.node("node0").root.iterdir())
    assert "gauges.json" in left and not [name for name in left if name.endswith(".tmp")]
    assert job.paths.node("node0").gauges.stat().st_mode & 0o077 == 0
    assert b"memory_peak" not in job.paths.journal.read_bytes(), "samples are no changes of state"


def test_a_job_without_the_file_opens_as_ever() -> None:
    job = submit(Request("x = 1\n", "Cell In[3]", 2, Options(ranks=2), {}))
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    job.paths.node("node0").gauges.unlink(missing_ok=True)
    assert told(job) == {}
    assert "MEMORY" not in "".join(perform(parse(["show", job.id], "torchdist")))


def test_the_next_agent_looks_on_and_keeps_the_highest(own_runtime: Path, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    source = "import os, time, torch\nwhile not os.path.exists(stop + '.more'):\n    time.sleep(0.02)\n"
    source += "kept = torch.ones(200_000_000, dtype=torch.uint8)\n"
    source += "while not os.path.exists(stop):\n    time.sleep(0.02)\n    if os.path.exists(stop + '.less'):\n"
    source += "        kept = None\n"
    job = submit(Request(source, "Cell In[3]", 2, Options(ranks=1), {"stop": str(stop)}))

    def latest() -> Gauges:
        return gauges.read(job.paths).get(0, Gauges())

    try:
        assert wait_until(lambda: latest().memory is not None, PATIENCE)
        before = latest().memory or 0
        (tmp_path / "stop.more").touch()
        assert wait_until(
            lambda: (latest().memory or 0) > before + 190 * MB, PATIENCE
        )  # all of it, less what a first look was too early for
        high = latest().memory_peak or 0
        (identity,) = own_runtime.glob("agent-*/agent.json")
        assert ProcessId.from_json(codec.loads(identity.read_bytes())["process"]).signal(signal.SIGKILL)
        (tmp_path / "stop.less").touch()
        assert wait_until(lambda: (latest().memory or high) < high - 100 * MB, PATIENCE)
        assert (latest().memory_peak or 0) >= high
    finally:
        stop.touch()
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    pool().close()  # its process is of this runtime directory
