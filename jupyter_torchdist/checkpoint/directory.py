"""A directory of checkpoints: its layout, the newest checkpoint, and how a checkpoint is published.

    ckpt/
      step-000100/                     complete: it was published by one rename
        checkpoint.json                the manifest (this module), readable without torch
        .metadata  __0_0.distcp …      files of torch.distributed.checkpoint
      .step-000200.3f9a21.saving/      being written, or left by a crash: nothing reads it

The newest checkpoint is found by listing the directory. A link or a file that names it could be out of date.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..protocol.errors import CheckpointError
from ..protocol.process import ProcessId

FORMAT = 1
MANIFEST = "checkpoint.json"
_OWNER = "owner.json"
_COMPLETE = re.compile(r"step-(\d{6,})")
_ASIDE = re.compile(r"\.step-(\d{6,})\.(\w+)\.(saving|replaced)")
_ABANDONED = 24 * 3600.0
"""Seconds after which an unfinished checkpoint of another machine counts as abandoned."""


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint."""

    step: int
    torch: str
    ranks: int
    objects: dict[str, str]
    """Kind of each object, by name: model, optimizer, loader, …"""
    writer: str
    """Token of the run that saved it."""
    saved: float
    """Seconds since the epoch."""
    bytes: int = 0
    not_finite: list[str] = field(default_factory=list)
    """Names of tensors that contain NaN or infinity."""
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        write_durably(directory / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Raises ``CheckpointError`` if it is damaged, or was written by a later version of this package."""
        try:
            value: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
            known = {name: value[name] for name in Manifest.__dataclass_fields__ if name in value}
            manifest = Manifest(**known)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{directory / MANIFEST} cannot be read: {error}", "load an earlier checkpoint"
            ) from error
        if manifest.format > FORMAT:
            raise CheckpointError(
                f"{directory} was saved by a later version of jupyter_torchdist (format {manifest.format})",
                "update jupyter_torchdist where it is loaded",
            )
        return manifest


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def complete(directory: Path) -> dict[int, Path]:
    """The complete checkpoints in ``directory``, by step, in order. Empty if the directory does not exist."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {int(match[1]): directory / name for name in names if (match := _COMPLETE.fullmatch(name))}
    return {step: found[step] for step in sorted(found) if (found[step] / MANIFEST).exists()}


def latest(directory: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    found = complete(directory)
    return found[max(found)] if found else None


def last_finite(directory: Path) -> Path | None:
    """The complete checkpoint with the highest step whose tensors have no NaN or infinity, or None."""
    for path in reversed(complete(directory).values()):
        with contextlib.suppress(CheckpointError):  # damaged, or of a later version
            if not Manifest.read(path).not_finite:
                return path
    return None


def prepare(directory: Path) -> None:
    """Create the directory and check that it can be written. Raises ``CheckpointError``."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be saved in {directory}: {error.strerror or error}",
            "choose a directory that every rank can write to",
        ) from error


def need_space(directory: Path, size: int) -> None:
    """Raises ``CheckpointError`` if the file system has less than ``size`` bytes free."""
    left = shutil.disk_usage(directory).free
    if left < size:
        raise CheckpointError(
            f"a checkpoint of {_gigabytes(size)} does not fit into {directory}: {_gigabytes(left)} are free",
            "delete older checkpoints, keep fewer (keep=), or save elsewhere",
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3g} GB"


class Writer:
    """Saves the checkpoints of one run into one directory."""

    def __init__(self, directory: Path, token: str) -> None:
        self.directory, self.token = directory, token
        self.loaded: int | None = None
        """The step with which this run began, if it was loaded from this directory."""
        self._known: set[int] | None = None

    def next_step(self) -> int:
        """The step for a save without ``step``: the highest existing step plus one."""
        return max(complete(self.directory), default=0) + 1

    def allow(self, step: int) -> None:
        """Raises ``CheckpointError`` if ``step`` would mix the checkpoints of this run with those of another run."""
        there = complete(self.directory)
        known = self._known
        self._known = set(there) if known is None else known
        if known is not None and (strangers := [number for number in there if number not in known]):
            raise CheckpointError(
                f"another job saves into {self.directory}: {name_of(strangers[0])} was not saved by this job",
                "give each job a directory of its own",
            )
        later = [number for number in there if number > step and known is None]
        if step in there and step != self.loaded and known is None:
            later = [step]
        if later:
            raise CheckpointError(
                f"{self.directory} holds {name_of(max(later))} of an earlier run, and this run is only at step {step}: "
                "after saving here, the newest checkpoint could not be recognised",
                "load it first (--resume, td.load) to go on from there, or save into another directory",
            )

    def open(self, step: int) -> Path:
        """Create the temporary directory for a checkpoint, with a file that names the process that writes it."""
        aside = self.directory / f".{name_of(step)}.{self.token}.saving"
        _delete(aside)
        aside.mkdir()
        (aside / _OWNER).write_text(json.dumps(ProcessId.mine().to_json()))
        return aside

    def publish(self, aside: Path, manifest: Manifest, keep: int | None) -> Path:
        """Publish the complete checkpoint. Then delete all but the ``keep`` newest, and what crashes left.

        The newest checkpoint without NaN and infinity is never deleted.
        """
        target = self.directory / name_of(manifest.step)
        manifest.write(aside)
        (aside / _OWNER).unlink()
        _sync(aside)
        replaced = self.directory / f".{name_of(manifest.step)}.{self.token}.replaced"
        if target.exists():
            target.rename(replaced)
        aside.rename(target)
        _sync(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        assert self._known is not None
        self._known.add(manifest.step)
        if keep is not None:
            self._keep(keep)
        self._sweep()
        return target

    def discard(self, aside: Path) -> None:
        """Delete a checkpoint that could not be completed."""
        _delete(aside)

    def _keep(self, count: int) -> None:
        there = complete(self.directory)
        finite = last_finite(self.directory)
        for step, path in list(there.items())[: -max(1, count)]:
            if path == finite:
                continue
            # Rename it first, so that a half-deleted checkpoint does not look complete.
            gone = self.directory / f".{name_of(step)}.{self.token}.replaced"
            with contextlib.suppress(OSError):
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _sweep(self) -> None:
        for path in self.directory.iterdir():
            if _ASIDE.fullmatch(path.name) and f".{self.token}." not in path.name and _left_behind(path):
                _delete(path)


def _delete(aside: Path) -> None:
    """Delete the owner file last: if this crashes, the rest is still known to be abandoned."""
    with contextlib.suppress(OSError):
        for entry in aside.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _OWNER:
                entry.unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)


def _left_behind(path: Path) -> bool:
    try:
        owner = ProcessId.from_json(json.loads((path / _OWNER).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        owner = None
    if owner is not None and owner.here:
        return not owner.alive()
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _ABANDONED
    return False


def write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Sync the directory: without this, a power cut may lose new names. Not every file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
