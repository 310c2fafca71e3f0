"""A feed on a socket. The feed is touched by one thread of its own alone, the socket by the server's loop alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ..protocol import codec
from ..protocol.feed import RATE

QUIET = 0.25
"""Seconds between two looks at a job of which nothing new was heard for a while."""

UNSENT = 4 * 1024 * 1024
"""Bytes that may wait in the socket's buffer before no more questions are taken."""


class Source(Protocol):
    """What is asked of a feed (``feed.Feed``). None of it is called by two threads at once."""

    def receive(self, message: dict[str, Any]) -> list[dict[str, Any]]: ...

    def poll(self, now: float) -> list[dict[str, Any]]: ...

    def close(self) -> None: ...


class Conversation:
    """What passes between a feed and a socket, in order, until the feed says ``gone`` or the socket closes.

    ``open_feed`` is called in the feed's thread. ``write`` sends one text; what it returns is done when the text has
    left the socket's buffer, so a browser that reads slowly is waited for.
    """

    def __init__(self, write: Callable[[str], Awaitable[None]]) -> None:
        self._write = write
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchdist-feed")
        self._feed: Source | None = None
        self._lock = asyncio.Lock()
        self._heard = asyncio.Event()
        self._sending: set[asyncio.Future[None]] = set()
        self._unsent = 0
        self.over = False
        """Whether the feed has said its last word."""

    async def open(self, open_feed: Callable[[], Source]) -> None:
        """Raises what ``open_feed`` raises."""
        self._feed = await self._run(open_feed)

    def close(self) -> None:
        """The feed is closed after what it is doing now; does not wait for that."""
        self.over = True
        self._heard.set()
        feed, self._feed = self._feed, None
        if feed is not None:
            self._thread.submit(feed.close)
        self._thread.shutdown(wait=False)

    async def tell(self) -> None:
        """Look at the job again and again and send what is new, until it is over. Raises what the feed raises."""
        pause = 1 / RATE
        while not self.over:
            said = await self._say(lambda feed: feed.poll(time.monotonic()))
            await self._sent(0)
            pause = 1 / RATE if said else min(pause * 1.5, QUIET)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._heard.wait(), pause)
            if self._heard.is_set():
                self._heard.clear()
                await asyncio.sleep(0)

    async def hear(self, message: dict[str, Any]) -> None:
        """Give the feed one message of the view and send its answers. Raises what the feed raises."""
        await self._say(lambda feed: feed.receive(message))
        self._heard.set()
        await self._sent(UNSENT)

    async def _say(self, ask: Callable[[Source], list[dict[str, Any]]]) -> bool:
        """Send what the feed gives; whether that was anything. Messages leave in the order in which they are made."""
        async with self._lock:
            feed = self._feed
            if feed is None or self.over:
                return False
            texts, self.over = await self._run(_texts, ask, feed)
            for text in texts:
                self._send(text)
            return bool(texts)

    def _send(self, text: str) -> None:
        sending = asyncio.ensure_future(self._write(text))
        self._sending.add(sending)
        self._unsent += len(text)

        def sent(done: asyncio.Future[None]) -> None:
            self._sending.discard(done)
            self._unsent -= len(text)
            if not done.cancelled():
                done.exception()  # the socket closed: its own handler knows

        sending.add_done_callback(sent)

    async def _sent(self, most: int) -> None:
        """Wait until at most ``most`` bytes wait in the buffer."""
        while self._sending and self._unsent > most:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _texts(ask: Callable[[Source], list[dict[str, Any]]], feed: Source) -> tuple[list[str], bool]:
    """The feed's messages as they travel, and whether the last one was its last word."""
    messages = ask(feed)
    return [codec.dumps(message) for message in messages], any(message["type"] == "gone" for message in messages)
