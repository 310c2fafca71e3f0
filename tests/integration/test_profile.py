"""``%dist profile JOB``: on what ranks spend a step, and one timeline of all ranks. Real ranks."""

from __future__ import annotations

import gzip
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import client
from jupyter_torchdist.cli import main
from jupyter_torchdist.client import profiles
from jupyter_torchdist.protocol.errors import OptionError, UserError
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.verbs import parse
from jupyter_torchdist.verbs.perform import perform
from tests.integration.test_asked_stacks import Late
from tests.leaks import wait_until
from tests.notebook import CellFailed, Notebook

PATIENCE = 120.0

TRAINED = """
import itertools, time, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 64)), 8)
for (x,) in itertools.chain.from_iterable(itertools.repeat(loader)):
    time.sleep(0.02 * dist.get_rank())
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""

ONE_HANGS = """
import time, torch
import torch.distributed as dist

def wait():
    time.sleep(600)

weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.01)
wait() if dist.get_rank() == 1 else None
while True:
    weight.sum().backward()
    optimizer.step()
"""

OWN = """
import time, torch
from pathlib import Path

weight = torch.zeros(4, requires_grad=True)

def until(name):
    while not Path(gates, name).exists():
        weight.sum().backward()
        time.sleep(0.05)
        if name == "second" and torch.autograd._profiler_enabled():
            Path(gates, "ours").touch()

with torch.profiler.profile() as first:
    until("first")
until("second")
with torch.profiler.profile() as second:
    weight.sum().backward()
