"""What a test may leave behind: nothing. Finds processes, threads, listening sockets and variables left over."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from jupyter_torchdist.protocol.process import job_token_of, start_ticks, stat_fields

RUNTIME = "TORCHDIST_RUNTIME_DIR"
KERNEL_THREAD = 0x00200000
"""``PF_KTHREAD`` among a process's flags (linux/sched.h): it has no environment."""


def environ_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty when it is gone."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, _, value in pairs}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _has_runtime(pid: int, directory: Path) -> bool:
    """Whether the process was started with this ``TORCHDIST_RUNTIME_DIR``."""
    try:
        fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with open(fd, "rb", buffering=0) as file:
            return b"\0%s=%s\0" % (RUNTIME.encode(), os.fsencode(directory)) in b"\0" + file.readall() + b"\0"
    except OSError:
        return False


def processes_of_runtime(directory: Path) -> list[int]:
    """Living processes that were started with this ``TORCHDIST_RUNTIME_DIR``, this one excepted."""
    return [pid for pid in _pids() if pid != os.getpid() and _has_runtime(pid, directory) and start_ticks(pid)]


_KERNEL_THREADS: set[int] = set()
"""Those seen so far: most processes of a machine are, and are looked at once."""


@dataclass(frozen=True)
class _Process:
    parent: int
    ticks: int
    """When it started; 0 of one that has ended and was not waited for."""


def _processes() -> dict[int, _Process]:
    """Those of the machine by their numbers, kernel threads left out: one pass, as each test makes two of them."""
    found = {}
    for pid in _pids():
        if pid in _KERNEL_THREADS:
            continue
        with contextlib.suppress(OSError):  # ended meanwhile
            state, parent, *_ = fields = stat_fields(pid)
            if int(fields[6]) & KERNEL_THREAD:
                _KERNEL_THREADS.add(pid)
            else:
                found[pid] = _Process(int(parent), 0 if state in "ZX" else int(fields[19]))
    return found


def _families(processes: dict[int, _Process], roots: Iterable[int]) -> set[int]:
    """What descends from any of ``roots``, these not included."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


def is_warm(pid: int) -> bool:
    """Whether the process is one that stays for the next job: agent, zygotes."""
    command = command_of(pid)
    ours = "jupyter_torchdist.node" in command or "jupyter_torchdist.driver --zygote" in command
    return ours and not job_token_of(pid) and not _drives(pid)


def _drives(pid: int) -> bool:
    """Whether a driver has been given a job: it works in a session of its own from then on, its journal open."""
    return any(file.endswith("journal.jsonl") for file in open_files(pid))


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process lead to: paths, and ``socket:[inode]``."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> bool:
    """Whether ``condition`` held within ``timeout`` seconds: if not given, as many as a busy machine may need."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def listening(sockets: set[str]) -> set[str]:
    """Those of these sockets (inodes) on which somebody listens for TCP."""
    listeners = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        listeners |= {fields[9] for fields in map(str.split, rows) if fields[3] == "0A"}
    return listeners & sockets


_COME_AND_STAY = ("PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
"""Variables of pytest, and those that scikit-learn sets when a library imports it."""


@dataclass(frozen=True)
class Snapshot:
    """What is there at one moment."""

    processes: frozenset[tuple[int, int]]
    """(pid, start ticks): descendants of the test process and whatever runs in its runtime directory."""
    threads: frozenset[int]
    sockets: frozenset[str]
    """Inodes, of this process and its descendants."""
    environ: tuple[tuple[str, str], ...]

    @staticmethod
    def take(runtime: Path, lasting: Iterable[int] = ()) -> Snapshot:
        """``lasting``: processes whose descendants come and go as they like, such as a browser's."""
        processes, own = _processes(), os.getpid()
        family = _families(processes, [own])
        others = (pid for pid in processes.keys() - family - {own} if _has_runtime(pid, runtime))
        pids = {*family, *others} - _families(processes, lasting)
        links = (link for pid in (own, *pids) for link in open_files(pid))
        return Snapshot(
            processes=frozenset((pid, processes[pid].ticks) for pid in pids if processes[pid].ticks),
            threads=frozenset(thread.ident or 0 for thread in threading.enumerate() if not thread.daemon),
            sockets=frozenset(link[8:-1] for link in links if link.startswith("socket:")),
            environ=tuple(sorted((k, v) for k, v in os.environ.items() if k not in _COME_AND_STAY)),
        )

    def left_since(self, before: Snapshot) -> list[str]:
        """One line for each thing that is here now and was not before."""
        helper = getattr(resource_tracker._resource_tracker, "_pid", None)
        pids = [pid for pid, _ in self.processes - before.processes if pid != helper and not is_warm(pid)]
        # One without a command line has given up its memory: it is on its way out.
        lines = [f"process {pid}: {said} {job_token_of(pid)}" for pid in sorted(pids) if (said := command_of(pid))]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines += [f"thread {names.get(ident, ident)}" for ident in self.threads - before.threads]
        if opened := {*self.sockets} - before.sockets:
            lines += [f"listening socket {inode}" for inode in listening(opened)]
        return lines + list(_changes(before.environ, self.environ))


def _changes(before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]]) -> Iterable[str]:
    old, new = dict(before), dict(after)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"os.environ[{name!r}] was {old.get(name)!r} and is {new.get(name)!r}"
