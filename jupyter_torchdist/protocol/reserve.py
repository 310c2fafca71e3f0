"""Reserves disk space for a file that must still be able to grow when the disk is full."""

from __future__ import annotations

import ctypes
import os
import sys

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of fallocate(2): the file's length does not change


def reserve(fd: int, size: int) -> None:
    """Reserve ``size`` bytes after the end of a file; does nothing if the file system cannot."""
    if not sys.platform.startswith("linux"):
        return
    end = os.fstat(fd).st_size
    # The result is ignored: a full disk, or NFS before 4.2, cannot reserve space.
    ctypes.CDLL(None).fallocate64(fd, _KEEP_SIZE, ctypes.c_int64(end), ctypes.c_int64(size))
