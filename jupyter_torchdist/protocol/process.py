"""The identity of a process, so that a signal never hits another process with a reused pid.

Reads /proc, which ranks need. Jobs whose ranks are on hosts do not: without /proc, ps(1) knows processes.
"""

from __future__ import annotations

import calendar
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from .errors import LaunchError
from .typed import Record

PROC = os.path.exists("/proc/self/stat")
"""Whether processes are files in /proc (proc(5)), as on Linux. macOS has no such files."""

STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""At this signal a rank writes its stacks. SIGUSR1 does so, too, but user code may have a handler of its own for it."""

JOB_TOKEN = "TORCHDIST_JOB"
"""Environment variable in the ``/proc/PID/environ`` of every process of a job; its value is ``job_token``."""

JOB_TOKEN_LENGTH = 128
"""Characters of a token, padded with spaces, because it is overwritten in place (``runtime.assignment``)."""


def job_token(job: str, node: str) -> str:
    """The token that marks the processes of a job on one node."""
    return f"{job}@{node}"[:JOB_TOKEN_LENGTH].ljust(JOB_TOKEN_LENGTH)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """An id that changes with every boot of this machine; empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return _boot_session()


def _boot_session() -> str:
    """macOS's id of this boot; empty on other systems."""
    if os.uname().sysname != "Darwin":
        return ""
    try:
        return _said("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid").strip()
    except OSError:
        return ""


def _said(*command: str) -> str:
    # A full path and inherited descriptors (Python's are not): macOS then spawns, and copies no large kernel.
    environ = {**os.environ, "LC_ALL": "C", "TZ": "UTC0"}
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ, close_fds=False, check=False
    ).stdout


def check_ranks() -> None:
    """Raises ``LaunchError`` where no rank can run."""
    if not PROC:
        raise LaunchError(
            f"ranks on this machine ({socket.gethostname()}) need Linux, and a /proc",
            "name other machines: --hosts HOST,HOST",
        )


@lru_cache(maxsize=1)
def _pid_namespace_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def pid_namespace() -> str:
    """Identity of this process's pid namespace; cached per pid, because a fork may be in another namespace."""
    return _pid_namespace_of(os.getpid())


def _read(path: str) -> bytes:
    """The content of a file in ``/proc``. It is fast, because a job's end reads two files of every process."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def stat_fields(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the state (field 3 of proc(5)) on. Raises ``OSError`` if the process ended."""
    return parse_stat(_read(f"/proc/{pid}/stat"))


def parse_stat(line: bytes) -> list[str]:
    """The fields after the name, which may contain blanks and parentheses. Raises ``OSError`` for an empty line."""
    _, closed, rest = line.rpartition(b")")
    if not closed:
        raise OSError("no line of /proc/PID/stat")  # the process is just ending
    return rest.decode("ascii", "replace").split()


_PS = "/bin/ps"
_LSTART = "%a %b %d %H:%M:%S %Y"


def _started(pid: int) -> int:
    """When the process started, in seconds since the epoch, as ps(1) says; 0 if it ended or is a zombie.

    Two answers for one process may differ by one second. Raises ``OSError`` when there is no ps(1).
    """
    words = _said(_PS, "-o", "stat=", "-o", "lstart=", "-p", str(pid)).split(None, 1)
    if len(words) < 2 or words[0].startswith("Z"):
        return 0
    return calendar.timegm(time.strptime(words[1].strip(), _LSTART))


_DEVIATION = 0 if PROC else 1
"""By how much two values of ``start_ticks`` for one process may differ."""


