"""Files on a disk that may be full, and in whose place user code can put a pipe, a device or a link."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT)

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of fallocate(2): the file's length does not change


def open_fd(path: Path | str) -> int:
    """A descriptor of a plain file. Raises ``OSError`` for others: a pipe never ends, a link may lead to a secret."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return fd


def open_plain(path: Path | str, buffering: int = -1) -> BinaryIO:
    """A plain file, open for reading. Raises ``OSError``."""
    return open(open_fd(path), "rb", buffering=buffering)


def read_plain(path: Path) -> bytes:
    """The whole content of a plain file. Raises ``OSError``."""
    with open_plain(path) as file:
        return file.read()


def size_of(path: Path | str) -> int:
    """In bytes; 0 for a file that is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def write_record(path: Path, size: int, place: int, data: bytes) -> None:
    """Write the record with number ``place`` of a file with ``size`` bytes for each; nothing where the disk is full."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, data, size * place)
        finally:
            os.close(fd)


def read_records(path: Path, size: int, ranks: Sequence[int]) -> dict[int, bytes]:
    """The record of each of ``ranks``, in their order in the file; shorter, or none, where the file ends before."""
    with contextlib.suppress(OSError), open_plain(path) as file:
        data = file.read(size * len(ranks))
        return {rank: data[size * place : size * (place + 1)] for place, rank in enumerate(ranks)}
    return {}


def status_of(path: Path) -> os.statvfs_result:
    """The file system that ``path`` is in, or would be in. Raises ``OSError``."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.statvfs(path)


def has_no_inodes(path: Path) -> bool:
    """Whether the file system has room, but not for another file."""
    try:
        status = status_of(path)
    except OSError:
        return False
    return status.f_files > 0 and status.f_favail == 0


def in_words(error: OSError) -> str:
    """``error``, with the limit that was reached: the system has the same words for bytes and inodes."""
    if error.errno in FULL and error.filename and has_no_inodes(Path(error.filename)):
        return f"{error.filename}: the file system has no free inodes, it holds too many files"
    return str(error)


def reserve(fd: int, size: int) -> None:
    """Reserve ``size`` bytes after the end of a file; does nothing if the file system cannot."""
    if not sys.platform.startswith("linux"):
        return
    end = os.fstat(fd).st_size
    # The result is ignored: a full disk, or NFS before 4.2, cannot reserve space.
    ctypes.CDLL(None).fallocate64(fd, _KEEP_SIZE, ctypes.c_int64(end), ctypes.c_int64(size))
