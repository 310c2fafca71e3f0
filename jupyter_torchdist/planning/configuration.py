"""Options from files: how they are read, and which settings override others."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..protocol.errors import OptionError
from ..protocol.hosts import KEYS
from ..protocol.options.launcher import of_a_launcher
from ..protocol.options.parsing import parse_options
from ..protocol.options.strategy import options_of
from ..protocol.spec import BY_FLAG, OPTIONS, Options
from . import accelerate_config

_OF_A_STRATEGY = (
    "option",
    "config",
    "precision",
    "compile",
    "activation_checkpointing",
    "grad_accumulation",
    "verify",
    "checkpoint",
    "resume",
    "remarks",
)


def configured(words: str | Sequence[str], directory: Path, defaults: Options | None = None) -> Options:
    """``words`` override the file of ``--config``, which overrides ``defaults``. The result has the file's settings.

    A relative path starts at ``directory``. Raises ``OptionError``.
    """
    given, defaults = parse_options(words, whole=False), defaults or Options()
    named = given.config or (defaults.config if given.strategy != "none" else None)
    if named is None:
        return over(words, defaults)
    path = (directory / Path(named).expanduser()).absolute()
    read, remarks = _read_config(path)
    if "--strategy=deepspeed" in read and given.config and given.strategy not in (None, "none", "deepspeed"):
        raise OptionError(
            f"{path} is a configuration of DeepSpeed, which --strategy {given.strategy} cannot use",
            "use --strategy deepspeed, or give another file",
        )
    try:
        options = over(read, defaults)
    except OptionError as error:
        raise OptionError(f"{path}: {error.message}", error.hint) from None
    options = over(words, replace(options, remarks=(*options.remarks, *remarks)))
    return options if options.config is None else replace(options, config=str(path))


def over(words: str | Sequence[str], defaults: Options) -> Options:
    """``words`` override ``defaults``. Defaults that contradict are dropped: GPUs or ranks, options of a strategy."""
    given = parse_options(words, whole=False)
    if given.gpus is not None:
        defaults = replace(defaults, ranks=None)
    if given.ranks is not None:
        defaults = replace(defaults, gpus=None, backend=None if defaults.backend == "nccl" else defaults.backend)
    if given.strategy not in (None, defaults.strategy):
        defaults = _for_another(str(given.strategy), defaults)
    return parse_options(words, defaults)


def _for_another(strategy: str, defaults: Options) -> Options:
    """``defaults`` without options that ``strategy`` does not have; ``none`` has no options."""
    if strategy == "none":
        stays = tuple(text for text in defaults.option if of_a_launcher(text))
        return replace(defaults, **{**{name: getattr(Options(), name) for name in _OF_A_STRATEGY}, "option": stays})
    own = {row.name for row in options_of(strategy)}
    names = {text: text.partition("=")[0].replace("-", "_") for text in defaults.option}
    left = sorted({name for name in names.values() if name not in own and not of_a_launcher(name)})
    said = (f"{', '.join(left)}: not used, as {strategy} has no such option",) if left else ()
    kept = tuple(text for text in defaults.option if names[text] in own or of_a_launcher(text))
    return replace(defaults, option=kept, remarks=(*defaults.remarks, *said))


def _read_config(path: Path) -> tuple[list[str], tuple[str, ...]]:
    """The options in a file as words, and remarks on them. Raises ``OptionError``."""
    if path.suffix == ".toml":
        return words_of(path, read_toml(path)), ()
    if path.suffix in (".yaml", ".yml"):
        return accelerate_config.words_of(path, accelerate_config.read(path))
    if path.suffix == ".json":
        value = read_json(path)
        if {"compute_environment", "distributed_type"} & value.keys():
            return accelerate_config.words_of(path, value)
        return ["--strategy=deepspeed", f"--option=config={json.dumps(value)}"], ()
    raise OptionError(
        f"--config {path}: the ending of the file does not tell its format",
        "give a .toml of jupyter_torchdist, a .yaml of accelerate, or a .json of DeepSpeed",
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ``OptionError``."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise OptionError(f"{path} cannot be read: {error}", "correct the file, or its path") from error
    if not isinstance(value, dict):
        raise OptionError(f"{path} has no JSON object", 'DeepSpeed\'s begins with {"zero_optimization": …}')
    return value


def read_toml(path: Path, text: bytes | None = None) -> dict[str, Any]:
    """A TOML file, or ``text`` that was read from it. Raises ``OptionError``."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        value: dict[str, Any] = toml.loads((path.read_bytes() if text is None else text).decode("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise OptionError(f"{path} cannot be read: {error}", "correct the file, or move it away") from error
    return value


def words_of(path: Path, section: Mapping[str, Any]) -> list[str]:
    """A TOML table as words: ``ranks = 2`` is ``--ranks=2``, ``[option] tp = 2`` is ``--option=tp=2``."""
    return [word for key, value in section.items() for word in _words(path, key, value)]


def _words(path: Path, key: str, value: Any) -> list[str]:
    option = BY_FLAG.get(f"--{key.replace('_', '-')}")
    if option is None:
        names = [option.flag[2:] for option in OPTIONS]
        near = difflib.get_close_matches(key.replace("_", "-"), names, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(names)}"
        raise OptionError(f"{path}: there is no option {key!r}", hint)
    if option.convert is None:
        if not isinstance(value, bool):
            raise OptionError(f"{path}: {key} = {value!r}: expected true or false", f"write {key} = true")
        return [option.flag] if value else []
    if key == "config":
        return [f"--config={path.parent / Path(str(value)).expanduser()}"]
    if key == "hosts" and isinstance(value, dict):
        return [f"--host-option={setting}" for name, item in value.items() for setting in _of_host(name, item)]
    if isinstance(value, dict) and option.repeatable:
        return [f"{option.flag}={name}={_text(item)}" for name, item in value.items()]
    values = value if isinstance(value, list) and option.repeatable else [_text(value)]
    return [f"{option.flag}={item}" for item in values]


def _of_host(name: str, value: Any) -> list[str]:
    """``[hosts.gpu1] python = "…"`` as ``gpu1.python=…``; ``big = ["gpu1", "gpu2"]`` below ``[hosts]`` is a group."""
    if isinstance(value, dict):
        return [f"{name}.{key}={_text(item)}" for key, item in value.items()]
    return [f"{name if name in KEYS else '@' + name}={_text(value)}"]


def _text(value: Any) -> str:
    """A TOML value as written in the option line."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, (dict, bool)) else str(value)
