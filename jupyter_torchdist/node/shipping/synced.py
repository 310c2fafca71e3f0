"""Directories of ``--sync`` on a node: what is missing there, and what comes.

A directory has its own path where that can be written. One below the notebook's directory, which the node lacks, is in
the scratch directory, and the job's work directory has a link to it: the next job finds it there.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ...protocol.disk import size_of
from ...protocol.paths import JobPaths, make_private
from ...protocol.trees import Tree, TreeFile

MARK = "sync-"
"""How the name of such a file begins on the channel, ``sync-0-17``, where a blob has its digest."""

LARGE = 16 * 1024 * 1024
"""Of a file with so many bytes, the part that has come is kept when its sender is cut off."""


class Synced:
    """The directories of one job, for one driver. Raises ``OSError`` where one cannot be written."""

    def __init__(self, scratch: Path, paths: JobPaths, trees: Sequence[Tree], cwd: str) -> None:
        self._places: dict[str, tuple[Path, TreeFile]] = {}
        self._begun: set[Path] = set()
        for number, tree in enumerate(trees):
            root = _place(scratch, paths, tree, cwd)
            for index, file in enumerate(tree.files):
                parts = Path(file.name).parts
                if not parts or ".." in parts or parts[0] == "/":
                    raise ValueError(f"{file.name!r} is no path below a directory")
                if not _same(root / file.name, file):
                    self._places[f"{MARK}{number}-{index}"] = root / file.name, file

    def missing(self) -> list[str]:
        return list(self._places)

    def parts(self) -> dict[str, int]:
        """Of large ones of which a part is here, how many bytes. Parts of other versions are removed."""
        found: dict[str, int] = {}
        for name, (path, file) in self._places.items():
            if file.size >= LARGE:
                part = _part(path, file)
                ours = re.compile(re.escape(f".{path.name[:200]}.") + r"\d+-\d+")
                for other in path.parent.glob(f".{glob.escape(path.name[:200])}.*-*"):
                    if ours.fullmatch(other.name) and other != part:
                        other.unlink(missing_ok=True)
                found |= {name: size} if (size := size_of(part)) else {}
        return found

    def close(self) -> None:
        """Remove the part of a small file."""
        large = {_part(path, file) for path, file in self._places.values() if file.size >= LARGE}
        for part in self._begun - large:
            part.unlink(missing_ok=True)

    def take(self, name: str, offset: int, data: bytes, last: bool) -> bool:
        """Write ``data``. After the last piece the file is in its place: True."""
        path, file = self._places[name]
        part = _part(path, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._begun.add(part)
        try:
            with open(part, "r+b" if offset else "wb") as into:
                into.seek(offset)
                into.write(data)
        except FileNotFoundError:  # another node that shares the directory was faster
            return last and _same(path, file)
        except OSError as error:  # of a write, it has no name
            part.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from None
        if not last:
            return False
        part.chmod(file.mode | 0o200)
        os.utime(part, ns=(file.time, file.time))
        part.rename(path)
        self._begun.discard(part)
        return True


def _part(path: Path, file: TreeFile) -> Path:
    """Where this version of the file is put together."""
    return path.with_name(f".{path.name[:200]}.{file.size}-{file.time}")


def _same(path: Path, file: TreeFile) -> bool:
    with contextlib.suppress(OSError):
        status = path.stat()
        return (status.st_size, status.st_mtime_ns) == (file.size, file.time)
    return False


def _place(scratch: Path, paths: JobPaths, tree: Tree, cwd: str) -> Path:
    if tree.below and not os.path.isdir(cwd):
        kept = make_private(scratch / "synced") / hashlib.sha256(tree.path.encode()).hexdigest()[:16]
        kept.mkdir(mode=0o700, exist_ok=True)
        link = paths.work / tree.below
        if tree.below == ".":
            raise OSError(errno.EACCES, "--sync of the notebook's own directory, which is not there", cwd)
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(kept)
        return kept
    root = Path(tree.path)
    root.mkdir(parents=True, exist_ok=True)
    if not os.access(root, os.W_OK):
        raise OSError(errno.EACCES, "cannot be written, as --sync wants", tree.path)
    return root
