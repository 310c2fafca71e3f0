"""A job's feed in one question and one answer, for a page whose socket is not open yet.

A browser opens WebSockets to one address one after the other, and a Jupyter server leaves a kernel's unanswered while
that kernel starts: a minute, in which no socket of ours is opened. Requests pass meanwhile.
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

LONGEST = 2.0
"""Seconds; a question that takes longer is asked again in the next turn."""


class Turn(Handler):
    """What a view says, and what its feed says to that."""

    @web.authenticated
    @permitted("read")
    async def post(self, job: str) -> None:
        """The feed's messages. It is a new one each time: ``open`` comes first, with what the view has."""
        said = self.body().get("messages")
        if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
            raise Refusal(400, "messages is not a list of objects", "a view sends a list of messages to a feed")
        may = self.authorizer.is_authorized(self, self.current_user, "write", AUTH_RESOURCE)
        may_cancel = bool(await ensure_async(may))
        await self.answer(turn, self.paths(job), self.data, may_cancel, said)


def turn(paths: JobPaths, home: Home, may_cancel: bool, said: list[dict[str, Any]]) -> dict[str, Any]:
    """``messages``: as many as a feed sends unseen, and the answers. Raises what ``Feed`` raises."""
    journal.state(paths)
    feed = Feed(paths, home, may_cancel)
    messages = [answer for message in said for answer in feed.receive(message)]
    # A clock that runs ahead: a feed that waits between two words would not be done within a request.
    now, until = 0.0, time.monotonic() + LONGEST
    while (more := feed.poll(now)) or (feed.busy and time.monotonic() < until):
        messages += more
        now += 1.0
    return {"messages": messages}
