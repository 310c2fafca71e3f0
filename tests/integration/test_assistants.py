"""``torchdist mcp``, asked by the client of the package ``mcp`` over stdio, about real jobs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import client
from jupyter_torchdist.assistants import answers, tools
from jupyter_torchdist.cli import main
from jupyter_torchdist.client.job import attach
from jupyter_torchdist.client.submit import Request, submit
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.protocol.typed import decode
from jupyter_torchdist.store import catalog
from tests.leaks import wait_until

there = pytest.mark.skipif(not importlib.util.find_spec("mcp"), reason="the package mcp is not installed")

PATIENCE = 60.0

TRAINS = """\
import os
import jupyter_torchdist as td
for step in range(40):
    td.log(step=step, loss=1 / (step + 1))
    print(f"step {step} of rank {os.environ['RANK']}", flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("the batch is bad")
"""

SLEEPS = "import time\nprint('asleep', flush=True)\ndef wait():\n    time.sleep(600)\nwait()\n"

Ask = Callable[..., Awaitable[Any]]


class Refused(Exception):
    """The words of an answer that is an error."""


def talk(questions: Callable[[Ask, Any], Awaitable[None]], *options: str) -> None:
    """Start the server, and ask. ``ask`` gives the structured answer, or raises ``Refused``."""
    import anyio
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    words = ["-m", "jupyter_torchdist", "mcp", *options]
    server = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ), cwd=os.getcwd())

    async def main() -> None:
        async with Client(stdio_client(server)) as client:

            async def ask(tool: str, **arguments: Any) -> Any:
                result: Any = await client.call_tool(tool, arguments)
                if result.is_error:
                    raise Refused(result.content[0].text)
                assert json.loads(result.content[0].text) == result.structured_content
                return result.structured_content

            await questions(ask, client)

    anyio.run(main)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server imports this package from here."""
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])))


@pytest.fixture
def failed(notebook: dict[str, Any]) -> client.Job:
    job = submit(Request(TRAINS, "Cell In[3]", 2, Options(ranks=2, name="trains"), notebook))
    assert job.wait(PATIENCE).state == "failed"
    return job


@pytest.fixture
def running(notebook: dict[str, Any]) -> Iterator[client.Job]:
    job = submit(Request(SLEEPS, "Cell In[4]", 2, Options(ranks=2, name="sleeps"), notebook))
    assert wait_until(lambda: "asleep" in job.logs(0) and "asleep" in job.logs(1), PATIENCE)
    yield job
    job.kill()
    job.wait(PATIENCE)


@there
@pytest.mark.timeout(240)
def test_reading(failed: client.Job, running: client.Job) -> None:
    kinds = {
        "jobs": answers.JobList,
        "job": answers.JobPage,
        "ranks": answers.RankList,
        "logs": answers.LogText,
        "search": answers.Hits,
        "findings": answers.FindingList,
        "stacks": answers.StackList,
        "curves": answers.CurveList,
        "plan": answers.PlanText,
    }

    async def questions(ask: Ask, session: Any) -> None:
        listed = (await session.list_tools()).tools
        assert [tool.name for tool in listed] == [tool.__name__ for tool in tools.READING]
        assert all(tool.annotations.read_only_hint and tool.output_schema and tool.description for tool in listed)

        async def told(tool: str, **arguments: Any) -> Any:
            found = await ask(tool, **arguments)
            assert codec.plain(decode(kinds[tool], found).to_json()) == found
            return found

        assert {job["name"]: job["state"] for job in (await told("jobs"))["jobs"]} == {
            "trains": "failed",
            "sleeps": "running",
        }
        assert (await told("jobs", state="failed"))["total"] == 1
        page = await told("job", job="trains")
        assert page["standing"]["failures"][0]["error"]["message"] == "the batch is bad"
        assert page["source"] == TRAINS and page["ranks"] == 2 and page["command"] == f"torchdist rerun {failed.id}"
        assert (await told("job", job=running.id[:-2]))["standing"]["state"] == "running"
        assert "failed: ValueError" in (await told("ranks", job="trains"))["ranks"][1]["state"]
        log = await told("logs", job="trains", rank=1, start=0, size=15)
        assert (log["text"], log["rest"]) == ("step 0 of rank ", "after this: start=15")
        assert (await told("logs", job="trains", rank=1))["text"].endswith("step 39 of rank 1\n")
        assert [hit["text"] for hit in (await told("search", job="trains", pattern="step 7 of"))["hits"]] != []
        assert (await told("findings", job="trains"))["rest"] == ""
        assert "loss" in (await told("curves", job="trains"))["names"]
        drawn = await told("curves", job="trains", names=["loss"])
        assert drawn["curves"][0]["y"][:2] == [1.0, 0.5] and drawn["complete"]
        stacks = await told("stacks", job="sleeps")
        assert [one["place"] for one in stacks["stacks"]] == ["Cell In[4], line 5, in wait"] * 2
        assert "3 ranks" in (await told("plan", options=["--ranks", "3"]))["text"]
        checks = (await ask("doctor"))["checks"]
        assert {"python", "torch", "warm start"} <= {check["name"] for check in checks}

    talk(questions)


