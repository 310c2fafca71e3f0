"""Passes messages between the views of one job and their feeds, in a separate thread.

Handlers of a comm run in any thread of the kernel; they only call ``hand``. The thread runs while the job runs or a
view is waiting for messages, and starts again with the next message.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

log = logging.getLogger(__name__)

PERIOD = 0.1
"""Seconds between two polls while a view is open: each message passes three threads of the kernel."""
ALONE = 1.0
"""Seconds between two polls while no view is open."""
VANISHED = 30.0
"""Seconds without an ``ack`` after which a view counts as closed."""
LINGER = 5.0
"""Seconds after the job's end during which a view may still open."""
QUIET = 2.0
"""After the job's end the thread ends when there was no message for so many seconds."""

BUNDLE = 256 * 1024
"""The largest number of characters sent together: unpacking them blocks the page."""

Message = dict[str, Any]


class Feed(Protocol):
    """The interface of ``feed.Feed``."""

    def receive(self, message: Message) -> list[Message]: ...

    def poll(self, now: float) -> list[Message]: ...

    def close(self) -> None: ...


class Port(Protocol):
    """What a pump needs from its owner: the comm, and facts about the job."""

    def feed(self) -> Feed:
        """The feed for a new view."""

    def send(self, view: str, messages: list[Message], binary: bool) -> None: ...

    def ended(self) -> bool:
        """Whether the job has ended."""

    def abandoned(self) -> None:
        """The job has ended and there is no view. This is the last call in the pump's thread."""

    def held(self) -> AbstractContextManager[None]:
        """A context that is open while the thread runs."""


@dataclass
class _View:
    feed: Feed
    binary: bool
    sent: int = 0
    shown: int = 0
    waiting: float = field(default=0.0)
    """Since when (monotonic time) messages wait for an ``ack``."""

    @property
    def behind(self) -> bool:
        return self.shown < self.sent


class Pump:
    """All views of one widget. Thread-safe."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._views: dict[str, _View] = {}
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._heard = 0.0

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="torchdist-view", daemon=True)
                self._heard = time.monotonic()
                self._thread.start()

    def hand(self, content: Message) -> None:
        """Add a view's message: ``{view, binary, message}``, ``{view, ping}`` or ``{view, bye}``. From any thread."""
        self._inbox.put(content)
        self.start()

    def close(self) -> None:
        """End the thread and every feed; later messages are ignored."""
        self._closed = True
        self._inbox.put({})
        if (thread := self._thread) and thread is not threading.current_thread():
            thread.join(timeout=5)
        self._drop(*self._views)

    def _run(self) -> None:
        with self._port.held():
            while not self._rests():
                self._step(PERIOD if self._views else ALONE)

    def _step(self, pause: float) -> None:
        """Handle messages for ``pause`` seconds, then poll every feed. A new view ends the pause."""
        until, open_before = time.monotonic() + pause, len(self._views)
        while len(self._views) == open_before and not self._closed:
            try:
                self._hear(self._inbox.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
        for name, view in list(self._views.items()):
            self._let_speak(name, view, lambda feed: feed.poll(time.monotonic()))
            if view.behind and time.monotonic() - view.waiting > VANISHED:
                self._drop(name)

    def _hear(self, content: Message) -> None:
        name, message = content.get("view"), content.get("message")
        if not isinstance(name, str) or self._closed:
            return
        if name not in self._views and isinstance(message, dict) and message.get("type") == "ack":
            return  # a late ack of a closed view: an answer could be acknowledged again, endlessly
        self._heard = time.monotonic()
        if content.get("bye"):
            self._drop(name)
            return
        if content.get("ping"):
            self._port.send(name, [{"n": 0, "type": "alive" if name in self._views else "forgotten"}], False)
            return
        if not isinstance(message, dict):
            return
        if message.get("type") == "open" and name not in self._views:
            self._views[name] = _View(self._port.feed(), bool(content.get("binary")))
        if (view := self._views.get(name)) is None:
            self._port.send(name, [{"n": 0, "type": "forgotten"}], False)
            return
        if message.get("type") == "ack" and isinstance(message.get("n"), int):
            view.shown = max(view.shown, message["n"])
            view.waiting = time.monotonic()
        elif message.get("type") == "open":
            view.shown = view.sent = 0
        self._let_speak(name, view, lambda feed: feed.receive(message))

    def _let_speak(self, name: str, view: _View, speak: Callable[[Feed], list[Message]]) -> None:
        try:
            messages = speak(view.feed)
        except Exception as error:  # an error of one view must not end the thread for the other views
            log.exception("jupyter_torchdist: a view of a job ended")
            messages = [{"n": view.sent + 1, "type": "gone", "reason": f"the view failed: {error!r}"}]
        self._say(name, view, messages)

    def _say(self, name: str, view: _View, messages: list[Message]) -> None:
        if not messages:
            return
        if not view.behind:
            view.waiting = time.monotonic()
        view.sent = max(view.sent, *(message.get("n", 0) for message in messages))
        self._heard = time.monotonic()
        self._port.send(name, messages, view.binary)
        if messages[-1].get("type") == "gone":
            self._drop(name)

    def _drop(self, *names: str) -> None:
        for name in names:
            if view := self._views.pop(name, None):
                view.feed.close()

    def _rests(self) -> bool:
        """Whether the thread ends now; a later message starts another thread."""
        quiet = time.monotonic() - self._heard
        over = self._closed or (quiet > (QUIET if self._views else LINGER) and self._port.ended())
        if over and self._views and any(view.behind for view in self._views.values()) and not self._closed:
            return False
        with self._lock:
            if not over or not (self._inbox.empty() or self._closed):
                return False
            self._thread = None
        if not self._views and not self._closed:
            self._port.abandoned()
        return True


def bundles(texts: Iterable[str]) -> Iterator[str]:
    """JSON texts joined into few JSON lists; a list has at most ``BUNDLE`` characters, or a single text."""
    held: list[str] = []
    for text in texts:
        if held and sum(map(len, held)) + len(text) > BUNDLE:
            yield f"[{','.join(held)}]"
            held = []
        held.append(text)
    if held:
        yield f"[{','.join(held)}]"
