"""Options from files: ``torchdist.toml`` beside the notebook, ``pyproject.toml`` there or above, the user's file.

The nearest file that sets an option wins. A file that another user can write is ignored, and a note says so. A value
may be TOML's own (``ranks = 2``, ``out = ["a", "b"]``, ``fresh = true``) or the text one would write after the option
(``timeout = "2h"``).
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..planning.configuration import configured, over, read_toml, words_of
from ..protocol.errors import OptionError
from ..protocol.paths import user_name
from ..protocol.spec import Options

LARGEST = 1 << 20
"""Bytes of a file that are read: nobody writes so many options."""


def options(words: str | Sequence[str], directory: Path) -> Options:
    """``words`` override the ``--config`` file, which overrides the files of ``directory``. Raises ``OptionError``."""
    return configured(words, Path.cwd(), load(directory))


def load(directory: Path) -> Options:
    """The default options for a notebook or script in ``directory``. Raises ``OptionError``."""
    options, remarks = Options(), []
    for found in reversed(list(_found(directory))):
        if found.refused:
            remarks.append(found.refused)
            continue
        words = words_of(found.path, found.section)
        try:
            options = over(words, options)
        except OptionError as error:
            raise OptionError(f"{found.path}: {error.message}", error.hint) from None
    return replace(options, ignored=tuple(remarks))


@dataclass(frozen=True)
class _File:
    """A file that sets options, or that would and is ``refused``: why."""

    path: Path
    section: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


def _found(directory: Path) -> Iterator[_File]:
    """The files that set something, nearest first."""
    directory = directory.absolute()
    yield from _read(directory / "torchdist.toml")
    for folder in (directory, *directory.parents):
        if project := list(_read(folder / "pyproject.toml", table=True)):
            yield from project
            if not project[0].refused:
                break
    base = os.environ.get("XDG_CONFIG_HOME")
    yield from _read((Path(base) if base else Path.home() / ".config") / "torchdist" / "torchdist.toml")


def _read(path: Path, table: bool = False) -> Iterator[_File]:
    """Nothing for a file that is not there, that cannot be read, or that has no options of ours.

    ``table``: they are in ``[tool.torchdist]``.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            states = os.fstat(file.fileno()), os.lstat(path)
            if not stat.S_ISREG(states[0].st_mode):
                return
            text = file.read(LARGEST)
    except OSError:
        return
    # Looked at before it is parsed: a project file that does not speak of us must not be able to stop a cell.
    if table and b"torchdist" not in text:
        return
    if why := next(filter(None, map(_untrusted, states)), ""):
        yield _File(path, refused=f"{path} is ignored, because {why}")
        return
    section: Any = read_toml(path, text)
    if table:
        tool = section.get("tool")
        section = tool.get("torchdist") if isinstance(tool, dict) else None
    if section is None:
        return
    if not isinstance(section, dict):
        raise OptionError(f"{path}: [tool.torchdist] is not a table", "write one option a line, such as ranks = 2")
    yield _File(path, section)


def _untrusted(state: os.stat_result) -> str:
    """Why what a file says may be another user's wish. Its options can run code: ``env = ["PYTHONPATH=…"]``."""
    if state.st_uid not in (0, os.getuid()):
        return f"it belongs to {user_name(state.st_uid)}; if you trust it, give it with --config, or copy it"
    if stat.S_ISLNK(state.st_mode):  # its permissions mean nothing
        return ""
    if state.st_mode & stat.S_IWOTH or (state.st_mode & stat.S_IWGRP and not _is_own_group(state)):
        return "other users can write to it; chmod go-w makes it yours alone"
    return ""


def _is_own_group(state: os.stat_result) -> bool:
    """Whether the owner is the only member of the file's group, as Debian and Red Hat make one for each user."""
    try:
        group, owner = grp.getgrgid(state.st_gid), pwd.getpwuid(state.st_uid)
    except KeyError:
        return False
    return group.gr_gid == owner.pw_gid and group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}
