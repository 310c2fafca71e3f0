"""Commands of ``scripts/gpu_check``: each with a time limit, and nothing that it started lives on."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

END_SECONDS = 3.0
"""That a step has to write down where it stands, once its time is over."""
LINES, LINE = 60, 500
"""Of what failed, on the page, and characters of each."""
NOISE = re.compile(r"/(_pytest|pluggy)/|<frozen runpy>|^Extension modules")


def adopt_orphans() -> None:
    """Whatever a step leaves behind becomes a child of this process (prctl(2)), which ends it."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def run(words: Sequence[str], seconds: float, log: Path, environ: dict[str, str] | None = None) -> int | None:
    """The exit code of a command, its output in ``log``; None when its time was over, and it was ended.

    Nothing that it started lives on. It is told first (SIGABRT): pytest then writes where each thread stands.
    """
    with open(log, "wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, env=environ, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            return None
        finally:
            end_descendants()
            process.wait()


def end_descendants() -> None:
    """Kill what is below this process, and what becomes its child by that, until nothing is left."""
    until = time.monotonic() + 10  # one in the kernel's hands may not end
    while (below := descendants()) and time.monotonic() < until:
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(0.02)


def descendants() -> list[int]:
    """Processes below this one, those that have ended and were not waited for included."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):  # ended meanwhile
                parent = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def tail_of(log: Path) -> str:
    """Its last lines, but for pytest's own frames."""
    with suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        return "\n".join([line[:LINE] for line in lines if not NOISE.search(line)][-LINES:])
    return ""
