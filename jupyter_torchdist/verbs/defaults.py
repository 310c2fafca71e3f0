"""Options that stand in files: ``torchdist.toml`` beside the notebook, ``pyproject.toml`` above it, the user's own.

The nearest file that sets an option wins. A value may be TOML's own (``ranks = 2``, ``out = ["a", "b"]``,
``fresh = true``) or the text one would write after the option (``timeout = "2h"``).
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..protocol.errors import OptionError
from ..protocol.spec import BY_FLAG, OPTIONS, Options, parse_options


def options(words: str | Sequence[str], directory: Path) -> Options:
    """``words`` over the defaults of ``directory``; GPUs asked for there outdo ranks set in a file, and vice versa.

    Raises ``OptionError``.
    """
    given, defaults = parse_options(words), load(directory)
    if given.gpus is not None:
        defaults = replace(defaults, ranks=None)
    if given.ranks is not None:
        defaults = replace(defaults, gpus=None, backend=None if defaults.backend == "nccl" else defaults.backend)
    return parse_options(words, defaults)


def load(directory: Path) -> Options:
    """The options that hold for a notebook or script in ``directory``. Raises ``OptionError``."""
    options = Options()
    for path, section in reversed(_sections(directory)):
        words = [word for key, value in section.items() for word in _words(path, key, value)]
        try:
            options = parse_options(words, options)
        except OptionError as error:
            raise OptionError(f"{path}: {error.message}", error.hint) from None
    return options


def _sections(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The files that set something, nearest first."""
    directory = directory.absolute()
    found = []
    if os.path.isfile(near := directory / "torchdist.toml"):
        found.append((near, _read(near)))
    for path in (folder / "pyproject.toml" for folder in (directory, *directory.parents)):
        # Looked at before it is parsed: a project file that does not speak of us must not be able to stop a cell.
        if os.path.isfile(path) and b"torchdist" in path.read_bytes():
            section = _read(path).get("tool", {}).get("torchdist")
            if section is not None:
                found.append((path, section))
                break
    base = os.environ.get("XDG_CONFIG_HOME")
    own = (Path(base) if base else Path.home() / ".config") / "torchdist" / "torchdist.toml"
    if os.path.isfile(own):
        found.append((own, _read(own)))
    for path, section in found:
        if not isinstance(section, dict):
            raise OptionError(f"{path}: [tool.torchdist] is not a table", "write one line an option: ranks = 2")
    return found


def _read(path: Path) -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        value: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise OptionError(f"{path} cannot be read: {error}", "correct the file, or move it away") from error
    return value


def _words(path: Path, key: str, value: Any) -> list[str]:
    """``ranks = 2`` as the words ``--ranks 2``."""
    option = BY_FLAG.get(f"--{key.replace('_', '-')}")
    if option is None:
        names = [option.flag[2:] for option in OPTIONS]
        near = difflib.get_close_matches(key.replace("_", "-"), names, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise OptionError(f"{path}: there is no option {key!r}", hint)
    if option.convert is None:
        if not isinstance(value, bool):
            raise OptionError(f"{path}: {key} = {value!r}: expected true or false", f"write {key} = true")
        return [option.flag] if value else []
    values = value if isinstance(value, list) and option.repeatable else [value]
    if isinstance(value, list) and not option.repeatable:
        values = [",".join(map(str, value))]
    return [f"{option.flag}={item}" for item in values]
