"""Options from files: ``torchdist.toml`` beside the notebook, ``pyproject.toml`` there or above, the user's file.

The nearest file that sets an option wins. A value may be a TOML value (``ranks = 2``, ``out = ["a", "b"]``,
``fresh = true``) or the text that follows the option in the line (``timeout = "2h"``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..planning.configuration import configured, over, read_toml, words_of
from ..protocol.errors import OptionError
from ..protocol.spec import Options


def options(words: str | Sequence[str], directory: Path) -> Options:
    """``words`` override the ``--config`` file, which overrides the files of ``directory``. Raises ``OptionError``."""
    return configured(words, Path.cwd(), load(directory))


def load(directory: Path) -> Options:
    """The default options for a notebook or script in ``directory``. Raises ``OptionError``."""
    options = Options()
    for path, section in reversed(_sections(directory)):
        words = words_of(path, section)
        try:
            options = over(words, options)
        except OptionError as error:
            raise OptionError(f"{path}: {error.message}", error.hint) from None
    return options


def _sections(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The files that set options, nearest first."""
    directory = directory.absolute()
    found = []
    if os.path.isfile(near := directory / "torchdist.toml"):
        found.append((near, read_toml(near)))
    for path in (folder / "pyproject.toml" for folder in (directory, *directory.parents)):
        # Searched before it is parsed: a broken project file without our section must not stop a cell.
        if os.path.isfile(path) and b"torchdist" in path.read_bytes():
            section = read_toml(path).get("tool", {}).get("torchdist")
            if section is not None:
                found.append((path, section))
                break
    base = os.environ.get("XDG_CONFIG_HOME")
    own = (Path(base) if base else Path.home() / ".config") / "torchdist" / "torchdist.toml"
    if os.path.isfile(own):
        found.append((own, read_toml(own)))
    for path, section in found:
        if not isinstance(section, dict):
            raise OptionError(f"{path}: [tool.torchdist] is not a table", "write one option a line, such as ranks = 2")
    return found
