"""inotify(7) reports writes to files, so that the agent need not poll the files of a quiet job often."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_MODIFY, _CREATE = 0x2, 0x100


class Changes:
    """``fd`` is readable after a change of a watched file; -1 where inotify is not available."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        init = getattr(self._libc, "inotify_init1", None)
        self.fd: int = -1 if init is None else init(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watched: dict[str, dict[Path, int]] = {}

    def watch(self, job: str, folder: Path, files: Iterable[Path]) -> bool:
        """Watch these files of ``folder``. Returns whether every write to them is reported from now on."""
        if self.fd < 0:
            return False
        watched = self._watched.setdefault(job, {})
        wanted = [(path, _MODIFY) for path in files] + [(folder, _CREATE)]
        missing = [path for path, mask in wanted if path not in watched and not self._add(watched, path, mask)]
        return not missing

    def _add(self, watched: dict[Path, int], path: Path, mask: int) -> bool:
        number: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask)
        if number >= 0:
            watched[path] = number
        return number >= 0

    def forget(self, job: str) -> None:
        """Remove the watches of a job."""
        for number in self._watched.pop(job, {}).values():
            self._libc.inotify_rm_watch(self.fd, number)

    def drain(self) -> None:
        """Read and discard the events: it is enough to know that something changed."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 65536):
                continue

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
