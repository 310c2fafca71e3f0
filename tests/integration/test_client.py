"""The client against the real driver, agent and ranks: no notebook, no fake."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import jupyter_torchdist as td
from jupyter_torchdist.client import Job, Request, attach, rerun, submit
from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.protocol.errors import JobCancelled, RankFailed
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.process import ProcessId, processes_of_job
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store import catalog
from tests.leaks import wait_until

PATIENCE = 60.0
ODD = "class Odd(Exception):\n    def __init__(self, a, b):\n        super().__init__(a)\n        self.b = b"
SLEEPS = "import time\nprint('asleep', flush=True)\nwhile True:\n    time.sleep(0.05)\n"


@pytest.fixture(autouse=True)
def closing(home: Path) -> Iterator[None]:
    yield
    pool().close()


def cell(source: str, namespace: dict[str, Any] | None = None, options: Options | None = None) -> Request:
    return Request(source, "Cell In[3]", 2, options or Options(ranks=2), namespace or {})


def asleep(job: Job) -> bool:
    return job.logs(stream="out").count("asleep") == job.plan.world_size


def test_a_cell_trains_together_and_its_values_come_back(notebook: dict[str, Any]) -> None:
    exec("import torch\nimport torch.distributed as dist\nweights = torch.zeros(3)\nhistory = []", notebook)
    weights, history = notebook["weights"], notebook["history"]
    source = (
        "one = torch.full((3,), float(dist.get_rank() + 1))\ndist.all_reduce(one)\nweights += one\n"
        "history.append(float(one[0]))\nprint('sum', one[0].item())\nfloat(weights.sum())\n"
    )
    job = submit(cell(source, notebook))
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert sorted(job.logs(stream="out").splitlines()) == ["[rank 0] sum 3.0", "[rank 1] sum 3.0"]
    assert job.value == 9.0
    assert {"one", "weights", "history"} <= set(job.bring(notebook).names)
    assert notebook["weights"] is weights
    assert weights.tolist() == [3.0, 3.0, 3.0]
    assert notebook["history"] is history
    assert history == [3.0]


def test_the_first_failing_rank_raises_here_with_the_notebooks_lines(notebook: dict[str, Any]) -> None:
    exec(ODD, notebook)
    source = "import os, time\nif os.environ['RANK'] == '1':\n    raise Odd('text', 5)\ntime.sleep(60)\n"
    job = submit(cell(source, notebook))
    state = job.wait(PATIENCE)
    with pytest.raises(notebook["Odd"], match="text") as caught:
        job.raise_for_state()
    assert caught.value.b == 5
    assert (state.state, state.first_failure) == ("failed", 1)
    assert state.ranks[1].error is not None
    assert state.ranks[1].error.frames[-1][:2] == ("Cell In[3]", 4)
    assert "1 other rank was stopped because of this" in caught.value.__notes__
    assert processes_of_job(job.id) == []


def test_a_rank_that_is_killed_says_so() -> None:
    job = submit(cell("import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"))
    job.wait(PATIENCE)
    error = job.exception()
    told = {path.name: path.read_text() for path in job.paths.root.rglob("*.events")}
    assert isinstance(error, RankFailed), told
    assert "rank 1" in error.message
    assert "was killed (SIGKILL)" in error.message


def test_interrupt_and_kill_leave_no_process() -> None:
    for ask in (Job.interrupt, Job.kill):
        job = submit(cell(SLEEPS))
        assert wait_until(partial(asleep, job), PATIENCE)
        ask(job)
        assert job.wait(PATIENCE).state == "cancelled"
        assert isinstance(job.exception(), JobCancelled)
        assert processes_of_job(job.id) == []


def test_a_job_whose_driver_was_killed_is_taken_up_by_whoever_waits() -> None:
    job = submit(cell("import time\ntime.sleep(3)\nx = 5\n"))
    assert wait_until(lambda: job.state.state == "running", PATIENCE)
    driver = ProcessId.from_json(job.state.driver or {})
    assert driver.signal(signal.SIGKILL)
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert job.result()["x"] == 5
    assert ProcessId.from_json(job.state.driver or {}) != driver


def test_a_job_outlives_the_process_that_started_it(home: Path) -> None:
    program = (
        "import os, signal\nfrom jupyter_torchdist.client import Request, submit\n"
        "from jupyter_torchdist.protocol.spec import Options\n"
        "submit(Request('import time\\ntime.sleep(1)\\nx = 7\\n', 'Cell In[1]', 2, Options(ranks=2, name='orphan')))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    started = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert started.returncode == -signal.SIGKILL, started.stderr
    job = attach("orphan")
    assert job.wait(PATIENCE).state == "succeeded"
    namespace: dict[str, Any] = {}
    job.bring(namespace)
    assert namespace["x"] == 7


def test_functions_rerun_and_await(notebook: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    exec("import os\nscale = 10\ndef f(x):\n    return scale * x + int(os.environ['RANK'])", notebook)
    monkeypatch.setenv("OF_THE_JOB", "5")
    train = td.distributed(ranks=2, env=["OF_THE_JOB"])(notebook["f"])
    assert train.distributed(2) == [20, 21]
    first = train.submit(3)
    first.wait(PATIENCE)

    async def again() -> str:
        return (await rerun(first.id)).state

    assert asyncio.run(again()) == "succeeded"
    assert [summary.state for summary in catalog.jobs(Home(Path(os.environ["TORCHDIST_HOME"])))] == ["succeeded"] * 3
    assert attach(catalog.jobs()[0].job).values() == [30, 31]


def test_a_script_is_main_on_every_rank(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom beside import name\nif __name__ == '__main__':\n    print(name, sys.argv[1:], __file__)\n"
    )
    script = tmp_path / "train.py"
    script.write_text(program)
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    job = submit(Request(program, str(script), 1, Options(ranks=2), kind="script", argv=("train.py", "--lr", "1")))
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert job.logs(0, "out") == job.logs(1, "out") == f"beside ['--lr', '1'] {script}\n"
