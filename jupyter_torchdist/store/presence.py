"""Whether somebody sees a job in a live view. Its still picture is then only for what is saved, and drawn seldom."""

from __future__ import annotations

import contextlib
import os
import time

from ..protocol.paths import JobPaths

PERIOD = 2.0
"""Seconds between two marks of one view."""
LASTING = 8.0
"""Seconds for which a mark holds."""


def mark(paths: JobPaths) -> None:
    """Say that a view is open now. A directory that cannot be written to is left as it is."""
    with contextlib.suppress(OSError):
        os.close(os.open(paths.watched, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.utime(paths.watched)


def watched(paths: JobPaths) -> bool:
    """Whether a view was open just now, by this host's clock."""
    try:
        return abs(time.time() - paths.watched.stat().st_mtime) < LASTING
    except OSError:
        return False
