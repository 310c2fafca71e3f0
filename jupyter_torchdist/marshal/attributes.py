"""Attributes of modules, and of classes in modules, as names that cross: ``settings:BATCH``, ``torch.nn:Linear.extra``.

No name of Python code can be written so. They stand in the stream and among results beside the notebook's names, so
their values keep their identity with these.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

_NAME = re.compile(r"([\w.]+):([\w.]+)")


CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
"""Exact types whose content can be put into another object of the type."""


def is_alike(container: Any, other: Any) -> bool:
    """Whether their content is equal. What cannot be compared is not."""
    try:
        return len(container) == len(other) and bool(container == other)
    except Exception:  # noqa: BLE001  # the user's own __eq__, or an array's
        return False


class Absent:
    """The class itself is the value of an attribute that is not there."""


def name_of(module: str, path: Iterable[str]) -> str:
    return f"{module}:{'.'.join(path)}"


def is_attribute(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def module_of(name: str) -> str:
    return name.partition(":")[0]


def attribute_of(name: str) -> str:
    return re.split("[:.]", name)[-1]


def shown(name: str) -> str:
    """As it is written in code: ``settings.BATCH``. Other names are as they are."""
    return name.replace(":", ".") if is_attribute(name) else name


def take(names: dict[str, Any]) -> dict[str, Any]:
    """The attributes among ``names``, taken out of there."""
    return {name: names.pop(name) for name in list(names) if is_attribute(name)}


def owner(name: str) -> Any:
    """The module or class that has the attribute. Raises ``LookupError`` where it is not loaded here."""
    module, _, path = name.partition(":")
    found = sys.modules.get(module)
    for part in path.split(".")[:-1]:
        found = getattr(found, "__dict__", {}).get(part)
    if found is None:
        raise LookupError(f"there is no {shown(name).rpartition('.')[0]} here")
    return found


def read(name: str) -> Any:
    """Its value, or ``Absent``. A class has it as it was put there: a ``staticmethod``, a ``property``."""
    try:
        return vars(owner(name)).get(attribute_of(name), Absent)
    except LookupError:
        return Absent


def write(name: str, value: Any) -> None:
    """Set or delete it. Raises ``LookupError``, and what the owner raises."""
    if value is not Absent:
        setattr(owner(name), attribute_of(name), value)
    elif read(name) is not Absent:
        delattr(owner(name), attribute_of(name))


def write_back(values: dict[str, Any]) -> tuple[str, ...]:
    """Set what a rank had set, in the modules that are loaded here. Notes say what could not be."""
    notes = []
    for name, value in values.items():
        if module_of(name) in sys.modules and read(name) is not value:
            try:
                _put(name, value)
            except Exception as error:  # noqa: BLE001  # a module's or a class's own __setattr__
                notes.append(f"{shown(name)} could not be set in the notebook: {type(error).__name__}: {error}")
    return tuple(notes)


def _put(name: str, value: Any) -> None:
    """A container stays the object that it is, as others may have it."""
    there = read(name)
    if type(there) is not type(value) or type(value) not in CONTAINERS:
        write(name, value)
    elif isinstance(there, (list, deque)):
        there.clear()
        there.extend(value)
    else:
        there.clear()
        there.update(value)
