"""Connects a feed to a socket. Only one separate thread uses the feed; only the server's event loop uses the socket."""

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
"""Seconds between two polls of a job without news for a while."""

UNSENT = 4 * 1024 * 1024
"""With more bytes in the socket's buffer no more messages of the view are handled."""


class Source(Protocol):
    """The interface of a feed (``feed.Feed``). Two threads never call it at once."""

    def receive(self, message: dict[str, Any]) -> list[dict[str, Any]]: ...

    def poll(self, now: float) -> list[dict[str, Any]]: ...

    def close(self) -> None: ...


class Conversation:
    """Passes messages between a feed and a socket, in order, until the feed sends ``gone`` or the socket closes.

    ``open_feed`` is called in the feed's thread. ``write`` sends one text; its result is done when the text has left
    the socket's buffer. Therefore the conversation waits for a browser that reads slowly.
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
        """Whether the feed has sent its last message, or the conversation was closed."""

    async def open(self, open_feed: Callable[[], Source]) -> None:
        """Open the feed. Raises what ``open_feed`` raises."""
        self._feed = await self._run(open_feed)

    def close(self) -> None:
        """Close the feed after its current call, without waiting for that."""
        self.over = True
        self._heard.set()
        feed, self._feed = self._feed, None
        if feed is not None:
            self._thread.submit(feed.close)
        self._thread.shutdown(wait=False)

    async def tell(self) -> None:
        """Poll the feed and send its messages, until the conversation is over. Raises what the feed raises."""
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
        """Send the feed's messages, in order. Returns whether there were any."""
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
                done.exception()  # the socket closed, which its handler notices

        sending.add_done_callback(sent)

    async def _sent(self, most: int) -> None:
        """Wait until at most ``most`` bytes wait in the buffer."""
        while self._sending and self._unsent > most:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _texts(ask: Callable[[Source], list[dict[str, Any]]], feed: Source) -> tuple[list[str], bool]:
    """The feed's messages as JSON, and whether the feed has ended (``gone``)."""
    messages = ask(feed)
    return [codec.dumps(message) for message in messages], any(message["type"] == "gone" for message in messages)
