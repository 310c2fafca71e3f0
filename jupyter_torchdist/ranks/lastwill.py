"""Publishes the values of a rank although the rank is stopped in the middle of its work.

When one rank fails, torch elastic sends SIGTERM to the others. A signal may arrive while a rank is in a collective,
where no Python code runs and no handler is called. But the C handler writes a byte to a pipe
(``signal.set_wakeup_fd``). A thread reads it, and acts if the main thread does not.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

_PATIENCE = 0.05
"""Seconds that the main thread has to handle a SIGTERM itself."""

_UNHEARD = 1.0
"""If the main thread has not handled an interrupt after this time, the thread acts."""


class LastWill:
    """Calls ``act`` at SIGTERM, and then lets the signal end the process as usual.

    ``heard``: whether the main thread has handled an interrupt. If it has not, ``act`` is called one second after the
    signal, and the process goes on.
    """

    def __init__(self, act: Callable[[], None], heard: Callable[[], bool]) -> None:
        self._act = act
        self._interrupt_heard = heard
        self._acting = threading.Lock()
        self._ends_by: str = ""
        """``main`` once the main thread publishes itself, ``signal`` once the handling of a SIGTERM has begun."""
        self._late = False
        self._terminated = threading.Event()
        self._mask: set[int] | None = None
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        threading.Thread(target=self._watch, name="torchdist-last-will", daemon=True).start()
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._in_child)

    def settle(self) -> None:
        """From now on the main thread publishes itself. Waits forever if the handling of a SIGTERM has begun."""
        with self._acting:
            if self._ends_by != "signal":
                self._ends_by = "main"
                return
        threading.Event().wait()

    def revoke(self) -> None:
        """Restore the default effect of SIGTERM, also for one received since ``settle``. Only in the main thread."""
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        if self._late:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._terminated.set()
        self._end()

    def _watch(self) -> None:
        due: float | None = None
        while True:
            wait = None if due is None else max(0.0, due - time.monotonic())
            readable = select.select([self._read], [], [], wait)[0]
            received = os.read(self._read, 64) if readable else b""
            if signal.SIGTERM in received and signal.getsignal(signal.SIGTERM) == self._on_signal:
                self._terminated.wait(_PATIENCE)
                self._end()
            if signal.SIGINT in received and due is None:
                due = time.monotonic() + _UNHEARD
            if due is not None and time.monotonic() >= due:
                due = None
                if not self._interrupt_heard():
                    self._leave_a_copy()

    def _leave_a_copy(self) -> None:
        with self._acting:
            if not self._ends_by:
                self._act()
        if self._late:
            self._end()

    def _end(self) -> None:
        """Act and end the process, in one thread only. The other thread continues until then."""
        self._late = True
        if not self._acting.acquire(blocking=False):
            return
        try:
            if self._ends_by:
                return
            self._ends_by = "signal"
        finally:
            self._acting.release()
        try:
            self._act()
        finally:
            end_by_signal()

    # SIGTERM is blocked during a fork: a child that gets it too early would write to the rank's pipe.

    def _block(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _unblock(self) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _in_child(self) -> None:
        self._late = False
        self.revoke()
        self._unblock()


def end_by_signal() -> None:
    """End this process by SIGTERM, so that its exit status shows the signal.

    Works in any thread; ``signal.signal`` works only in the main thread.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)
