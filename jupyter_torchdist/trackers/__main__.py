"""``python -m jupyter_torchdist.trackers NAME JOB_ROOT DIRECTORY SECONDS``: the process of one tracker of a job.

It delivers until the job has ended and everything is delivered, and for SECONDS more at most. A second process for the
same tracker and job ends at once. Relative paths of the tracker's own settings begin at DIRECTORY.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from ..protocol.paths import JobPaths
from ..store.sole import Sole
from .delivery import Delivery
from .registry import tracker

NICE = 10
"""The job's ranks have priority where they run beside it."""


def main(name: str, root: str, directory: str, seconds: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.nice(NICE)
    paths = JobPaths(Path(root))
    with contextlib.suppress(OSError):
        os.chdir(directory)
    with Sole(f"tracker-{name}-{paths.job}") as sole:
        if sole:
            _deliver(Delivery(paths, name, tracker(name), float(seconds)))


def _deliver(delivery: Delivery) -> None:
    """In a thread of its own: a call into a tracker's client may never return."""
    thread = threading.Thread(target=_reported, args=(delivery,), daemon=True)
    thread.start()
    while thread.is_alive() and not delivery.time_is_up(time.monotonic()):
        thread.join(0.2)
    if thread.is_alive():
        delivery.leave()


def _reported(delivery: Delivery) -> None:
    try:
        delivery.go_on()
    except Exception:  # noqa: BLE001  # top level of this thread
        traceback.print_exc()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a client may wait for their server
