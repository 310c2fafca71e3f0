"""One daemon thread per rank that writes buffered data, and sleeps while there is none."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

_BACKSTOP = 0.25
"""Seconds between flushes without a request, which are needed for bytes written to ``sys.stdout.buffer``."""


class Source(Protocol):
    """An object to flush. ``deadline`` is on the monotonic clock; None while there is nothing to flush."""

    deadline: float | None

    def flush(self) -> None:
        """Write buffered data and set the next deadline. Never raises."""


class Flusher:
    """Calls each source at its deadline. A forked child has no thread: there ``wake`` does nothing."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._bell = threading.Lock()
        self._bell.acquire()
        self._pid = 0
        self._flushing = threading.RLock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="torchdist-flusher", daemon=True)

    def add(self, source: Source) -> None:
        self._sources.append(source)

    def start(self) -> None:
        self._pid = os.getpid()
        self._thread.start()

    def wake(self) -> None:
        """Check the deadlines now. Safe in a signal handler and in any thread."""
        try:
            self._bell.release()
        except RuntimeError:
            return  # the thread is already woken

    def stop(self) -> None:
        """End the thread and flush everything once more."""
        self._stopping = True
        self.wake()
        if self._pid == os.getpid():
            self._thread.join(1.0)
        self.flush()

    def flush(self) -> None:
        for source in self._sources:
            source.flush()

    def pause(self) -> None:
        """Keep the thread from flushing until ``resume``: a fork during a flush would leave a locked buffer in the
        child."""
        self._flushing.acquire()

    def resume(self) -> None:
        self._flushing.release()

    def _run(self) -> None:
        while not self._stopping:
            now = time.monotonic()
            due = [source.deadline for source in self._sources if source.deadline is not None]
            wait = min(due) - now if due else _BACKSTOP
            if wait > 0 and self._bell.acquire(timeout=wait):
                continue
            now = time.monotonic()
            with self._flushing:
                for source in self._sources:
                    if not due or (source.deadline is not None and source.deadline <= now):
                        source.flush()
