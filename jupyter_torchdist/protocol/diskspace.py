"""Why a disk takes nothing more: its bytes or its inodes are used up."""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


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
