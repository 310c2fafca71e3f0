"""What a rank with results does on SIGTERM: torch elastic sends it to the others when one rank failed.

A rank in a collective runs no Python, so a handler alone would never be called: C's handler writes a byte to a
pipe (``signal.set_wakeup_fd``), and a thread that reads it acts when the main thread does not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_PATIENCE = 0.05
"""Seconds for the main thread to hear the signal itself."""


class LastWill:
    """Calls ``act`` once when SIGTERM comes, and then lets the signal end the process as it always would."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._begun = threading.Lock()
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        self._old = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._heard = threading.Event()
        signal.signal(signal.SIGTERM, self._on_signal)
        threading.Thread(target=self._watch, name="torchdist-last-will", daemon=True).start()
        self._mask: set[int] | None = None
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._in_child)

    def _block(self) -> None:
        """A child that is terminated before it has dropped the pipe would speak for the rank."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _unblock(self) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _in_child(self) -> None:
        self.revoke()
        self._unblock()

    def revoke(self) -> None:
        """SIGTERM is the system's own again. Only in the main thread."""
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._heard.set()
        self._perform()

    def _watch(self) -> None:
        while received := os.read(self._read, 64):
            if signal.SIGTERM in received and signal.getsignal(signal.SIGTERM) == self._on_signal:
                self._heard.wait(_PATIENCE)
                self._perform()

    def _perform(self) -> None:
        """In one thread only; the other one goes on as before until the process ends."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._act()
        finally:
            # signal.signal works in the main thread only, and the exit status should tell of the signal.
            libc = ctypes.CDLL(None)
            libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
            libc.signal(signal.SIGTERM, None)
            os.kill(os.getpid(), signal.SIGTERM)
