"""The files of a job, opened for reading. User code can put a pipe, a device or a link in their place."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


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
