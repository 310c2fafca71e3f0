"""What stands between a browser and a server, and a job that talks meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

from playwright.sync_api import Locator

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter

PACE = 0.02
"""Seconds between two lines of a rank that talks."""

CHUNK = 64 * 1024


class Line:
    """A TCP proxy on a port of its own. It can be cut as a network is (nothing passes, nothing is closed) and reset."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop
        self._passing: asyncio.Event
        self._over: asyncio.Event
        self.port = 0
        ready = threading.Event()
        # A thread, because the main one has Playwright's event loop.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="a line")
        self._thread.start()
        ready.wait()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._passing, self._over = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._passing.set()
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._over.wait()
        server.close()
        self._passing.set()
        self._abort()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    def through(self, server: Jupyter) -> Jupyter:
        """The server, as it is seen from this end."""
        return replace(server, url=urlsplit(server.url)._replace(netloc=f"127.0.0.1:{self.port}").geturl())

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing passes within the block; afterwards what was sent arrives, late."""
        self._call(self._passing.clear)
        try:
            yield
        finally:
            self._call(self._passing.set)

    def reset(self) -> None:
        """Every connection breaks; new ones can be made."""
        self._call(self._abort)

    def close(self) -> None:
        self._call(self._over.set)
        self._thread.join()

    def _call(self, function: Callable[[], object]) -> None:
        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)

    def _abort(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):  # already closed
                linger = struct.pack("ii", 1, 0)  # the end of a connection without a good-bye: a reset
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            end.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        await self._passing.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # nobody is there
            writer.transport.abort()
        else:
            self._ends.add(far_writer)
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
            self._ends.discard(far_writer)
        self._ends.discard(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.contextmanager
def line_to(server: Jupyter) -> Iterator[Line]:
    """A line between browser and server; closed with the block."""
    port = urlsplit(server.url).port
    assert port is not None
    line = Line(port)
    try:
        yield line
    finally:
        line.close()


class Talker:
    """The ranks of a job, each of which counts lines without a pause."""

    def __init__(self, job: FakeJob) -> None:
        self._job = job
        self._count = 0
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="talking ranks")
        self._thread.start()

    def _talk(self) -> None:
        while not self._enough.wait(PACE):
            self._count += 1
            for rank in range(self._job.plan.world_size):
                self._job.rank(rank).prints(self.line(rank, self._count))

    @staticmethod
    def line(rank: int, number: int) -> str:
        return f"line {number} of {rank}\n"

    @property
    def count(self) -> int:
        """Lines so far."""
        return self._count

    def stop(self) -> None:
        self._enough.set()
        self._thread.join()

    def said(self, rank: int) -> list[str]:
        """All lines of a rank."""
        return [self.line(rank, number).rstrip() for number in range(1, self._count + 1)]


@contextlib.contextmanager
def talking(job: FakeJob) -> Iterator[Talker]:
    talker = Talker(job)
    try:
        yield talker
    finally:
        talker.stop()


def comes_to(view: Locator, number: int, timeout: float = 60_000) -> None:
    """The view's log shows a line of rank 1 from ``number`` on, within so many milliseconds."""
    view.get_by_role("tab", name="Logs").click()
    view.page.wait_for_function(
        "([view, least]) => [...view.textContent.matchAll(/line (\\d+) of 1/g)].some(found => found[1] >= least)",
        arg=[view.element_handle(), number],
        polling=200,  # milliseconds; else at each frame, which a log of some hundred lines makes dear
        timeout=timeout,
    )


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
