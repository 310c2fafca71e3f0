"""The notebook's environment for the ranks of a job. Sent through this user's pipes and sockets, never stored."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LIBRARIES = ("pandas", "scipy", "sklearn")
"""Packages that a warm process may import before it forks, besides torch; tested (tests/integration/test_fork.py)."""


@dataclass(frozen=True)
class World:
    """What a rank shares with the process that started the job."""

    environ: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    umask: int
    rlimits: dict[str, list[int]]
    """Resource limits by name, [soft, hard]."""
    python: str
    """The interpreter."""
    libraries: tuple[str, ...] = ()
    """Modules of ``LIBRARIES`` that this process had imported: ranks will probably need them."""

    @staticmethod
    def from_json(value: dict[str, Any]) -> World:
        return World(**{**value, "sys_path": tuple(value["sys_path"]), "libraries": tuple(value["libraries"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
