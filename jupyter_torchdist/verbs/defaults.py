"""Options that stand in files: ``torchdist.toml`` beside the notebook, ``pyproject.toml`` above it, the user's own.

The nearest file that sets an option wins. A value may be TOML's own (``ranks = 2``, ``out = ["a", "b"]``,
``fresh = true``) or the text one would write after the option (``timeout = "2h"``).
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
    """``words`` over the file of ``--config``, that over the defaults of ``directory``. Raises ``OptionError``."""
    return configured(words, Path.cwd(), load(directory))


def load(directory: Path) -> Options:
    """The options that hold for a notebook or script in ``directory``. Raises ``OptionError``."""
    options = Options()
    for path, section in reversed(_sections(directory)):
        words = words_of(path, section)
        try:
            options = over(words, options)
        except OptionError as error:
            raise OptionError(f"{path}: {error.message}", error.hint) from None
    return options


def _sections(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The files that set something, nearest first."""
    directory = directory.absolute()
    found = []
    if os.path.isfile(near := directory / "torchdist.toml"):
        found.append((near, read_toml(near)))
    for path in (folder / "pyproject.toml" for folder in (directory, *directory.parents)):
        # Looked at before it is parsed: a project file that does not speak of us must not be able to stop a cell.
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