@there
@pytest.mark.timeout(120)
def test_what_is_refused(failed: client.Job) -> None:
    async def questions(ask: Ask, session: Any) -> None:
        async def refusal(tool: str, **arguments: Any) -> str:
            with pytest.raises(Refused) as caught:
                await ask(tool, **arguments)
            assert "Traceback" not in str(caught.value)
            return str(caught.value)

        assert "JobNotFound: there is no job 'nothing'" in await refusal("job", job="nothing")
        assert "`torchdist jobs` lists the jobs" in await refusal("job", job="../../../etc")
        assert "has no rank 2" in await refusal("logs", job="trains", rank=2)
        assert "start counts from 0" in await refusal("logs", job="trains", rank=0, start=10**9)
        assert "valid integer" in await refusal("logs", job="trains", rank="first")
        assert "'out' or 'err'" in await refusal("logs", job="trains", rank=0, stream="both")
        assert "there is no curve 'accuracy'" in await refusal("curves", job="trains", names=["accuracy"])
        assert "job" in await refusal("findings")
        assert "cancel" in await refusal("cancel", job="trains")  # not there without --allow-control
        if os.getuid() == 0:
            os.chown(failed.paths.root, 65534, 65534)
            assert f"job {failed.id} belongs to " in await refusal("logs", job=failed.id, rank=0)
            os.chown(failed.paths.root, 0, 0)
        assert (await ask("jobs"))["total"] == 1  # and it still answers

    talk(questions)
    assert len(catalog.jobs()) == 1


@there
@pytest.mark.timeout(120)
def test_control(running: client.Job) -> None:
    async def questions(ask: Ask, session: Any) -> None:
        listed = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert listed["cancel"].annotations.destructive_hint and not listed["rerun"].annotations.read_only_hint
        assert (await ask("cancel", job="sleeps", kill=True))["state"] == "cancelled"
        again = await ask("rerun", job=running.id)
        assert again["state"] in ("submitted", "starting", "running") and again["job"] != running.id

    talk(questions, "--allow-control")
    new = attach("sleeps")  # the newest with this name: it outlives the assistant
    assert new.spec.rerun_of == running.id
    assert wait_until(lambda: "asleep" in new.logs(0), PATIENCE)
    new.kill()
    assert new.wait(PATIENCE).state == "cancelled"


def test_without_the_package(tmp_path: Path) -> None:
    """Its extra is named. A release before 2 is no help."""
    (tmp_path / "mcp").mkdir()
    (tmp_path / "mcp" / "__init__.py").write_text("")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "jupyter_torchdist", "mcp"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs version 2 of the package mcp" in done.stderr and "pip install 'jupyter_torchdist[mcp]'" in done.stderr


@pytest.mark.parametrize("words", [["--allow-controls"], ["--allow-control=1"], ["serve"]])
def test_words_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", *words]) == 2
    assert "usage: torchdist mcp [-h] [--allow-control]" in capsys.readouterr().err
