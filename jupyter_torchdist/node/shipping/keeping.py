"""What a node keeps of earlier jobs: captured data for the next one, logs and results that nobody fetched."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from ...protocol import codec
from ...protocol.bundle import Manifest
from ...protocol.disk import read_plain
from ...protocol.paths import JobPaths
from ...protocol.plan import Kept
from . import environments
from .replica import discard, replica_blobs

KEPT_DAYS = 7
"""After so many days without a change in a job's directory, its logs and results are deleted."""

SHARE, FREE = 0.25, 0.1
"""Captured data may take this share of its disk while this share is free. What was not used for longest goes first."""

DAY = 86400.0


def sweep(scratch: Path, wanted: Collection[str]) -> None:
    """Delete what is too old or too much, before a job comes that needs the blobs ``wanted``."""
    now = time.time()
    with contextlib.suppress(OSError):
        for root in list((scratch / "jobs").iterdir()):
            if now - _changed(root) > KEPT_DAYS * DAY:
                discard(JobPaths(root))
    environments.sweep(scratch)
    blobs = replica_blobs(scratch)
    kept: list[tuple[float, int, Path]] = []
    for entry in list(os.scandir(blobs)):
        with contextlib.suppress(OSError):  # another agent's
            status = entry.stat(follow_symlinks=False)
            if not entry.name.startswith("."):
                kept.append((status.st_mtime, status.st_size, Path(entry.path)))
            elif now - status.st_mtime > DAY:  # of an agent that was killed
                os.unlink(entry.path)
    if too_much := _too_much(blobs, sum(size for _, size, _ in kept)):
        _drop_oldest(kept, {*wanted, *_needed(scratch)}, too_much)


def use(blob: Path) -> None:
    """Note that a job needs the blob. Once a day, because ranks take a file that was touched for another one."""
    with contextlib.suppress(OSError):
        if time.time() - blob.stat().st_mtime > DAY:
            os.utime(blob)


def kept(scratch: Path) -> Kept:
    """What is there."""
    data = 0
    with contextlib.suppress(OSError):
        data = sum(entry.stat().st_size for entry in os.scandir(scratch / "blobs"))
    return Kept(data, *environments.kept(scratch))


def _changed(root: Path) -> float:
    """When anything in the directory last changed, without what the cell wrote."""
    paths = JobPaths(root)
    found = [root, *root.iterdir(), *paths.nodes.rglob("*"), *paths.results.glob("*")]
    return max((path.lstat().st_mtime for path in found), default=0.0)


def _too_much(blobs: Path, total: int) -> float:
    """Bytes of blobs that are to go."""
    disk = shutil.disk_usage(blobs)
    return max(0.0, total - SHARE * disk.total, FREE * disk.total - disk.free)


def _needed(scratch: Path) -> set[str]:
    """Blobs of jobs that are still here."""
    digests: set[str] = set()
    for path in (scratch / "jobs").glob("*/manifest.json"):
        with contextlib.suppress(OSError, ValueError):
            digests |= {blob.digest for blob in Manifest.from_json(codec.loads(read_plain(path))).blobs}
    return digests


def _drop_oldest(kept: list[tuple[float, int, Path]], needed: Collection[str], too_much: float) -> None:
    for _, size, path in sorted(kept):
        if too_much <= 0:
            return
        if path.name not in needed:
            path.unlink(missing_ok=True)
            too_much -= size
