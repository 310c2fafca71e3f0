"""A job's feed as one request and one response, for a page whose WebSocket is not open yet.

A browser opens WebSockets to one address one after the other. A Jupyter server leaves a kernel's WebSocket unanswered
while the kernel starts, for up to a minute. Our WebSocket waits for it, but HTTP requests do not.
"""

from __future__ import annotations

import time
from typing import Any

from jupyter_core.utils import ensure_async
from tornado import web

from ..feed import Feed
from ..protocol.paths import Home, JobPaths
from ..store import journal
from .base import AUTH_RESOURCE, Handler, Refusal, permitted

MOST = 64
"""Messages in one request."""

LONGEST = 2.0
"""Seconds; a view repeats a question that takes longer in the next request."""


class Turn(Handler):
    """The messages of a view, and the answers of its feed."""

    @web.authenticated
    @permitted("read")
    async def post(self, job: str) -> None:
        """The messages of a new feed. The view's first message is ``open``, with the offsets that the view has."""
        said = self.body().get("messages")
        if not isinstance(said, list) or not all(isinstance(message, dict) for message in said) or len(said) > MOST:
            raise Refusal(400, f"messages is not a list of at most {MOST} objects", "a view sends messages to a feed")
        may = self.authorizer.is_authorized(self, self.current_user, "write", AUTH_RESOURCE)
        may_cancel = bool(await ensure_async(may))
        await self.answer(turn, self.paths(job), self.data, may_cancel, said)


def turn(paths: JobPaths, home: Home, may_cancel: bool, said: list[dict[str, Any]]) -> dict[str, Any]:
    """``messages``: the answers, and as many messages as a feed sends without an ack. Raises what ``Feed`` raises."""
    journal.state(paths)
    feed = Feed(paths, home, may_cancel)
    messages = [answer for message in said for answer in feed.receive(message)]
    # A clock that runs faster: a feed pauses between messages, and would not end within a request.
    now, until = 0.0, time.monotonic() + LONGEST
    while (more := feed.poll(now)) or (feed.busy and time.monotonic() < until):
        messages += more
        now += 1.0
    return {"messages": messages}
