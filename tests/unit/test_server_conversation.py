"""A feed on a socket: order, pressure, end. The feed is a plain object, the socket a list that can be held up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.server import conversation
from jupyter_torchdist.server.conversation import Conversation


class Feed:
    """Says one message a poll, as long as there are any, and answers whatever it is asked."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = list(kinds)
        self.n = 0
        self.threads: set[int] = set()
        self.closed = threading.Event()

    def _say(self, kind: str, **words: Any) -> list[dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.n += 1
        return [{"n": self.n, "type": kind, **words}]

    def receive(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return self._say("answer", to=message)

    def poll(self, now: float) -> list[dict[str, Any]]:
        return self._say(self.kinds.pop(0)) if self.kinds else []

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed.set()


class Socket:
    """What was written; a text leaves the buffer when ``reading`` is set."""

    def __init__(self, reading: bool = True) -> None:
        self.said: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        if reading:
            self.reading.set()

    def write(self, text: str) -> asyncio.Future[None]:
        self.said.append(codec.loads(text))
        return asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        await self.reading.wait()


def run(talk: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(talk, 20))


async def eventually(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110  # what it waits for has no event
        await asyncio.sleep(0.001)


def test_everything_is_said_in_order_until_the_last_word() -> None:
    async def talk() -> None:
        feed, socket = Feed("hello", "status", "gone", "never"), Socket()
        talking = Conversation(socket.write)
        await talking.open(lambda: feed)
        await talking.tell()
        assert [said["type"] for said in socket.said] == ["hello", "status", "gone"]
        await talking.hear({"type": "ask"})
        assert len(socket.said) == 3
        talking.close()
        await eventually(feed.closed.is_set)
        assert len(feed.threads) == 1
        assert threading.get_ident() not in feed.threads

    run(talk())


def test_a_slow_socket_is_waited_for_and_questions_are_answered_meanwhile() -> None:
    async def talk() -> None:
        feed, socket = Feed(*["lines"] * 100), Socket(reading=False)
        talking = Conversation(socket.write)
        await talking.open(lambda: feed)
        telling = asyncio.create_task(talking.tell())
        await eventually(lambda: socket.said)
        for number in range(3):
            await talking.hear({"type": "ask", "id": number})
        assert [said["type"] for said in socket.said] == ["lines", "answer", "answer", "answer"]
        socket.reading.set()
        await eventually(lambda: len(socket.said) > 5)
        assert [said["n"] for said in socket.said] == list(range(1, len(socket.said) + 1))
        telling.cancel()
        talking.close()

    run(talk())


def test_somebody_who_asks_and_does_not_read_is_not_heard_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "UNSENT", 1000)

    async def talk() -> None:
        feed, socket = Feed(), Socket(reading=False)
        talking = Conversation(socket.write)
        await talking.open(lambda: feed)
        hearing = asyncio.create_task(talking.hear({"text": "x" * 2000}))
        await eventually(lambda: socket.said)
        await asyncio.sleep(0.05)
        assert not hearing.done()
        socket.reading.set()
        await hearing
        talking.close()

    run(talk())


def test_a_feed_that_waited_for_a_view_speaks_when_it_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when the pause of a quiet job is over."""
    monkeypatch.setattr(conversation, "QUIET", 1000.0)
    monkeypatch.setattr(conversation, "RATE", 1 / 1000)

    async def talk() -> None:
        feed, socket = Feed("hello"), Socket()
        talking = Conversation(socket.write)
        await talking.open(lambda: feed)
        telling = asyncio.create_task(talking.tell())
        await eventually(lambda: socket.said)
        feed.kinds.append("status")
        await talking.hear({"type": "ack", "n": 1})
        await eventually(lambda: socket.said[-1]["type"] == "status")
        telling.cancel()
        talking.close()

    run(talk())


def test_an_error_of_the_feed_arrives_and_it_is_closed_all_the_same() -> None:
    async def talk() -> None:
        feed, socket = Feed("hello"), Socket()
        feed.poll = lambda now: 1 // 0  # type: ignore[assignment,return-value,method-assign]
        talking = Conversation(socket.write)
        await talking.open(lambda: feed)
        with pytest.raises(ZeroDivisionError):
            await talking.tell()
        talking.close()
        talking.close()
        await eventually(feed.closed.is_set)

    run(talk())


def test_a_feed_that_cannot_be_opened_leaves_no_thread() -> None:
    async def talk() -> None:
        talking = Conversation(Socket().write)
        with pytest.raises(FileNotFoundError):
            await talking.open(lambda: Path("/nowhere/at/all").stat())  # type: ignore[arg-type,return-value]
        talking.close()

    run(talk())
