"""The notebook's environment for the ranks of a job. Sent through this user's pipes and sockets, never stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

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

    @cached_property
    def fields(self) -> dict[str, Any]:
        """As ``to_json``, made once for all nodes."""
        return self.to_json()

    def for_a_host(self, names: Collection[str]) -> World:
        """What goes to another machine: the variables with these names, the directory, the umask."""
        chosen = {name: self.environ[name] for name in names if name in self.environ}
        return replace(self, environ=chosen, sys_path=(), rlimits={}, python="")

    def after_login(self, environ: Mapping[str, str], python: str) -> World:
        """On that machine: with the environment and the interpreter of the login there."""
        return replace(self, environ={**environ, **self.environ}, python=python)
