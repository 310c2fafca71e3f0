"""Atomic writes: a temporary file, then a rename. Only here does an ``OSError`` become a ``StoreError``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..protocol import codec
from ..protocol.disk import FULL, has_no_inodes, read_plain, status_of
from ..protocol.errors import DamagedJob, StoreError
from ..protocol.paths import make_private

LARGE = 1024 * 1024
"""From this many bytes on, the free space is checked before the write."""

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)

Data = bytes | bytearray | memoryview


def in_bytes(size: float) -> str:
    """``1234567`` as ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@contextlib.contextmanager
def writing(directory: Path, size: int = 0) -> Iterator[None]:
    """Use around any write below ``directory``: an ``OSError`` (a full disk) becomes a ``StoreError`` with a hint."""
    try:
        yield
    except OSError as error:
        raise _in_words(error, directory, size) from error


def _in_words(error: OSError, directory: Path, size: int) -> StoreError:
    if error.errno in FULL and has_no_inodes(directory):
        return StoreError(
            f"the file system of {directory} has no free inodes: it holds too many files",
            "remove old jobs (`%dist rm JOB`), or set $TORCHDIST_HOME to a directory on another disk",
        )
    if error.errno in FULL:
        needed = f"{in_bytes(size)} needed, " if size else ""
        return StoreError(
            f"the disk under {directory} is full: {needed}{in_bytes(free_space(directory))} free",
            "remove old jobs (`%dist rm JOB`), or set $TORCHDIST_HOME to a directory on a larger disk",
        )
    if error.errno in _REFUSED or isinstance(error, PermissionError):
        return StoreError(
            f"the data directory {directory} cannot be written: {error.strerror or error}",
            "make it writable, or set $TORCHDIST_HOME to another directory",
        )
    return StoreError(
        f"the data directory {directory} cannot be used: {error}",
        "check the disk, or set $TORCHDIST_HOME to another directory",
    )


def free_space(directory: Path) -> int:
    """Bytes that this user may still write below ``directory``, without quotas that the file system does not report."""
    status = status_of(directory)
    return status.f_bavail * status.f_frsize


def publish(path: Path, data: Data) -> None:
    """Write ``path`` (mode 0600) so that a reader finds the complete file or none. The directory must exist.

    A reader may already have removed the file when this returns. Raises ``StoreError``, and then leaves no file.
    """
    publish_as(path.parent, data, lambda: path)


def publish_as(directory: Path, data: Data, name: Callable[[], Path]) -> None:
    """``publish`` to a path in ``directory``. ``name`` returns the path; it is called after the data is written."""
    view = memoryview(data).cast("B")
    with writing(directory, view.nbytes):
        if view.nbytes >= LARGE and free_space(directory) < view.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fd, aside = tempfile.mkstemp(dir=directory, prefix=".", suffix=".tmp")
        try:
            try:
                write_all(fd, view)
            finally:
                os.close(fd)
            os.rename(aside, name())
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise


def write_all(fd: int, view: memoryview) -> None:
    """Write all of ``view``: one write(2) accepts at most 2 GiB and may write less."""
    while view.nbytes:
        view = view[os.write(fd, view) :]


def lock(fd: int) -> bool:
    """Take the lock of an open file; False while another process has it. True where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def private(*directories: Path) -> Path:
    """Create each directory, the outermost first, with mode 0700. Returns the last one. Raises ``StoreError``."""
    for directory in directories:
        with writing(directory):
            make_private(directory)
    return directories[-1]


def publish_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` as one line of JSON. Raises ``StoreError``."""
    publish(path, codec.dumps(value).encode("ascii") + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object at ``path``. Raises ``DamagedJob`` if it is missing, unreadable or not an object."""
    try:
        value = codec.loads(read_plain(path))
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(value, dict):
        raise damaged(path, "it holds no JSON object")
    return value


def damaged(path: Path, why: str) -> DamagedJob:
    """The error for a damaged file of the store."""
    return DamagedJob(f"{path} is damaged: {why}", "run the cell again; `%dist rm JOB` removes what is left")
