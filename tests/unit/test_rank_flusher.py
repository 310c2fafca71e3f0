"""The thread that writes out what was buffered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from jupyter_torchdist.ranks.streams.flusher import Flusher


class Counted:
    def __init__(self) -> None:
        self.deadline: float | None = None
        self.flushed = threading.Semaphore(0)

    def flush(self) -> None:
        self.deadline = None
        self.flushed.release()

    def soon(self) -> bool:
        return self.flushed.acquire(timeout=10)


@pytest.fixture
def flusher() -> Iterator[Flusher]:
    flusher = Flusher()
    yield flusher
    flusher.stop()


def test_a_deadline_is_kept_after_a_wake(flusher: Flusher) -> None:
    source = Counted()
    flusher.add(source)
    flusher.start()
    for _ in range(3):
        source.deadline = time.monotonic()
        flusher.wake()
        flusher.wake()
        assert source.soon()


def test_everything_is_flushed_now_and_then_unasked(flusher: Flusher) -> None:
    source = Counted()
    flusher.add(source)
    flusher.start()
    assert source.soon() and source.soon()


def test_one_source_does_not_hurry_another(flusher: Flusher) -> None:
    busy, calm = Counted(), Counted()
    calm.deadline = time.monotonic() + 3600
    flusher.add(busy)
    flusher.add(calm)
    flusher.start()
    for _ in range(20):
        busy.deadline = time.monotonic()
        flusher.wake()
        assert busy.soon()
    assert not calm.flushed.acquire(blocking=False)


def test_stop_flushes_for_the_last_time() -> None:
    flusher = Flusher()
    source = Counted()
    source.deadline = time.monotonic() + 3600
    flusher.add(source)
    flusher.start()
    flusher.stop()
    assert source.soon()
