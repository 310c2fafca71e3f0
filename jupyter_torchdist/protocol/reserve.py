"""Room on the disk for a file that must still grow when everything else has filled it up."""

from __future__ import annotations

import ctypes
import os
import sys

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of fallocate(2): the file's length stays as it is


def reserve(fd: int, size: int) -> None:
    """Have ``size`` bytes beyond the end of a file kept for it; where the file system cannot, nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    end = os.fstat(fd).st_size
    # The result does not matter: a disk that is full already, or NFS before 4.2, gives no promise.
    ctypes.CDLL(None).fallocate64(fd, _KEEP_SIZE, ctypes.c_int64(end), ctypes.c_int64(size))
