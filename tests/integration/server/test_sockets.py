"""The WebSockets, with the real feed of a job directory that the test fills."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError
from tornado.websocket import WebSocketClientConnection

from jupyter_torchdist.feed import Feed
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.server import base, sockets
from jupyter_torchdist.store.jobdir import taken_requests
from jupyter_torchdist.testing import FakeJob
from tests.integration.server.conftest import Fetch
from tests.leaks import wait_until

Open = Callable[..., Awaitable["View"]]


class View:
    """The browser's end."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self.socket, self.over = socket, False

    async def say(self, **message: Any) -> None:
        await self.socket.write_message(codec.dumps(message))

    async def hear(self, kind: str) -> dict[str, Any]:
        """The next message of that type; the others are dropped, all are acknowledged."""
        while True:
            said = await asyncio.wait_for(self.socket.read_message(), 20)
            assert said is not None, f"closed ({self.socket.close_code}: {self.socket.close_reason}), no {kind}"
            if said == "":  # a beat
                continue
            message = codec.loads(said)
            assert isinstance(message, dict)
            if "n" in message:
                await self.say(type="ack", n=message["n"])
            if message["type"] == kind:
                return message

    async def text(self, file: str, end: str) -> str:
        """What comes of a file, until ``end``."""
        text = ""
        while not text.endswith(end):
            text += "".join(piece["text"] for piece in (await self.hear("lines"))["segments"] if piece["file"] == file)
        return text

    async def ended(self) -> tuple[int | None, str | None]:
        """Code and reason of the end, whatever was still to be read."""
        while not self.over:
            self.over = await asyncio.wait_for(self.socket.read_message(), 20) is None
        return self.socket.close_code, self.socket.close_reason


@pytest.fixture
def opened(jp_ws_fetch: Fetch, jp_asyncio_loop: asyncio.AbstractEventLoop) -> Iterator[Open]:
    views: list[View] = []

    async def connect(*parts: str, **logs: Any) -> View:
        views.append(View(await jp_ws_fetch("torchdist", "api", "jobs", *parts)))
        if len(parts) == 2:
            await views[-1].say(type="open", logs=logs)
        return views[-1]

    yield connect

    async def close() -> None:
        for view in views:
            view.socket.close()
            await view.ended()
        # The server's side hears of it on this loop, which is closed next.
        await asyncio.to_thread(wait_until, nobody_speaks, timeout=15)

    def nobody_speaks() -> bool:
        return not any(thread.name.startswith("torchdist-feed") for thread in threading.enumerate())

    jp_asyncio_loop.run_until_complete(close())


async def test_a_job_from_its_start_to_its_end(opened: Open) -> None:
    with FakeJob() as job:
        view = await opened(job.paths.job, "feed")
        hello = await view.hear("hello")
        assert hello["n"] == 1
        assert hello["spec"]["job"] == job.paths.job
        job.running().rank(1).prints("<b>é\n")
        assert await view.text("1.out", "\n") == "<b>é\n"
        job.ended()
        while (await view.hear("events"))["events"][-1]["kind"] != "job.ended":
            pass


async def test_a_view_that_was_cut_off_goes_on_where_it_was(opened: Open) -> None:
    with FakeJob() as job:
        job.running().rank(0).prints("seen\nnew\n")
        view = await opened(job.paths.job, "feed", **{"0.out": 5})
        assert await view.text("0.out", "\n") == "new\n"


async def test_two_views_of_one_job(opened: Open) -> None:
    with FakeJob() as job:
        job.running()
        views = [await opened(job.paths.job, "feed") for _ in range(2)]
        job.rank(0).prints("to both\n")
        assert [await view.text("0.out", "\n") for view in views] == ["to both\n"] * 2


@pytest.mark.parametrize("parts", [("feed",), ("20260102-030405-0a0b0c", "feed")])
async def test_silence_is_broken_by_empty_messages(
    opened: Open, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "BEAT", 0.05)
    with FakeJob(job="20260102-030405-0a0b0c"):
        view = await opened(*parts)
        for _ in range(2):
            while await asyncio.wait_for(view.socket.read_message(), 20) != "":
                pass


async def test_questions(opened: Open) -> None:
    with FakeJob() as job:
        job.running().rank(0).prints("a needle\nhay\n")
        view = await opened(job.paths.job, "feed")
        await view.hear("hello")
        await view.say(type="ask", id=1, what="search", pattern="NEEDLE", regex=False, case=False, files=[], at=None)
        answer = await view.hear("answer")
        assert answer["id"] == 1
        assert [hit["text"].strip() for hit in answer["hits"]] == ["a needle"]
        await view.say(type="ask", id=2, what="cancel", kill=False)
        answer = await view.hear("answer")
        assert answer["id"] == 2
        assert answer["said"]
        assert [asked.kind for asked in taken_requests(job.paths)] == ["interrupt"]


