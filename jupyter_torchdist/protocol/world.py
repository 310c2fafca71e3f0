"""The notebook's environment for the ranks of a job. Sent through this user's pipes and sockets, never stored."""

from __future__ import annotations

from dataclasses import dataclass

from .typed import Record

LIBRARIES = ("pandas", "scipy", "sklearn")
"""Packages that a warm process may import before it forks, besides torch; tested (tests/integration/test_fork.py)."""


@dataclass(frozen=True)
class World(Record):
    """What a rank shares with the process that started the job."""

    environ: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    umask: int
    rlimits: dict[str, tuple[int, int]]
    """Resource limits by name, (soft, hard)."""
    python: str
    """The interpreter."""
    libraries: tuple[str, ...] = ()
    """Modules of ``LIBRARIES`` that this process had imported: ranks will probably need them."""
