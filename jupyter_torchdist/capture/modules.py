"""Modules of the user's own project: which ones the captured code reaches, and their source files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def local_sources(names: Iterable[str], cwd: Path) -> tuple[dict[str, Path], list[str]]:
    return {}, []
