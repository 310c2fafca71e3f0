"""The notebook's world, for the ranks of a job. It goes through pipes and sockets of this user, never onto a disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LIBRARIES = ("pandas", "scipy", "sklearn")
"""Besides torch's, what a warm process may import before it forks: tested (tests/integration/test_fork.py)."""


@dataclass(frozen=True)
class World:
    """What a rank shares with the process that asked for it."""

    environ: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    umask: int
    rlimits: dict[str, list[int]]
    """Resource limits by name, [soft, hard]."""
    python: str
    """The interpreter."""
    libraries: tuple[str, ...] = ()
    """Modules of ``LIBRARIES`` that it had imported: ranks will probably want them."""

    @staticmethod
    def from_json(value: dict[str, Any]) -> World:
        return World(**{**value, "sys_path": tuple(value["sys_path"]), "libraries": tuple(value["libraries"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
