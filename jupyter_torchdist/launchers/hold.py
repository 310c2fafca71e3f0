"""On a node, starts what comes through a pipe, and ends all of it when standard input ends.

Its text is sent, so it imports nothing of this package. Arguments: the directory of the pipe, and that of replicas if
the job has one of its own. It returns when the pipe is there; a child stays. Standard input is held open by the process
that the engine started, so nothing outlives that, however it ends. Standard output ends when nothing is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""


def main(directory: str, scratch: str = "") -> None:
    parent = os.path.dirname(directory)
    for path in (parent, directory):
        os.makedirs(path, 0o700, exist_ok=True)
        if os.stat(path).st_uid != os.getuid():
            raise SystemExit(f"{path} belongs to another user")
    pipe = os.path.join(directory, "start")
    os.mkfifo(pipe, 0o600)
    if os.fork():
        os._exit(0)
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        serve(os.open(pipe, os.O_RDWR | os.O_CLOEXEC))
    finally:
        end()
        shutil.rmtree(directory, ignore_errors=True)
        if scratch:
            clean(scratch)


def serve(pipe: int) -> None:
    """Until standard input ends."""
    lines = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select(1.0)]
            reap()
            if 0 in ready and not os.read(0, 4096):
                return
            if pipe in ready:
                *whole, lines = (lines + os.read(pipe, 65536)).split(b"\n")
                for line in whole:
                    nothing = subprocess.DEVNULL
                    subprocess.Popen(["sh", "-c", line], stdin=nothing, stdout=nothing, stderr=nothing)


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end() -> None:
    """End every process below this one, agents first: how the others end now is not why the job does."""
    for pid in [pid for pid, parent in parents().items() if parent == os.getpid()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    number, deadline = signal.SIGTERM, time.monotonic() + GRACE
    while pids := below(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        wake = time.monotonic() + 0.5
        while time.monotonic() < wake and below(os.getpid()):
            time.sleep(0.02)
            reap()
        if time.monotonic() > deadline:
            number = signal.SIGKILL


def clean(scratch: str) -> None:
    """Delete all but the files that a cell wrote, below ``jobs/JOB/work``."""
    for folder, _, files in os.walk(scratch, topdown=False):
        for name in files if "/work" not in folder.removeprefix(scratch) else ():
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(folder)


def parents() -> dict[int, int]:
    """Of every process of the machine."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            found[int(pid)] = int(file.read().rpartition(")")[2].split()[1])
    return found


def below(root: int) -> list[int]:
    of = parents()
    found, todo = [], [root]
    while todo:
        parent = todo.pop()
        children = [pid for pid, its in of.items() if its == parent]
        found += children
        todo += children
    return found


main(*sys.argv[1:])
