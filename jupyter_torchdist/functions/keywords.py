"""Options of ``%%distribute`` from keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..protocol.errors import OptionError
from ..protocol.spec import BY_FLAG, LOCAL, Options
from ..verbs import defaults
from .following import directory


def options_of(**chosen: Any) -> Options:
    """Options from keywords, with the same rules and files as the words after ``%%distribute``.

    ``ranks=2, fresh=True, exclude=["big"], env={"SEED": "1"}``. ``remote=False`` is this machine, whatever hosts a
    file names. Raises ``OptionError`` that names a similar option.
    """
    here = chosen.get("remote") is False
    if here and chosen.get("hosts"):
        raise OptionError("remote=False runs on this machine only", "leave out remote, or hosts")
    words: list[str] = []
    for name, value in chosen.items():
        flag = "--" + name.replace("_", "-")
        option = BY_FLAG.get(flag)
        if option is None:
            words.append(flag)  # the parser reports the error and a similar option
        elif option.convert is None:
            words += [flag] if value else []
        elif value is not None:
            words += [f"{flag}={text}" for text in _texts(value, option.repeatable)]
    options = defaults.options(words, directory())
    return replace(options, remote=False, hosts=(), nodes=None, launcher=LOCAL) if here else options


def _texts(value: Any, repeatable: bool) -> Iterable[str]:
    if isinstance(value, Mapping):
        return [f"{name}={item}" for name, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [str(item) for item in value]
        return items if repeatable else [",".join(items)]
    return [str(getattr(value, "value", value))]  # a member of an Enum, such as Databricks' GPUType
