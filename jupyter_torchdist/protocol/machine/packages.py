"""The platforms of wheels: which one this machine is, and which wheels a machine takes."""

from __future__ import annotations

import contextlib
import os
import sysconfig

KEPT_SECONDS = 30 * 86400.0
"""What ``--env-sync`` has made or got is deleted when no job has used it for so long."""


def platform() -> str:
    """Of this machine, as names of wheels have it."""
    name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    with contextlib.suppress(ValueError, OSError, AttributeError):  # of another C library than GNU's
        library, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        if library == "glibc" and name.startswith("linux_"):
            return f"manylinux_{version.replace('.', '_')}_{name.removeprefix('linux_')}"
    return name


def platforms(name: str) -> list[str]:
    """All platforms whose wheels run on this one, the newest first: ``manylinux_2_36_x86_64``, … 2_35 …"""
    kind, major, minor, *machine = name.split("_", 3)
    if kind != "manylinux":
        return [name]
    older = [f"manylinux_{major}_{number}_{machine[0]}" for number in range(int(minor), 4, -1)]
    named = [f"{old}_{machine[0]}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
    return [*older, *named, f"linux_{machine[0]}"]
