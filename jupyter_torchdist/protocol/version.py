"""Which agent belongs to which version of this package. Reads this package's own files."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from .paths import runtime_dir


def agent_directory() -> Path:
    """Socket, lock and logs of this version's agent: another version, or interpreter, gets another agent."""
    return runtime_dir() / f"agent-{source_digest()}"


NODE_ROOMS = (
    "protocol",
    "marshal",
    "states",
    "torch_private",
    "usercode",
    "checkpoint",
    "strategies",
    "rehearsal",
    "ranks",
    "node",
)
"""What a node needs of this package to run a job's ranks; nothing else has to be there."""


def source_digest() -> str:
    """Changes with every change of the files that an agent runs, so that no job runs on older code."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(f"{sys.executable} {package}\n".encode())
    for room in NODE_ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            status = file.stat()
            digest.update(f"{file.relative_to(package)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]
