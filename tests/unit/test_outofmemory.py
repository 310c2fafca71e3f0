"""Whether the kernel killed a process for memory: its log, and the counters of the control group."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.node import out_of_memory
from jupyter_torchdist.node.out_of_memory import OutOfMemory

LOG = "the kernel's log shows the out-of-memory killer"
LIMIT = "the memory limit of this cgroup was reached"

Say = Callable[[str, float], None]


@pytest.fixture(autouse=True)
def no_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "CGROUPS", tmp_path)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Iterator[Say]:
    """Write a record into a kernel log of the test's own, at a time on the monotonic clock: one read, one record."""
    read_fd, write_fd = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    monkeypatch.setattr(out_of_memory, "KERNEL_LOG", f"/proc/self/fd/{read_fd}")

    def say(text: str, t: float) -> None:
        os.write(write_fd, f"3,1042,{int(t * 1e6)},-;{text}\n SUBSYSTEM=mm\n".encode())

    yield say
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.parametrize(
    "text",
    [
        "Out of memory: Killed process 4711 (python) total-vm:9kB, anon-rss:9kB",
        "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4711,uid=0",
    ],
)
def test_the_kernels_log(text: str, say: Say) -> None:
    memory = OutOfMemory()
    say("usb 1-1: new device", time.monotonic())
    say(text, time.monotonic())
    assert LOG in memory.words(4711)


def test_another_process(say: Say) -> None:
    memory = OutOfMemory()
    say("Out of memory: Killed process 47110 (python)", time.monotonic())
    assert memory.words(4711) == ""
    say("Out of memory: Killed process 4711 (python)", time.monotonic())
    assert memory.words(0) == ""


def test_an_earlier_process_of_the_same_number(say: Say) -> None:
    say("Out of memory: Killed process 4711 (python)", time.monotonic() - 60)
    assert OutOfMemory().words(4711) == ""


def test_a_log_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(out_of_memory, "KERNEL_LOG", str(tmp_path / "missing"))
    assert OutOfMemory().words(4711) == ""


def test_the_counter_of_the_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(out_of_memory, "KERNEL_LOG", str(tmp_path / "missing"))
    unified = tmp_path / "memory.events"
    monkeypatch.setattr(
        out_of_memory, "_counters", lambda: [(tmp_path / "none", r"x (\d+)"), (unified, r"(?m)^oom_kill (\d+)")]
    )
    unified.write_text("low 0\noom 5\noom_kill 2\noom_group_kill 7\n")
    memory = OutOfMemory()
    assert memory.words(4711) == ""
    unified.write_text("low 0\noom 6\noom_kill 3\noom_group_kill 7\n")
    assert LIMIT in memory.words(4711)


REAL = """
import os, signal, sys
from pathlib import Path
group = Path(sys.argv[1])
(group / "cgroup.procs").write_text(str(os.getpid()))
from jupyter_torchdist.node import out_of_memory as outofmemory
if sys.argv[2] == "no log":
    outofmemory.KERNEL_LOG = "/nonexistent"
memory = outofmemory.OutOfMemory()
pid = os.fork()
if pid == 0:
    Path("/proc/self/oom_score_adj").write_text("1000")
    hog = []
    while True:
        hog.append(bytearray(b"x" * 1_000_000))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
print(memory.words(pid))
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 64 MiB; only root can make one."""
    for parent, limit in ((Path("/sys/fs/cgroup/memory"), "limit_in_bytes"), (Path("/sys/fs/cgroup"), "max")):
        group = parent / f"torchdist-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / f"memory.{limit}").write_text(str(64 * 2**20))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


@pytest.mark.parametrize(("log", "expected"), [("log", "out-of-memory killer"), ("no log", LIMIT)])
def test_the_real_killer(log: str, expected: str, small_group: Path) -> None:
    if log == "log" and not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log may not be read")
    done = subprocess.run([sys.executable, "-c", REAL, str(small_group), log], capture_output=True, check=True)
    assert expected in done.stdout.decode()
