"""Shared by all our handlers: authorization, errors as JSON, reading files in a thread, paths of jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from http.client import responses
from typing import Any, TypeVar, cast

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from ..protocol import codec
from ..protocol.errors import DamagedJob, InfrastructureError, JobNotFound, StoreError, TorchDistError
from ..protocol.feed import BEAT
from ..protocol.paths import Home, JobPaths
from .listing import Listing

AUTH_RESOURCE = "torchdist"
"""The resource for the server's ``Authorizer``; actions: ``read``, ``write`` (cancel, delete), ``execute`` (rerun)."""

SETTING = "torchdist_listing"

MESSAGE_LIMIT = 1024 * 1024
"""The largest message from a browser, in bytes."""

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (JobNotFound, 404),
    (DamagedJob, 409),
    (StoreError, 503),
    (InfrastructureError, 500),
    (TorchDistError, 409),
)

_HINTS = {
    401: "sign in again",
    403: "open the page with this server's own token, or sign in again; not every user may do everything",
    404: "reload the page: the server may have been updated",
    500: "the log of the Jupyter server says more",
}

Value = TypeVar("Value")

Method = TypeVar("Method", bound=Callable[..., Any])


def permitted(action: str) -> Callable[[Method], Method]:
    """Jupyter's ``authorized`` with an action other than the HTTP method's default."""
    return cast("Callable[[Method], Method]", authorized(action))


class Refusal(web.HTTPError):
    """An HTTP error with a message and a hint."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(status, message)
        self.message, self.hint = message, hint


def refusal(error: TorchDistError | OSError) -> Refusal:
    """``error`` as an HTTP error."""
    if isinstance(error, TorchDistError):
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        return Refusal(status, error.message, error.hint)
    if isinstance(error, FileNotFoundError):
        return Refusal(404, f"{error.filename} does not exist any more", "the job may have been deleted")
    what = error.filename or "the data directory"
    return Refusal(503, f"{what} cannot be used: {error.strerror or error}", "check the disk, and who owns the files")


async def in_thread(function: Callable[..., Value], *args: Any) -> Value:
    """Call ``function``, which reads files, without blocking the event loop. Raises ``Refusal``."""
    try:
        return await asyncio.to_thread(function, *args)
    except (TorchDistError, OSError) as error:
        raise refusal(error) from error


class Ours(JupyterHandler):
    """Base class of our handlers."""

    auth_resource = AUTH_RESOURCE

    @property
    def listing(self) -> Listing:
        return self.settings[SETTING]  # type: ignore[no-any-return]

    @property
    def data(self) -> Home:
        return self.listing.home

    def paths(self, job: str) -> JobPaths:
        """The files of ``job``, always below the directory of jobs. Raises ``Refusal``."""
        try:
            return self.data.job(job)
        except ValueError as error:
            raise Refusal(400, f"{job[:100]!r} is not the id of a job", "copy the id from the list of jobs") from error

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with ``{message, hint}``. An unexpected error gives no details."""
        error = (kwargs.get("exc_info") or (None, None, None))[1]
        words = {"message": responses.get(status_code, "unknown error"), "hint": _HINTS.get(status_code, "")}
        if isinstance(error, Refusal):
            words = {"message": error.message, "hint": error.hint}
        elif isinstance(error, web.HTTPError) and error.log_message:
            words["message"] = error.log_message % error.args if error.args else error.log_message.replace("%%", "%")
        self.set_header("Content-Type", "application/json")
        self.finish(codec.dumps(words))


class Handler(Ours, APIHandler):
    """Base class of the HTTP handlers."""

    async def answer(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function`` in a thread and send its value. Raises ``Refusal``."""
        text = await in_thread(lambda: codec.dumps(function(*args)))
        self.set_header("Cache-Control", "no-store")
        self.finish(text)

    def body(self) -> dict[str, Any]:
        """The request's JSON object; empty if there is no body. Raises ``Refusal``."""
        try:
            value = codec.loads(self.request.body) if self.request.body.strip() else {}
        except ValueError as error:
            raise Refusal(400, f"what was sent is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise Refusal(400, "what was sent is not a JSON object")
        return value


class Socket(WebSocketMixin, WebSocketHandler, Ours):
    """A WebSocket. A subclass decides in ``get`` who may open it, and then calls ``serve``."""

    @property
    def max_message_size(self) -> int:
        return MESSAGE_LIMIT

    def get_compression_options(self) -> dict[str, Any] | None:
        """The options of the server's own WebSockets."""
        return self.settings.get("websocket_compression_options")

    async def serve(self) -> None:
        """Open the socket and return when it is closed. Raises ``Refusal`` for a page of another site."""
        if not self.check_origin():
            raise Refusal(403, "a page of another site must not read jobs", _HINTS[403])
        if self.request.headers.get("Upgrade", "").lower() != "websocket":
            raise Refusal(400, "this address is a WebSocket", "open it as a WebSocket; a proxy may block it")
        beating = asyncio.create_task(self._beat())
        try:
            await WebSocketHandler.get(self)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        """Send empty messages: a page cannot see pings, and proxies close connections without traffic."""
        with contextlib.suppress(WebSocketClosedError):
            while True:
                await asyncio.sleep(BEAT)
                await self.write_message("")