@pytest.mark.parametrize("data", ["", "{", "[]", "7", "\x00", "[" * 100_000])
async def test_what_is_no_message_closes_the_socket(opened: Open, data: str) -> None:
    with FakeJob() as job:
        view = await opened(job.paths.job, "feed")
        await view.hear("hello")
        await view.socket.write_message(data)
        assert (await view.ended())[0] == sockets.NOT_OURS


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "ask"},
        {"type": "ask", "id": [], "what": {}},
        {"type": 3},
        {"type": "ack", "n": "x"},
        {"type": "open", "logs": 3},
    ],
)
async def test_a_strange_message_ends_no_server(opened: Open, message: dict[str, Any]) -> None:
    """It is answered, passed over, or closes this socket; another one is not touched."""
    with FakeJob() as job:
        job.running()
        strange, other = await opened(job.paths.job, "feed"), await opened(job.paths.job, "feed")
        await strange.say(**message)
        job.rank(0).prints("all the same\n")
        assert await other.text("0.out", "\n") == "all the same\n"


async def test_a_job_that_is_deleted_while_it_is_open(opened: Open) -> None:
    with FakeJob() as job:
        view = await opened(job.paths.job, "feed")
        await view.hear("hello")
        # As ``%dist rm`` does: renamed first, as an open view may be writing its mark.
        await asyncio.to_thread(job.paths.root.rename, job.paths.root.with_name(".deleted"))
        assert (await view.hear("gone"))["reason"]
        assert await view.ended() == (sockets.ALL_SAID, "the files of the job were deleted")


async def test_an_unknown_job_has_no_socket(jp_ws_fetch: Fetch) -> None:
    with pytest.raises(HTTPClientError) as caught:
        await jp_ws_fetch("torchdist", "api", "jobs", "20260102-030405-aaaaaa", "feed")
    assert caught.value.code == 404


async def test_a_job_without_a_specification_has_no_socket(jp_ws_fetch: Fetch) -> None:
    """And the thread that its feed would have had is gone: the test would fail of it."""
    with FakeJob() as job:
        job.paths.spec.write_text("{")
        with pytest.raises(HTTPClientError) as caught:
            await jp_ws_fetch("torchdist", "api", "jobs", job.paths.job, "feed")
    assert caught.value.code == 409


async def test_a_socket_is_not_asked_over_http(jp_fetch: Fetch) -> None:
    with FakeJob() as job, pytest.raises(HTTPClientError) as caught:
        await jp_fetch("torchdist", "api", "jobs", job.paths.job, "feed")
    assert caught.value.code == 400
    assert caught.value.response is not None
    assert codec.loads(caught.value.response.body)["message"] == "this address is a WebSocket"


async def test_a_reader_that_stops_reading_holds_up_nobody(opened: Open, jp_fetch: Fetch) -> None:
    """The feed waits for it; the server's loop does not."""
    with FakeJob() as job:
        job.running()
        still = await opened(job.paths.job, "feed")
        for _ in range(50):
            job.rank(0).prints("x" * 99_999 + "\n")
        view = await opened(job.paths.job, "feed")
        await view.hear("lines")
        answer = await asyncio.wait_for(jp_fetch("torchdist", "api", "jobs"), 5)
        assert answer.code == 200
        assert (await still.hear("hello"))["n"] == 1


async def test_an_error_of_the_feed_closes_the_socket_in_words(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(Feed, "poll", fail)
    with FakeJob() as job:
        view = await opened(job.paths.job, "feed")
        code, reason = await view.ended()
    assert (code, reason) == (sockets.BROKEN, "an error in the Jupyter server; see its log")


async def test_the_list_and_what_changes_in_it(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "PERIOD", 0.05)
    with FakeJob() as job:
        view = await opened("feed")
        assert [row["job"] for row in (await view.hear("jobs"))["jobs"]] == [job.paths.job]
        job.running()
        (row,) = (await view.hear("changes"))["jobs"]
        while row["state"] != "running":
            (row,) = (await view.hear("changes"))["jobs"]
        with FakeJob() as other:
            while row["job"] != other.paths.job:
                (row,) = (await view.hear("changes"))["jobs"]
            job.ended("failed", "a rank failed", 0)
            while row["state"] != "failed":
                (row,) = (await view.hear("changes"))["jobs"]
            assert row["reason"] == "a rank failed"
            await asyncio.to_thread(shutil.rmtree, job.paths.root)
            while not (gone := (await view.hear("changes"))["gone"]):
                pass
            assert gone == [job.paths.job]


@pytest.fixture
def unreadable(home: Path) -> Path:
    home.mkdir()
    path = Home(home).jobs
    path.write_text("a file")
    return path


async def test_a_data_directory_in_trouble(opened: Open, unreadable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "PERIOD", 0.05)
    view = await opened("feed")
    assert "TORCHDIST_HOME" in (await view.hear("trouble"))["hint"]
    await asyncio.to_thread(unreadable.unlink)
    assert (await view.hear("jobs"))["jobs"] == []