seen = [len(one.events()) > 0 for one in (first, second)]
"""


def said(words: str) -> str:
    return "".join(perform(parse.parse(words, "%dist")))


def submitted(notebook: dict[str, Any], source: str, name: str, ranks: int, **options: Any) -> client.Job:
    job = client.submit(client.Request(source, "Cell In[3]", 2, Options(ranks=ranks, name=name, **options), notebook))
    assert wait_until(lambda: job.state.state == "running", PATIENCE), (job.state, job.logs())
    return job


def requests(job: client.Job) -> bytes:
    """What the agent has passed on to the ranks."""
    return b"".join(path.read_bytes() for path in job.paths.nodes.glob("*/profile-requests"))


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


@pytest.mark.timeout(300)
def test_all_ranks_on_one_timeline(notebook: dict[str, Any], tmp_path: Path) -> None:
    job = submitted(notebook, TRAINED, "trained", 2)
    for steps in ("0", "-1", "many", "1001"):
        with pytest.raises(OptionError, match="expected a whole number from 1 to 1000"):
            said(f"profile trained --steps {steps}")
    with pytest.raises(UserError, match="cannot be a file"):
        said(f"profile trained --out {tmp_path}/nowhere/file")
    copy = tmp_path / "timeline.json.gz"
    text = said(f"profile trained --steps 3 --out {copy}")
    lines = text.split("\n")
    assert lines[0].split()[:5] == ["RANK", "STEPS", "A", "STEP", "COMPUTE"]
    for rank in (0, 1):
        assert re.match(rf"rank {rank} \({job.state.ranks[rank].host}\) +3 +[\d.]+ ms ", lines[1 + rank]), text
    assert "a step ends with optimizer.step()" in text
    assert f"timeline: {copy}" in text and "https://ui.perfetto.dev" in text

    events = events_of(copy)
    rows = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert rows == {rank: f"rank {rank} ({job.state.ranks[rank].host})" for rank in (0, 1)}
    for rank in (0, 1):
        found = [event["name"] for event in events if event["pid"] == rank and event.get("cat") == "step"]
        assert found == ["warm-up", "step 1", "step 2", "step 3"]
    spans: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for event in events:
        if event["name"] == "gloo:all_reduce":
            spans[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(spans[0]) >= 3
    for begin, end in spans[1][1:-1]:  # on one clock, a collective is under way on both ranks at once
        assert any(one < end and begin < other for one, other in spans[0])

    page = said("show trained")
    assert "profile:\nRANK" in page and str(job.paths.root / "profile-") in page
    told = json.loads(said("profile trained --steps 2 --json"))["ranks"][1]["told"]
    assert told["steps"] == 2 and told["idle"] > 0.015, "it sleeps for 20 ms"
    parts = told["compute"] + told["communication"] - told["overlap"] + told["loading"] + told["idle"]
    assert parts == pytest.approx(told["step"], rel=0.05)
    assert told["loading"] > 0 and told["compute"] > 0

    job.kill()
    job.wait(PATIENCE)
    assert "rank 1" in said("profile trained"), "the latest one"
    with pytest.raises(UserError, match=f"job {job.id} has ended: it has no steps any more"):
        said("profile trained --steps 3")


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_one_at_a_time(notebook: dict[str, Any]) -> None:
    job = submitted(notebook, TRAINED, "once", 2)
    found: list[str] = []
    first = threading.Thread(target=lambda: found.append(said("profile once --steps 1000 --within 15s")))
    first.start()
    assert wait_until(lambda: b"1000" in requests(job), PATIENCE)
    busy: list[str] = []

    def refused() -> bool:
        try:
            said("profile once --steps 1")
        except UserError as error:
            busy.append(str(error))
        return bool(busy)

    assert wait_until(refused, PATIENCE)
    assert "on every rank, another profile of this job is not finished yet" in busy[0]
    first.join()
    assert re.search(r"rank 0 .*: \d+ steps of 1000: no more ended within 15 s", found[0]), found
    job.kill()
    job.wait(PATIENCE)


@pytest.mark.timeout(300)
def test_a_rank_without_steps_is_named_and_the_others_are_shown(notebook: dict[str, Any]) -> None:
    job = submitted(notebook, ONE_HANGS, "hangs", 2)
    curves = [job.paths.node(node.name).metrics(0) for node in job.plan.nodes]
    assert wait_until(lambda: any(path.stat().st_size for path in curves), PATIENCE)
    text = said("profile hangs --steps 2 --within 3s")
    host = job.state.ranks[0].host
    assert f"\nrank 0 ({host})  2 " in text
    assert f"\nrank 1 ({host}): no step ended within 3 s" in text
    job.kill()
    job.wait(PATIENCE)


@pytest.mark.timeout(300)
def test_no_rank_makes_a_step(notebook: dict[str, Any]) -> None:
    job = submitted(notebook, "import time\ntime.sleep(600)", "sleeps", 1)
    with pytest.raises(UserError, match="on every rank, no step ended within 1 s") as refused:
        said("profile sleeps --within 1s")
    assert f"`%dist stacks {job.id}`" in str(refused.value)
    with pytest.raises(UserError, match="no step ended"):
        said("profile sleeps --within 1s")
    job.kill()
    job.wait(PATIENCE)
    with pytest.raises(UserError, match="has ended"):
        said("profile sleeps")


@pytest.mark.timeout(300)
def test_a_profiler_of_the_code_itself_goes_first(notebook: dict[str, Any], tmp_path: Path) -> None:
    notebook["gates"] = str(tmp_path)
    job = submitted(notebook, OWN, "own", 1)
    with pytest.raises(UserError, match="its code runs a profiler of its own, and torch cannot run two"):
        said("profile own --steps 1")
    (tmp_path / "first").touch()
    assert wait_until(lambda: _profiled("own"), PATIENCE)
    (tmp_path / "ours").unlink()
    found: list[str] = []
    other = threading.Thread(target=lambda: found.append(said("profile own --steps 1000 --within 100s")))
    other.start()
    assert wait_until(lambda: (tmp_path / "ours").exists(), PATIENCE)
    (tmp_path / "second").touch()
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert job.result()["seen"] == [True, True]
    other.join()
    assert re.search("steps? of 1000: its code started a profiler of its own", found[0]), found
    assert "a step ends with backward()" in found[0]


def _profiled(name: str) -> bool:
    try:
        return "backward()" in said(f"profile {name} --steps 1")
    except UserError:
        return False


@pytest.mark.timeout(300)
def test_a_rank_before_its_first_line_and_a_command(
    notebook: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook["late"] = Late(tmp_path / "gate")
    job = client.submit(client.Request("late", "Cell In[4]", 2, Options(ranks=1, name="late"), notebook))
    with pytest.raises(UserError, match=f"no rank of job {job.id} runs its code yet"):
        profiles.take(job)
    (tmp_path / "gate").touch()
    assert job.wait(PATIENCE).state == "succeeded", job.exception()

    assert main(["run", "--no-python", "--ranks", "1", "--background", "--name", "sleeps", "sleep", "600"]) == 0
    job = client.attach("sleeps")
    with pytest.raises(UserError, match="runs a command: its ranks have no Python code"):
        said("profile sleeps")
    job.kill()
    job.wait(PATIENCE)


@pytest.mark.timeout(300)
def test_from_the_beginning(one_kernel: Notebook) -> None:
    loop = "import torch\nw = torch.zeros(4, requires_grad=True)\no = torch.optim.SGD([w], 0.1)\nfor _ in range({}):\n"
    step = "    w.sum().backward(); o.step()\n"
    text = one_kernel.run(f"%%distribute --ranks 2 --profile 3\n{loop.format(6)}{step}").stdout
    assert re.search(r"\nrank 1 \(.*\) +3 ", text) and "profile-start.json.gz" in text, text
    text = one_kernel.run(f"%%distribute --ranks 1 --profile 5\n{loop.format(3)}{step}").stdout
    assert "1 step of 5: its code has ended" in text, text
    text = one_kernel.run("%%distribute --ranks 1 --profile 5\npass").stdout
    assert "rank 0" in text and "its code ended before its first step had ended" in text, text
    with pytest.raises(CellFailed, match=r"rank 0 .*: its code failed after \d steps?\n"):
        one_kernel.run(f"%%distribute --ranks 1 --profile 5\n{loop.format(3)}{step}raise ValueError('no')")


@pytest.mark.timeout(300)
def test_what_user_code_writes_into_the_requests_is_passed_over(notebook: dict[str, Any]) -> None:
    job = submitted(notebook, TRAINED, "rubbish", 1)
    for path in job.paths.nodes.glob("*/profile-requests"):
        path.write_bytes(path.read_bytes() + b'rubbish\n{"id":"../x","steps":1,"within":1}\n[]\n{"id":1}\n')
    assert "optimizer.step()" in said("profile rubbish --steps 1")
    job.kill()
    job.wait(PATIENCE)
