"""Stops all ranks at the same step after SIGINT or SIGTERM. Without a signal, the ranks do not communicate for this.

A rank that receives a signal sets a key in the job's store. A thread of every rank checks this key once a second. Each
rank then votes with the step that it has finished, and goes on training. The step after the highest vote is the last.
Ranks with a collective in each step are never more than one step apart. So a rank that finishes the last step finds
all votes: the last rank voted before it entered the collective of that step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ..torch_private.places import default_store
from .rank_agreement import Ranks

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK = 1.0
"""Seconds between two checks of the store."""

_numbers = itertools.count()


class Stop:
    """The first signal requests a stop; a second one has its original effect.

    After ``patience`` seconds without a stop, the first signal also gets its original effect: then the ranks are not
    in a training step, or one rank is gone.
    """

    def __init__(
        self, ranks: Ranks, signals: Sequence[signal.Signals] = _SIGNALS, patience: float | None = None
    ) -> None:
        self._ranks, self._patience = ranks, patience
        self._asked: int | None = None
        self._vote: int | None = None
        self._closed = threading.Event()
        self._news = threading.Event()
        self._previous: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in signals}
        if ranks.group is not None:
            # With a process group there is always the job's store.
            self._store = PrefixStore(f"torchdist-stop-{next(_numbers)}", default_store())
            self._thread = threading.Thread(target=self._watch, name="torchdist-stop", daemon=True)
            self._thread.start()

    def at(self, step: int) -> int | None:
        """The signal if ``step``, which was just finished, is the last step; else None."""
        if self._asked is None:
            return None
        if self._ranks.group is None:
            return self._asked
        if self._vote is None:
            self._vote = step
            own = f"vote-{self._ranks.number}"
            self._store.set(own, str(step))
            self._store.check([own])  # the store answers in order: the vote is stored before the next step
        names = [f"vote-{number}" for number in range(self._ranks.size)]
        if not self._store.check(names):
            return None
        last = max(int(self._store.get(name)) for name in names) + 1
        return self._asked if step >= last else None

    def deliver(self, number: int) -> None:
        """Give the signal its original effect: ``KeyboardInterrupt``, or the end of the process."""
        previous: Callable[[int, FrameType | None], Any] | int | None = self._previous.get(number, signal.SIG_DFL)
        self.close()
        if callable(previous):
            previous(number, None)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @property
    def asked(self) -> int | None:
        """The signal that this or another rank received, if this rank knows of it."""
        return self._asked

    def close(self) -> None:
        """Restore the earlier signal handlers and stop the thread."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)
        self._closed.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(_LOOK)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            self.deliver(number)
            return
        self._asked = number
        self._news.set()

    def _watch(self) -> None:
        told: float | None = None
        with contextlib.suppress(RuntimeError):  # the store is gone, and so is the job
            while not self._closed.is_set():
                self._news.wait(_LOOK)
                self._news.clear()
                if self._asked is None and self._store.check(["asked"]):
                    self._asked, told = int(self._store.get("asked")), told or time.monotonic()
                elif self._asked is not None and told is None:
                    self._store.set("asked", str(self._asked))
                    told = time.monotonic()
                if told is not None and self._patience is not None and time.monotonic() - told > self._patience:
                    self._lose_patience()
                    return

    def _lose_patience(self) -> None:
        """Called in the thread, since the main thread may be blocked outside Python code."""
        assert self._asked is not None
        previous = self._previous.get(self._asked)
        if self._closed.is_set():
            return
        if self._asked == signal.SIGTERM and callable(previous):
            previous(self._asked, None)  # ``LastWill``, which may be called from any thread
        else:
            os.kill(os.getpid(), self._asked)
