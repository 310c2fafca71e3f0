"""What git says of the directory that a job is submitted from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SECONDS = 2.0
"""How long git may take in all: a job does not wait for a slow disk."""


def git_state(directory: Path) -> dict[str, str]:
    """``commit``, ``branch`` and ``changes`` (``yes`` or ``no``, of known files); empty without a repository."""
    status = ["git", "-C", str(directory), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        said = subprocess.run(status, env=environ, capture_output=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = said.stdout.decode("utf-8", "replace").splitlines()
    heads = dict(line[len("# branch.") :].split(" ", 1) for line in lines if line.startswith("# branch."))
    changes = any(not line.startswith("#") for line in lines)
    return {"commit": heads.get("oid", ""), "branch": heads.get("head", ""), "changes": "yes" if changes else "no"}
