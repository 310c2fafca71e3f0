"""Every Python that finds this module lacks what macOS does not have, and cannot fork."""

import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NoReturn

LACKING = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "pipe2", "eventfd", "timerfd_create"),
        *("copy_file_range", "splice", "posix_fadvise", "posix_fallocate", "getrandom", "setns", "unshare", "waitid"),
        *("getxattr", "setxattr", "listxattr", "removexattr", "O_TMPFILE", "O_PATH", "O_DIRECT", "O_NOATIME"),
    ),
    signal: ("pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "sigwaitinfo", "sigtimedwait"),
    socket: ("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "TCP_USER_TIMEOUT", "SOCK_SEQPACKET"),
    select: ("epoll",),
    resource: ("prlimit", "RLIMIT_RTPRIO", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_OFILE"),
    time: ("CLOCK_BOOTTIME",),
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS"),
}
CALLS = {"prctl", "inotify_init", "inotify_init1", "inotify_add_watch", "inotify_rm_watch", "memfd_create", "signalfd"}
"""Of the C library."""

for module, names in LACKING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def fork() -> NoReturn:
    raise OSError("the frameworks of macOS do not survive a fork")


class CDLL(ctypes.CDLL):
    def __getitem__(self, name: Any) -> Any:
        if name in CALLS:
            raise AttributeError(name)
        return super().__getitem__(name)


os.fork = os.forkpty = fork
ctypes.CDLL = CDLL  # type: ignore[misc]
