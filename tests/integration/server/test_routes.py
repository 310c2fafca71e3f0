"""The routes that answer once, asked over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError

import jupyter_torchdist
from jupyter_torchdist.client import Request, attach, submit
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.feed import UNSEEN
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store import files
from jupyter_torchdist.store.jobdir import taken_requests
from jupyter_torchdist.testing import FakeJob
from tests.integration.server.conftest import Fetch

API = ("torchdist", "api")


async def refused(answer: Any) -> tuple[int, dict[str, Any]]:
    """Status and words of an answer that is an error."""
    with pytest.raises(HTTPClientError) as caught:
        await answer
    assert caught.value.response is not None
    assert caught.value.response.headers["Content-Type"] == "application/json"
    words = codec.loads(caught.value.response.body)
    assert words.keys() == {"message", "hint"}
    return caught.value.code, words


async def asked(answer: Any) -> dict[str, Any]:
    value = codec.loads((await answer).body)
    assert isinstance(value, dict)
    return value


async def test_no_jobs_yet(jp_fetch: Fetch) -> None:
    assert (await asked(jp_fetch(*API, "jobs")))["jobs"] == []


async def test_rows(jp_fetch: Fetch) -> None:
    with (
        FakeJob(now=1000.0, notebook="/n/a.ipynb") as job,
        FakeJob(now=time.time(), options=Options(2, name="@b")) as new,
    ):
        job.running().now = 1010.0
        job.ended("failed", "rank 1 failed", 1)
        new.running()
        new.rank(0).records(
            {"k": "progress", "t": 1.0, "id": 0, "desc": "epoch", "n": 3, "total": 10},
            *({"k": "log", "t": 1.0, "step": step, "v": {"loss": 1.0 / (step + 1)}} for step in range(100)),
            {"k": "log", "t": 1.0, "step": 100, "v": {"loss": float("nan")}},
        )
        first, second = (await asked(jp_fetch(*API, "jobs")))["jobs"]
    assert (first["job"], first["name"], first["state"], first["effective"]) == (
        new.paths.job,
        "@b",
        "running",
        "running",
    )
    assert first["progress"] == {"desc": "epoch", "n": 3, "total": 10}
    assert 20 < len(first["spark"]) <= 40
    assert first["spark"][0] == 1.0
    assert first["spark"][-1] == 0.01
    assert second == {
        "job": job.paths.job,
        "name": None,
        "label": "Cell In[1]",
        "notebook": "/n/a.ipynb",
        "rerun_of": "",
        "state": "failed",
        "effective": "failed",
        "world_size": 2,
        "submitted": 1000.0,
        "ended": 1010.0,
        "reason": "rank 1 failed",
        "progress": None,
        "spark": [],
        "broken": [],
        "wait": None,
        "stall": None,
        "samples": None,
        "gpus": [],
        "gpu_memory": None,
        "damaged": False,
    }


async def test_a_job_without_driver_is_orphaned(jp_fetch: Fetch) -> None:
    with FakeJob(now=1000.0):
        (row,) = (await asked(jp_fetch(*API, "jobs")))["jobs"]
    assert (row["state"], row["effective"]) == ("submitted", "orphaned")


async def test_details(jp_fetch: Fetch) -> None:
    with FakeJob() as job:
        job.running()
        told = await asked(jp_fetch(*API, "jobs", job.paths.job))
    assert told["job"] == told["state"]["job"] == told["spec"]["job"] == told["plan"]["job"] == job.paths.job
    assert told["effective"] == "running"
    assert told["receipt"] == told["notes"] == []
    assert told["command"] == f"torchdist rerun {job.paths.job}"


async def test_a_damaged_job_is_refused_listed_and_deleted(jp_fetch: Fetch) -> None:
    with FakeJob(now=1000.0) as job:
        where = (*API, "jobs", job.paths.job)
        job.paths.manifest.unlink()
        assert (await asked(jp_fetch(*where)))["spec"]["job"] == job.paths.job
        for file in (job.paths.plan, job.paths.spec):
            file.write_text("{")
            code, words = await refused(jp_fetch(*where))
            assert (code, f"{file.name} is damaged" in words["message"]) == (409, True)
        (row,) = (await asked(jp_fetch(*API, "jobs")))["jobs"]
        assert (row["damaged"], "spec.json is damaged" in row["reason"]) == (True, True)
        assert (await jp_fetch(*where, method="DELETE")).code == 204


@pytest.mark.parametrize(
    "name", ["%2e%2e", "%2e%2e%2f%2e%2e", "..%2f", ".creating-a", "a%2fb", "%00", "x%0ay", "a" * 101]
)
@pytest.mark.parametrize("rest", ["", "/feed", "/turn", "/cancel", "/files/0.out"])
async def test_no_traversal(
    http_server_client: Any, jp_auth_header: dict[str, str], jp_base_url: str, name: str, rest: str
) -> None:
    """What cannot name a job is refused before any file is looked for."""
    post = {"method": "POST", "body": '{"messages": []}'} if rest in ("/cancel", "/turn") else {}
    url = f"{jp_base_url}torchdist/api/jobs/{name}{rest}"
    code, words = await refused(http_server_client.fetch(url, headers=jp_auth_header, **post))
    assert code == 400
    assert "is not the id of a job" in words["message"]


async def test_unknown_job(jp_fetch: Fetch) -> None:
    for rest, method in (
        ((), "GET"),
        ((), "DELETE"),
        (("cancel",), "POST"),
        (("turn",), "POST"),
        (("rerun",), "POST"),
        (("files", "0.out"), "GET"),
    ):
        body = '{"messages": []}' if method == "POST" else None
        code, words = await refused(jp_fetch(*API, "jobs", "20260102-030405-aaaaaa", *rest, method=method, body=body))
        assert code == 404
        assert "no job 20260102-030405-aaaaaa" in words["message"]


@pytest.fixture
def unreadable(home: Path) -> None:
    """A data directory whose jobs cannot be listed, not even by root."""
    home.mkdir()
    Home(home).jobs.write_text("a file")


@pytest.mark.usefixtures("unreadable")
async def test_the_data_directory_cannot_be_read(jp_fetch: Fetch) -> None:
    code, words = await refused(jp_fetch(*API, "jobs"))
    assert code == 503
    assert "TORCHDIST_HOME" in words["hint"]


async def test_cancel(jp_fetch: Fetch) -> None:
    with FakeJob() as job:
        job.running()
        where = (*API, "jobs", job.paths.job, "cancel")
        said = await asked(jp_fetch(*where, method="POST", body=""))
        assert "asked to stop" in said["said"]
        assert [asked.kind for asked in taken_requests(job.paths)] == ["interrupt"]
        await jp_fetch(*where, method="POST", body='{"kill": true}')
        assert [asked.kind for asked in taken_requests(job.paths)] == ["kill"]
        job.ended("cancelled")
        said = await asked(jp_fetch(*where, method="POST", body="{}"))
        assert said["said"] == "the job has ended already: cancelled"


@pytest.mark.parametrize("body", ['{"kill": 1}', "[]", "{", "\xff", "[" * 5000])
async def test_cancel_with_bad_words(jp_fetch: Fetch, body: str) -> None:
    with FakeJob() as job:
        job.running()
        code, _ = await refused(jp_fetch(*API, "jobs", job.paths.job, "cancel", method="POST", body=body))
        assert code == 400
        assert taken_requests(job.paths) == []


async def a_turn(fetch: Fetch, job: str, *said: dict[str, Any]) -> list[dict[str, Any]]:
    """What the feed says in return to what a view says."""
    body = codec.dumps({"messages": said})
    messages = (await asked(fetch(*API, "jobs", job, "turn", method="POST", body=body)))["messages"]
    assert [message["n"] for message in messages] == list(range(1, len(messages) + 1))
    return list(messages)


def texts(messages: list[dict[str, Any]]) -> dict[str, str]:
    """All that they have of each file."""
    found: dict[str, str] = {}
    for message in messages:
        for segment in message.get("segments", ()):
            found[segment["file"]] = found.get(segment["file"], "") + segment["text"]
    return found


async def test_a_turn_of_the_feed_in_one_request(jp_fetch: Fetch) -> None:
    with FakeJob() as job:
        job.running().rank(0).prints("one\ntwo\n")
        job.rank(1).records(*({"k": "log", "t": 1.0, "step": step, "v": {"loss": step}} for step in range(3)))
        name = job.paths.job
        first = await a_turn(jp_fetch, name, {"type": "open", "logs": {}})
        assert first[0]["type"] == "hello"
        assert first[0]["state"]["state"] == "running"
        assert texts(first) == {"0.out": "one\ntwo\n"}
        (status,) = [each for each in first if each["type"] == "status"]
        assert status["ranks"]["1"]["last"] == {"loss": 2.0}

        job.rank(0).prints("three\n")
        search = {"type": "ask", "id": 5, "what": "search", "pattern": "t", "regex": False, "case": True}
        cancel = {"type": "ask", "id": 6, "what": "cancel", "kill": False}
        have = {"type": "open", "logs": {"0.out": len("one\ntwo\n")}}
        curves = {"type": "ask", "id": 7, "what": "curves", "names": ["loss"], "mode": "band", "ranks": [], "x": "step"}
        second = await a_turn(jp_fetch, name, have, {**search, "files": [], "at": None}, cancel, {**curves, "width": 9})
        assert texts(second) == {"0.out": "three\n"}
        answers = {each["id"]: each for each in second if each["type"] == "answer"}
        assert [hit["text"].strip() for hit in answers[5]["hits"]] == ["three", "two"]
        assert "asked to stop" in answers[6]["said"]
        assert answers[7]["series"][0]["y"] == [0.0, 1.0, 2.0]
        assert [asked.kind for asked in taken_requests(job.paths)] == ["interrupt"]


async def test_a_turn_brings_a_long_log_by_and_by(jp_fetch: Fetch) -> None:
    lines = "".join(f"line {number:09}\n" for number in range(200_000))
    with FakeJob() as job:
        job.running().rank(0).prints(lines)
        have, seen, turns = {"0.out": 1}, "", 0
        while have["0.out"] < len(lines):
            said = await a_turn(jp_fetch, job.paths.job, {"type": "open", "logs": have})
            assert 1 < len(said) <= UNSEEN
            seen += texts(said)["0.out"]
            have = {"0.out": said[-1]["segments"][-1]["end"]}
            turns += 1
    assert seen == lines[1:]
    assert 1 < turns < 10


@pytest.mark.parametrize("body", ["", "[]", '{"messages": {}}', '{"messages": [1]}'])
async def test_a_turn_with_bad_words(jp_fetch: Fetch, body: str) -> None:
    with FakeJob() as job:
        job.running()
        code, _ = await refused(jp_fetch(*API, "jobs", job.paths.job, "turn", method="POST", body=body))
        assert code == 400
        assert await a_turn(jp_fetch, job.paths.job, {"type": "of a later version"}) == []


async def test_a_question_that_is_not_asked_so(jp_fetch: Fetch) -> None:
    with FakeJob() as job:
        job.running()
        code, words = await refused(jp_fetch(*API, "jobs", job.paths.job, method="PUT", body="{}"))
        assert (code, words["message"]) == (405, "Method Not Allowed")


async def test_delete(jp_fetch: Fetch) -> None:
    with FakeJob() as job:
        job.running()
        where = (*API, "jobs", job.paths.job)
        code, words = await refused(jp_fetch(*where, method="DELETE"))
        assert code == 409
        assert "is running" in words["message"]
        job.ended()
        assert (await jp_fetch(*where, method="DELETE")).code == 204
        assert not job.paths.root.exists()
        assert (await asked(jp_fetch(*API, "jobs")))["jobs"] == []


async def test_a_file_is_saved(jp_fetch: Fetch) -> None:
    text = "<script>é\x1b[31m\r\n\0" * 100_000
    with FakeJob() as job:
        job.running().rank(1).prints(text)
        job.rank(1).prints("", "err")
        answer = await jp_fetch(*API, "jobs", job.paths.job, "files", "1.out")
        empty = await jp_fetch(*API, "jobs", job.paths.job, "files", "1.err")
    assert answer.body.decode() == text
    for told in (answer.headers, empty.headers):
        assert told["Content-Type"] == "text/plain; charset=utf-8"
        assert told["X-Content-Type-Options"] == "nosniff"
        assert told["Content-Disposition"].startswith("attachment;")
    assert f"{job.paths.job}-rank1.out.txt" in answer.headers["Content-Disposition"]
    assert empty.body == b""


async def test_files_that_are_none(jp_fetch: Fetch) -> None:
    with FakeJob() as job:
        job.running()
        for name, status in (("0.out", 404), ("9.err", 404), ("0.metrics", 400), ("spec.json", 400), ("-1.out", 400)):
            code, _ = await refused(jp_fetch(*API, "jobs", job.paths.job, "files", name))
            assert code == status, name


async def test_an_error_of_ours_tells_no_more_than_that(jp_fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("jupyter_torchdist.server.jobs.details", fail)
    code, words = await refused(jp_fetch(*API, "jobs", "20260102-030405-aaaaaa"))
    assert code == 500
    assert "secret" not in str(words)
    assert "log of the Jupyter server" in words["hint"]


@pytest.fixture
def pool(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverPool]:
    """Drivers without torch."""
    pool = DriverPool(("-m", "jupyter_torchdist.testing"))
    for module in ("job", "submit"):
        monkeypatch.setattr(importlib.import_module(f"jupyter_torchdist.client.{module}"), "default_pool", lambda: pool)
    yield pool
    pool.close()


@pytest.mark.usefixtures("pool")
async def test_rerun(jp_fetch: Fetch) -> None:
    request = Request("x = 1\n", "Cell In[1]", options=Options(ranks=1), notebook="/n/a.ipynb")
    first = await asyncio.to_thread(submit, request)
    await first
    again = await asked(jp_fetch(*API, "jobs", first.id, "rerun", method="POST", body="{}"))
    assert again["job"] != first.id
    job = attach(again["job"])
    assert (await job).state == "succeeded"
    assert job.spec.notebook == "/n/a.ipynb"


async def test_what_this_server_cannot_run_again(jp_fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeJob() as job:
        job.running().ended()
        where = (*API, "jobs", job.paths.job, "rerun")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        code, words = await refused(jp_fetch(*where, method="POST", body=""))
        assert (code, "has no torch" in words["message"]) == (409, True)
        files.publish_json(job.paths.manifest, {**job.manifest.to_json(), "python": "3.99.0"})
        code, words = await refused(jp_fetch(*where, method="POST", body=""))
        assert (code, "made by Python 3.99" in words["message"]) == (409, True)
        assert f"torchdist rerun {job.paths.job}" in words["hint"]
        job.paths.manifest.write_text("{")
        code, words = await refused(jp_fetch(*where, method="POST", body=""))
        assert (code, "damaged" in words["message"]) == (409, True)


def test_an_installed_extension_is_switched_on() -> None:
    """By the file that the wheel puts where a server looks."""
    root = Path(__file__).parents[3]
    (config,) = (root / "jupyter-config" / "jupyter_server_config.d").iterdir()
    assert json.loads(config.read_text()) == {"ServerApp": {"jpserver_extensions": {"jupyter_torchdist": True}}}
    assert '"etc/jupyter/jupyter_server_config.d"' in (root / "pyproject.toml").read_text()
    (point,) = jupyter_torchdist._jupyter_server_extension_points()
    assert hasattr(importlib.import_module(point["module"]), "_load_jupyter_server_extension")
