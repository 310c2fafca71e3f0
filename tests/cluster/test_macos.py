"""A laptop where there is no /proc, as on macOS: everything works but ranks of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tornado.websocket import websocket_connect

from jupyter_torchdist.store import catalog
from tests.cluster.cells import MEET, PATIENCE, PYTHON
from tests.cluster.cluster import Cluster
from tests.cluster.laptop import Mac
from tests.cluster.resetting import end_masters
from tests.leaks import wait_until
from tests.notebook import Cell, Notebook

pytestmark = pytest.mark.timeout(300)

ON_TWO = "%%distribute --hosts node1,node2 --ranks 2 --watch text --grace 1s"
LACKS = "[os.path.exists(path) for path in ('/proc/self', '/dev/shm')] + [hasattr(os, 'pidfd_open')]"
COUNT = """
import os, time
print("line 0", flush=True)
number = 0
while not os.path.exists("/srv/enough"):
    time.sleep(0.05)
for number in range(1, 20):
    print("line", number, flush=True)
"""


@pytest.fixture
def mac(cluster: Cluster, tmp_path: Path) -> Iterator[Mac]:
    (tmp_path / "torchdist.toml").write_text(f'[hosts]\npython = "{PYTHON}"\n')
    mac = Mac()
    yield mac
    end_masters(cluster)
    mac.close()


@pytest.fixture
def kernel(mac: Mac, tmp_path: Path) -> Iterator[Notebook]:
    with Notebook(tmp_path, mac.environ, within=mac.within) as kernel:
        yield kernel.load()


def ended(mac: Mac) -> list[str]:
    return [job.state for job in reversed(catalog.jobs(mac.home))]


def refusal(cell: Cell) -> str:
    assert cell.error is not None, cell.text
    return f"{cell.error.name}: {cell.error.traceback}"


def test_cells_run_on_hosts(kernel: Notebook, mac: Mac) -> None:
    kernel.run("import os, torch\nweights = torch.zeros(3)")
    assert kernel.value(LACKS) == [False, False, False]

    for _ in range(2):
        cell = kernel.run(f"{ON_TWO}\n{MEET}weights += total\nfloat(weights.sum())")
        for rank in (0, 1):
            assert f"[rank {rank}] rank {rank} on node{rank + 1} sum 1.0" in cell.stdout
    assert kernel.value("weights.tolist()") == [2.0, 2.0, 2.0]
    assert (cell.result or {})["text/plain"] == "6.0"

    words = refusal(kernel.try_run(f"{ON_TWO}\n{MEET}if dist.get_rank():\n    {{}}['no']\ndist.barrier()\n"))
    assert "KeyError" in words and re.search(r"Cell In\[\d+\].*\bline 8\b", words), words

    cell = kernel.start(f"{ON_TWO}\n{COUNT}")
    kernel.wait_for(cell, "[rank 1] line 0")
    kernel.interrupt()
    kernel.finish(cell)
    assert refusal(cell).startswith("JobCancelled")
    assert ended(mac) == ["succeeded", "succeeded", "failed", "cancelled"]

    job = catalog.jobs(mac.home)[0].job
    assert kernel.run("%dist jobs").stdout.count("succeeded") == 2
    assert "node2" in kernel.run(f"%dist show {job}").text
    assert "[rank 1] line 0" in kernel.run(f"%dist logs {job}").text
    planned = kernel.run(f"{ON_TWO} --strategy ddp --plan\n{TRAINS}").text
    assert "not rehearsed" not in planned and re.search(r"parameters +48 B", planned), planned


TRAINS = """
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
"""


def test_ranks_of_this_machine_are_refused(kernel: Notebook, mac: Mac) -> None:
    words = refusal(kernel.try_run("%%distribute --ranks 2\npass"))
    assert "LaunchError: ranks on this machine" in words and "need Linux" in words and "--hosts HOST" in words
    assert ended(mac) == []
    found = kernel.run("%dist doctor").stdout
    assert "warning  ranks: this machine can have none" in found and "\n1 warning" in found
    assert "GPU" not in found
    here = kernel.run("%dist nodes").stdout
    assert re.search(r"^\S+: \d+ cores?, python 3", here), here
    assert "no warm processes" in here


@pytest.fixture
def server(mac: Mac, tmp_path: Path) -> Iterator[str]:
    """The address of a Jupyter server."""
    runtime = tmp_path / "runtime"
    extension = '--ServerApp.jpserver_extensions={"jupyter_torchdist": True}'
    words = [sys.executable, "-m", "jupyter_server", "--port=0", "--no-browser", "--allow-root", extension]
    environ = {**mac.environ, "JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_TOKEN": "t"}
    log = (tmp_path / "server.log").open("wb")
    process = subprocess.Popen([*mac.within, *words], env=environ, cwd=tmp_path, stdout=log, stderr=log)
    try:
        told = runtime / f"jpserver-{process.pid}.json"
        assert wait_until(lambda: told.exists() and told.read_text().endswith("}"), PATIENCE), log.name
        yield json.loads(told.read_text())["url"] + "torchdist/api/jobs"
    finally:
        process.terminate()
        process.wait(PATIENCE)
        log.close()


def asked(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}?token=t") as answer:
        found = json.loads(answer.read())
    assert isinstance(found, dict)
    return found


async def seen(url: str) -> str:
    """What a view shows first of the logs of rank 0."""
    view = await websocket_connect(f"{url.replace('http', 'ws', 1)}/feed?token=t")
    await view.write_message(json.dumps({"type": "open", "logs": {}}))
    text = ""
    while not text.endswith("\n"):
        said = await asyncio.wait_for(view.read_message(), PATIENCE)
        message = json.loads(said or "{}")
        pieces = message["segments"] if message.get("type") == "lines" else []
        text += "".join(piece["text"] for piece in pieces if piece["file"] == "0.out")
    view.close()
    return text


def test_a_job_goes_on_without_its_kernel_and_its_driver(
    kernel: Notebook, mac: Mac, server: str, cluster: Cluster, tmp_path: Path
) -> None:
    """The panel lists it, a view follows it, and ``attach`` starts another driver."""
    cell = kernel.start(f"{ON_TWO}\n{COUNT}number")
    kernel.wait_for(cell, "[rank 1] line 0")
    kernel.kill()
    (row,) = asked(server)["jobs"]
    assert (row["state"], row["effective"]) == ("running", "running")
    assert asyncio.run(seen(f"{server}/{row['job']}")) == "line 0\n"

    job = mac.job(row["job"])
    (driver,) = [event.data["process"] for event in job.events() if event.kind == "job.driver"]
    os.kill(driver["pid"], signal.SIGKILL)
    assert wait_until(lambda: asked(server)["jobs"][0]["effective"] == "orphaned", PATIENCE)
    attached = mac.start("attach", job.id)
    assert wait_until(lambda: asked(server)["jobs"][0]["effective"] == "running", PATIENCE)
    for node in ("node1", "node2"):
        cluster.write(node, "/srv/enough", "")
    out, err = attached.communicate(timeout=PATIENCE)
    assert attached.returncode == 0, err
    for rank in (0, 1):
        assert [line for line in out.splitlines() if f"[rank {rank}]" in line][-1].endswith("line 19"), out
    assert job.state.state == "succeeded" and job.value == 19
    for node in ("node1", "node2"):
        cluster.run(node, "rm", "/srv/enough")