def session_of(pid: int) -> int:
    """The session (setsid(2)) of the process, a pid; 0 if the process ended."""
    try:
        return int(stat_fields(pid)[3])
    except OSError:
        return 0


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if it ended or is a zombie.

    Without /proc: in seconds since the epoch, to one second.
    """
    try:
        if not PROC:
            return _started(pid)
        fields = stat_fields(pid)
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


@lru_cache(maxsize=1)
def _own_start(pid: int) -> int:
    """``start_ticks`` of this process, for which ps(1) is asked once."""
    return start_ticks(pid)


@dataclass(frozen=True)
class ProcessId(Record):
    """A process, with enough data that it can never be confused with another process."""

    host: str
    boot: str
    namespace: str
    pid: int
    ticks: int

    @staticmethod
    def of(pid: int) -> ProcessId:
        ticks = start_ticks(pid) if PROC or pid != os.getpid() else _own_start(pid)
        return ProcessId(socket.gethostname(), boot_id(), pid_namespace(), pid, ticks)

    @staticmethod
    def mine() -> ProcessId:
        return ProcessId.of(os.getpid())

    @property
    def here(self) -> bool:
        """Whether the process is on this machine, in this boot and in this pid namespace."""
        same = (self.boot, self.namespace) == (boot_id(), pid_namespace())
        return same and (bool(self.boot) or self.host == socket.gethostname())

    def alive(self) -> bool:
        """Whether the process runs (a zombie does not). Only meaningful if ``here`` is true, else False."""
        if not self.here or self.pid <= 0:
            return False
        return self.ticks != 0 and abs(start_ticks(self.pid) - self.ticks) <= _DEVIATION

    def open(self) -> int:
        """A pidfd (pidfd_open(2)) of exactly this process. Raises ``ProcessLookupError`` if it ended."""
        fd = os.pidfd_open(self.pid)
        if not self.alive():
            os.close(fd)
            raise ProcessLookupError(self.pid)
        return fd

    def signal(self, number: int) -> bool:
        """Send a signal. Returns False if the process has ended or belongs to another user by now (sudo)."""
        try:
            if not hasattr(os, "pidfd_open"):
                if not self.alive():
                    return False
                os.kill(self.pid, number)
                return True
            fd = self.open()
        except OSError:
            return False
        try:
            signal.pidfd_send_signal(fd, number)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(fd)
        return True


def handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal (``SigCgt`` of proc(5))."""
    try:
        lines = _read(f"/proc/{pid}/status").split(b"\n")
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith(b"SigCgt:")), 0)
    return bool(mask >> (number - 1) & 1)


def job_token_of(pid: int) -> str:
    """The token of the process; empty if it has none or cannot be read."""
    try:
        environ = b"\0" + _read(f"/proc/{pid}/environ")
    except OSError:
        return ""
    _, found, rest = environ.partition(f"\0{JOB_TOKEN}=".encode())
    return rest.split(b"\0", 1)[0].decode("ascii", "replace").strip() if found else ""


def processes_of_job(token: str, leaders: Iterable[ProcessId] = ()) -> list[ProcessId]:
    """All running processes on this machine that carry ``token``, or are in a session of ``leaders``.

    ``token`` is a ``job_token``, or a job's id for the processes of all its nodes on this machine.
    The token finds processes that the job forked or executed; the session finds processes with a cleaned environment.
    Processes that belong to another user now (setuid programs) are left out: we can neither read nor end them.
    """
    sessions = {leader.pid for leader in leaders if start_ticks(leader.pid) in (0, leader.ticks)}
    wanted = token.strip()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        try:
            session = int(stat_fields(pid)[3])
        except OSError:
            continue
        carried = job_token_of(pid)
        if session in sessions or (carried and wanted in (carried, carried.partition("@")[0])):
            process = ProcessId.of(pid)
            if process.ticks and _ours(pid):
                found.append(process)
    return found


def _ours(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, nearest first, from one pass over ``/proc``."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                children.setdefault(int(stat_fields(int(entry))[1]), []).append(int(entry))
            except OSError:
                continue
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def exit_in_words(code: int) -> str:
    """The meaning of an exit status (negative: a signal, as in ``subprocess``), as the end of a sentence."""
    if code < 0:
        name = signal_name(-code)
        return f"was killed ({name}{_SIGNAL_CAUSES.get(name, '')})"
    if code in _EXIT_CAUSES:
        return f"ended with exit code {code} ({_EXIT_CAUSES[code]})"
    return f"ended with exit code {code}"


def signal_name(number: int) -> str:
    """Of a signal's number on Linux, where ranks run: on this system it may mean another signal."""
    return f"SIG{_SIGNALS[number - 1]}" if 0 < number <= len(_SIGNALS) else f"signal {number}"


_SIGNALS = (
    *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM"),
    *("TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF"),
    *("WINCH", "IO", "PWR", "SYS"),
)
"""From number 1 on (signal(7), x86 and ARM)."""

_SIGNAL_CAUSES = {
    "SIGSEGV": ": a crash in native code",
    "SIGABRT": ": native code called abort, often a failed check in a C++ library",
    "SIGBUS": ": memory that is mapped but not there, often a full /dev/shm",
    "SIGILL": ": an instruction this processor does not have",
    "SIGFPE": ": an arithmetic fault in native code",
}
_EXIT_CAUSES = {
    126: "a file that is not executable",
    127: "a command that was not found",
    137: "SIGKILL",
    143: "SIGTERM",
}


def children() -> set[int]:
    """Processes whose parent is this one."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()
