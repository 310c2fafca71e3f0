"""What this machine lets a job's processes use. Reads some small files, in about a tenth of a millisecond."""

from __future__ import annotations

import os
import pwd
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..plan import InfinibandPort, Limits


def limits() -> Limits:
    return Limits(
        shared_memory=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else -1,
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        infiniband=tuple(_infiniband()),
        kills=_ends_with_login(),
    )


def _infiniband() -> Iterator[InfinibandPort]:
    """Its devices, RoCE among them. The kernel's Documentation/ABI/stable/sysfs-class-infiniband."""
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        words = {name: " ".join(lines(port / name)) for name in ("state", "rate", "link_layer")}
        yield InfinibandPort(
            f"{port.parts[-3]}:{port.name}",
            words["state"].partition(": ")[2],  # "4: ACTIVE"
            words["rate"],
            words["link_layer"],
        )


def _ends_with_login() -> bool:
    """Whether logind kills a user's processes: KillUserProcesses of logind.conf(5), without loginctl's lingering."""
    value = ""
    for path in (Path("/etc/systemd/logind.conf"), *sorted(Path("/etc/systemd/logind.conf.d").glob("*.conf"))):
        for line in lines(path):
            name, _, said = line.partition("=")
            if name.strip() == "KillUserProcesses":
                value = said.strip().lower()
    return value in ("yes", "true", "1", "on") and not Path("/var/lib/systemd/linger", user(os.getuid())).exists()


def user(uid: int) -> str:
    """The user's name, else the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def lines(path: Path) -> list[str]:
    """Of a small file; none where it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
