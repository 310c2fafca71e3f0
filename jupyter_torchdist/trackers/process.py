"""Starts the process of a tracker (``trackers/__main__.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from ..protocol.paths import JobPaths
from ..store.files import private, writing

SECONDS = "TORCHDIST_TRACK_SECONDS"
"""The variable that says how long a tracker goes on after the job's end."""

USUAL_SECONDS = 300.0


def start(paths: JobPaths, name: str, environ: Mapping[str, str], directory: str) -> subprocess.Popen[bytes]:
    """A process that outlives this one. What it prints goes to a file in the job directory.

    Raises ``OSError``, ``StoreError``.
    """
    private(paths.tracking)
    with writing(paths.tracking):
        log = os.open(paths.tracker_log(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    seconds = environ.get(SECONDS, str(USUAL_SECONDS))
    words = ["-m", "jupyter_torchdist.trackers", name, str(paths.root), directory, seconds]
    try:
        return subprocess.Popen(
            [sys.executable, *words],
            env=dict(environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
