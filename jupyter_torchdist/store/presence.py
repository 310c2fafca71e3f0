"""Whether a live view of a job is open. The static picture is then needed only for saving, and is drawn rarely."""

from __future__ import annotations

import contextlib
import os
import time

from ..protocol.paths import JobPaths

PERIOD = 2.0
"""Seconds between two marks of one view."""
LASTING = 8.0
"""Seconds for which a mark is valid."""


def mark(paths: JobPaths) -> None:
    """Record that a view is open now. Does nothing if the directory cannot be written."""
    with contextlib.suppress(OSError):
        os.close(os.open(paths.watched, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.utime(paths.watched)


def watched(paths: JobPaths) -> bool:
    """Whether a view was open in the last ``LASTING`` seconds, by this host's clock."""
    try:
        return abs(time.time() - paths.watched.stat().st_mtime) < LASTING
    except OSError:
        return False
