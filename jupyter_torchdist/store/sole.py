"""A lock that lets one process at a time do something, on this machine's own disk."""

from __future__ import annotations

import contextlib
import os

from ..protocol.paths import make_private, runtime_dir
from .files import lock


class Sole(contextlib.AbstractContextManager[bool]):
    """Whether this process alone does what ``name`` says. Not every network file system supports locks.

    Who has the lock removes the file. A process that opened the file before that holds the lock of nothing, so it looks
    whether the path still names what it locked, and opens the path again.
    """

    def __init__(self, name: str) -> None:
        self._path = make_private(runtime_dir()) / f"{name}.lock"
        self._fd = -1

    def __enter__(self) -> bool:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not lock(fd):
                os.close(fd)
                return False
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    self._fd = fd
                    return True
            os.close(fd)

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
