"""Handles a widget's messages while a cell blocks the kernel.

ipykernel 7.4 asks each comm which subshell handles its messages (``_reply_subshell_for``). We name a subshell of our
own, so that it also works in front ends without subshells (VS Code). Older kernels do not ask: there the waiting cell
itself reads the main shell's queue. Both are private parts of ipykernel, used only if they exist. Without them a
subshell of the front end still receives the messages, and ■ always cancels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

log = logging.getLogger(__name__)

HOOK = "_reply_subshell_for"
PATIENCE = 5.0
"""Seconds for the kernel's control thread to create or delete a subshell."""

Handler = Callable[[dict[str, Any]], None]
"""Handles a message of a comm."""


class Subshells:
    """Our single subshell in a kernel; it exists while at least one caller holds it. Thread-safe."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._lock = threading.Lock()
        self._holders = 0
        self.name: str | None = None
        """The subshell's id; None while no caller holds it, and if the kernel cannot create one."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the subshell for the length of the block."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self.name = self._ask("create_subshell_request").get("subshell_id")
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders and (name := self.name):
                    self.name = None  # first, so that no message is sent to a subshell that is being deleted
                    self._ask("delete_subshell_request", subshell_id=name)

    def route(self, comm: Any) -> bool:
        """Handle the messages of ``comm`` in this subshell. Returns whether the kernel can do that."""
        if not hasattr(comm, HOOK):
            return False
        setattr(comm, HOOK, lambda _data, asked: self.name or asked)
        return True

    def _ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """The kernel's answer to a request on its control channel; empty if there is none."""
        if not getattr(self._kernel, "_supports_kernel_subshells", False):
            return {}
        try:
            return _request(kind, content)
        except Exception as error:  # noqa: BLE001 (whatever it is, the widget goes on with the front end's subshell)
            log.warning("jupyter_torchdist: %s was not answered: %r", kind, error)
            return {}


def _request(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """Send a request to this process as a client does: with its connection file, without Jupyter's event loop."""
    from ipykernel.connect import get_connection_file
    from jupyter_client.blocking.client import BlockingKernelClient

    client = BlockingKernelClient(context=zmq.Context())
    client.load_connection_file(get_connection_file())
    channel = client.control_channel
    try:
        channel.send(client.session.msg(kind, content))
        answer: dict[str, Any] = channel.get_msg(timeout=PATIENCE)["content"]
        return answer
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)


class MainShell:
    """The messages in the main shell's queue while its cell runs. Only for the main thread."""

    def __init__(self, session: Any, stream: Any) -> None:
        self._session, self._stream = session, stream

    @staticmethod
    def of(kernel: Any) -> MainShell | None:
        """The queue of this kernel; None if its stream is not found."""
        stream = getattr(kernel, "shell_stream", None)
        if getattr(kernel, "_supports_kernel_subshells", False):
            manager = getattr(getattr(kernel, "shell_channel_thread", None), "manager", None)
            pair = getattr(manager, "_shell_channel_to_main", None)
            stream = getattr(pair, "to_stream", None) or getattr(pair, "on_recv_stream", None)
        parts = ("socket", "_recv_callback", "_run_callback")
        return MainShell(kernel.session, stream) if all(hasattr(stream, part) for part in parts) else None

    def poll(self, handlers: dict[str, Handler]) -> None:
        """Handle messages for these comms (by id). All other messages go to their usual handler, in order."""
        while True:
            try:
                frames = self._stream.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            _, parts = self._session.feed_identities(frames, copy=False)
            handle = self._handler(parts, handlers)
            if handle is None:
                self._stream._run_callback(self._stream._recv_callback, frames)
            else:
                handle(self._session.deserialize(parts, copy=False))

    def _handler(self, parts: list[Any], handlers: dict[str, Handler]) -> Handler | None:
        try:
            if self._session.unpack(parts[1].bytes)["msg_type"] != "comm_msg":
                return None
            return handlers.get(self._session.unpack(parts[4].bytes)["comm_id"])
        except (IndexError, KeyError, ValueError, TypeError):
            return None  # the kernel itself reports the error


_subshells: dict[int, Subshells] = {}


def subshells(kernel: Any) -> Subshells:
    """The ``Subshells`` of the kernel (a process has one kernel, but tests make several)."""
    return _subshells.setdefault(id(kernel), Subshells(kernel))
