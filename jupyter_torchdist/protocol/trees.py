"""A directory of the notebook's machine for ``--sync``: what is in it, compared by size and time as rsync does."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import OptionError
from .typed import Record

MOST = 50_000
"""The largest number of files."""


@dataclass(frozen=True)
class TreeFile(Record):
    """``name``: its path below the directory. ``size`` in bytes; ``time``: of its last change, in ns."""

    name: str
    size: int
    time: int
    mode: int


@dataclass(frozen=True)
class Tree(Record):
    """A directory: its path, and that from the notebook's directory, empty if it is not below that."""

    path: str
    below: str
    files: tuple[TreeFile, ...]


def checked(text: str, cwd: Path) -> str:
    """The absolute path of ``--sync text``. Raises ``OptionError``."""
    given = (cwd / Path(text).expanduser()).absolute()
    path = Path(os.path.normpath(given))
    if not path.exists():
        raise OptionError(f"--sync {text}: there is no {path}", "name a directory of this machine")
    if not path.is_dir():
        raise OptionError(f"--sync {text}: {path} is no directory", "name the directory that it is in")
    if path.resolve() in (Path("/"), Path.home().resolve(), *Path.home().resolve().parents):
        raise OptionError(f"--sync {text}: {path} is too much to copy", "name the directory with the data")
    tree(str(path), str(cwd))
    return str(path)


@lru_cache(maxsize=16)
def _listed(path: str) -> tuple[TreeFile, ...]:
    return tuple(_files(Path(path)))


def tree(path: str, cwd: str, *, again: bool = True) -> Tree:
    """What is in the directory; not looked at again for another host. Raises ``OptionError``."""
    if again:
        _listed.cache_clear()
    own = os.path.relpath(path, cwd)
    return Tree(path, "" if own.startswith("..") else own, _listed(path))


def _files(root: Path) -> Iterator[TreeFile]:
    inside, count = root.resolve(), 0
    for folder, folders, names in os.walk(root):
        for name in sorted([*names, *(one for one in folders if os.path.islink(os.path.join(folder, one)))]):
            path = Path(folder, name)
            try:
                status = path.stat()
            except OSError as error:
                raise OptionError(
                    f"--sync: {path} cannot be read: {error.strerror}", "remove it, or repair it"
                ) from None
            if path.is_symlink() and inside not in path.resolve().parents:
                raise OptionError(f"--sync: {path} is a link out of {root}", "put the data there instead of a link")
            if not stat.S_ISREG(status.st_mode):
                raise OptionError(f"--sync: {path} is no file", "only files are copied: remove it from the directory")
            count += 1
            if count > MOST:
                raise OptionError(f"--sync: {root} has more than {MOST:,} files", "pack them into fewer")
            yield TreeFile(str(path.relative_to(root)), status.st_size, status.st_mtime_ns, status.st_mode & 0o777)
