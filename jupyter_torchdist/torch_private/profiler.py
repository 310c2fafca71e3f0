"""torch's profiler (Kineto): whether one runs in this thread, and who starts one."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch


def available() -> bool:
    """Whether torch was built with Kineto."""
    return bool(torch.profiler.kineto_available())


def runs() -> bool:
    """Whether a profiler runs in this thread. torch cannot run two."""
    return bool(torch._C._autograd._profiler_enabled())


def started() -> Any:
    """A profiler that has been started in this thread: of operations, and of kernels if there are GPUs."""
    with _without_its_own_lines():
        profiler = torch.profiler.profile()  # all activities that this build and this machine have
        profiler.start()
    return profiler


def stopped(profiler: Any, path: str) -> None:
    """Stop it in the thread that started it, and write what it saw: JSON of the Trace Event Format."""
    with _without_its_own_lines():
        profiler.stop()
        profiler.export_chrome_trace(path)


@contextlib.contextmanager
def before_another(call: Callable[[], None]) -> Iterator[None]:
    """Meanwhile ``call`` before the user's code prepares a profiler of its own."""
    kind: Any = torch.autograd.profiler.profile
    original = getattr(kind, "_prepare_trace", None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def prepare(self: Any) -> Any:
        call()
        return original(self)

    kind._prepare_trace = prepare
    try:
        yield
    finally:
        kind._prepare_trace = original


@contextlib.contextmanager
def _without_its_own_lines() -> Iterator[None]:
    """Without what Kineto says of its own stages on stderr."""
    with tempfile.TemporaryFile() as aside:
        kept = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            aside.seek(0)
            os.write(2, b"".join(line for line in aside if not line.startswith((b"USDT:", b"STAGE:"))))
