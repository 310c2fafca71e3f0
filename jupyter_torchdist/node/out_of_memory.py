"""Whether the out-of-memory killer ended a process: cgroup counters, and the kernel's log where it is readable."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

KERNEL_LOG = "/dev/kmsg"
CGROUPS = Path("/sys/fs/cgroup")

_LOG_LINES = 4000


class OutOfMemory:
    """Keeps the counters at the start of a job; ``words`` compares them later."""

    def __init__(self) -> None:
        self._before = _kills()
        self._since = time.monotonic()

    def words(self, pid: int) -> str:
        """Text that follows ``was killed (SIGKILL)``, as ``; …``. Empty when there is no sign of a memory limit."""
        if pid and _in_kernel_log(pid, self._since):
            return "; the kernel's log shows the out-of-memory killer"
        if _kills() > self._before:
            return "; the memory limit of this cgroup was reached and the kernel killed a process"
        return ""


def _kills() -> int:
    """Number of out-of-memory kills in this cgroup so far (cgroup v2, then v1)."""
    for path, pattern in _counters():
        try:
            match = re.search(pattern, path.read_text())
        except OSError:
            continue
        if match:
            return int(match[1])
    return 0


def _counters() -> list[tuple[Path, str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if number == "0":
            found.append((CGROUPS / relative / "memory.events", r"(?m)^oom_kill (\d+)"))
        elif "memory" in controllers.split(","):
            found.append((CGROUPS / "memory" / relative / "memory.oom_control", r"(?m)^oom_kill (\d+)"))
    return found


def _in_kernel_log(pid: int, since: float) -> bool:
    """``since``: seconds on the monotonic clock. Before this time the pid belonged to another process."""
    try:
        fd = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        pattern = re.compile(rb"(?i)(?:killed process|oom-kill:.*pid=)\s*" + str(pid).encode() + rb"\b")
        for _ in range(_LOG_LINES):
            try:
                head, _, text = os.read(fd, 8192).partition(b";")
                microseconds = int(head.split(b",")[2])
                if microseconds >= (since - 1) * 1e6 and pattern.search(text):
                    return True
            except BlockingIOError:
                return False
            except OSError:
                continue  # EPIPE: this record was overwritten while we read
        return False
    finally:
        os.close(fd)
