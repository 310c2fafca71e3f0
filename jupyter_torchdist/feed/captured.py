"""What a job captured, in the form sent to views."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..protocol.paths import JobPaths
from ..store import jobdir


def captured(paths: JobPaths) -> tuple[list[dict[str, Any]], list[str]]:
    """The receipt, and the notes written during capture. Raises ``JobNotFound``, ``DamagedJob``."""
    manifest = jobdir.read_manifest(paths)
    return [asdict(one) for one in manifest.receipt], list(manifest.notes)
