"""The agent that belongs to this version of the package. Reads the package's own files."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from .paths import runtime_dir


def agent_directory() -> Path:
    """The directory of the agent's socket, lock and logs. Another version or interpreter has another agent."""
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
"""The subpackages that a node needs to run a job's ranks."""


def source_digest() -> str:
    """A digest of the files that an agent runs. It changes with them, so that no job runs on older code."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(f"{sys.executable} {package}\n".encode())
    for room in NODE_ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            status = file.stat()
            digest.update(f"{file.relative_to(package)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]
