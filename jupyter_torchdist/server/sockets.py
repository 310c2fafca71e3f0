"""The two WebSockets: a job's feed, and the list of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import ws_authenticated
from tornado.websocket import WebSocketClosedError

from ..feed import Feed
from ..protocol import codec
from ..protocol.errors import TorchDistError
from ..store import journal
from .base import AUTH_RESOURCE, Refusal, Socket, in_thread, permitted, refusal
from .conversation import Conversation
from .listing import Row

PERIOD = 1.0
"""Seconds between two polls of the list."""

ALL_SAID, NOT_OURS, BROKEN = 1000, 1007, 1011
"""Close codes of a WebSocket (RFC 6455): normal end, invalid message from the client, error in the server."""


class FeedSocket(Socket):
    """One view of one job (``protocol/feed.py``). Its feed is closed with the socket."""

    _conversation: Conversation | None = None
    _telling: asyncio.Task[None] | None = None

    @ws_authenticated
    @permitted("read")
    async def get(self, job: str) -> None:
        """Open the feed of an existing job, then the socket. Raises ``Refusal``."""
        paths = self.paths(job)
        await in_thread(journal.state, paths)
        self._conversation = Conversation(self.write_message)
        may_cancel = await self._may_write()
        try:
            await self._conversation.open(lambda: Feed(paths, self.data, may_cancel))
            await self.serve()
        except (TorchDistError, OSError) as error:
            raise refusal(error) from error
        finally:
            if self._telling:
                self._telling.cancel()
            self._conversation.close()

    def open(self, *args: Any, **kwargs: Any) -> None:
        """The socket is open: start to send the feed's messages."""
        super().open(*args, **kwargs)
        self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        assert self._conversation is not None
        with self._closing():
            await self._conversation.tell()
            self.close(ALL_SAID, "the files of the job were deleted")

    async def on_message(self, data: str | bytes) -> None:
        """Handle a message of the view; the next message is read afterwards."""
        assert self._conversation is not None
        try:
            message = codec.loads(data)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self.close(NOT_OURS, "the message is not a JSON object")
            return
        with self._closing():
            await self._conversation.hear(message)

    async def _may_write(self) -> bool:
        allowed = self.authorizer.is_authorized(self, self.current_user, "write", AUTH_RESOURCE)
        return bool(await ensure_async(allowed))

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the socket with a message when the feed raises an error; the view tries again."""
        try:
            yield
        except WebSocketClosedError:
            pass
        except (TorchDistError, OSError) as error:
            self.close(BROKEN, _short(refusal(error).message))
        except Exception:
            self.log.exception("torchdist: the feed of %s failed", self.request.path)
            self.close(BROKEN, "an error in the Jupyter server; see its log")


class JobsSocket(Socket):
    """The list of jobs: first complete, then changes."""

    _telling: asyncio.Task[None] | None = None

    @ws_authenticated
    @permitted("read")
    async def get(self) -> None:
        """Open the socket. Raises ``Refusal``."""
        try:
            await self.serve()
        finally:
            if self._telling:
                self._telling.cancel()

    def open(self, *args: Any, **kwargs: Any) -> None:
        """The socket is open: start to send the list."""
        super().open(*args, **kwargs)
        self._telling = asyncio.create_task(self._tell())

    def on_message(self, data: str | bytes) -> None:
        """Messages of the client are ignored."""

    async def _tell(self) -> None:
        known: list[Row] | None = None
        trouble = ""
        with contextlib.suppress(WebSocketClosedError):
            while True:
                try:
                    text, known = await in_thread(self._news, known)
                    trouble = ""
                except Refusal as error:
                    said = {"type": "trouble", "now": time.time(), "message": error.message, "hint": error.hint}
                    text, trouble = "" if error.message == trouble else codec.dumps(said), error.message
                    known = None
                if text:
                    await self.write_message(text)
                await asyncio.sleep(PERIOD)

    def _news(self, known: list[Row] | None) -> tuple[str, list[Row]]:
        """The message for a client that has the rows ``known`` (empty if none is needed), and the new rows."""
        rows = self.listing.rows(PERIOD * 0.9)
        message = news(known, rows)
        return (codec.dumps({**message, "now": time.time()}) if message else ""), rows


def news(known: Sequence[Row] | None, rows: Sequence[Row]) -> dict[str, Any] | None:
    """A ``jobs`` message (for a new client, or after many changes), a ``changes`` message, or None without changes."""
    if known is None:
        return {"type": "jobs", "jobs": rows}
    before = {row["job"]: row for row in known}
    changed = [row for row in rows if (old := before.get(row["job"])) is not row and old != row]
    gone = sorted(before.keys() - {row["job"] for row in rows})
    if not changed and not gone:
        return None
    if len(changed) + len(gone) > max(20, len(rows) // 2):
        return {"type": "jobs", "jobs": rows}
    return {"type": "changes", "jobs": changed, "gone": gone}


def _short(text: str) -> str:
    """``text`` cut for a close frame, which has room for 123 bytes."""
    return text.encode()[:120].decode("utf-8", "ignore")
