"""Names for attributes of modules and of classes in modules: ``settings:BATCH``, ``torch.nn:Linear.extra``.

No name in Python code contains a colon. Streams and results contain these names together with the notebook's names,
so objects that both share keep their identity.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_NAME = re.compile(r"([\w.]+):([\w.]+)")


CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
"""Exact types whose items can be put into another object of the same type."""


class Content:
    """A container that only an attribute refers to. On a rank its items are put into the container that the import
    made, because other code may already refer to that one, for example as a default argument."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def is_in(self, other: Any) -> bool:
        """Whether ``other`` contains the identical items in the same order."""
        if type(other) is not type(self.container) or len(other) != len(self.container):
            return False
        if isinstance(other, set):
            return bool(other == self.container)
        return all(one is another for one, another in zip(_items(other), _items(self.container), strict=True))


def _items(container: Any) -> Iterator[Any]:
    return itertools.chain(container, container.values()) if isinstance(container, dict) else iter(container)


class Absent:
    """This class itself is the value for a missing attribute."""


def name_of(module: str, path: Iterable[str]) -> str:
    return f"{module}:{'.'.join(path)}"


def is_attribute(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def module_of(name: str) -> str:
    return name.partition(":")[0]


def attribute_of(name: str) -> str:
    return re.split("[:.]", name)[-1]


def shown(name: str) -> str:
    """The attribute as code writes it: ``settings.BATCH``. Other names are unchanged."""
    return name.replace(":", ".") if is_attribute(name) else name


def take(names: dict[str, Any]) -> dict[str, Any]:
    """Remove the attributes from ``names`` and return them."""
    return {name: names.pop(name) for name in list(names) if is_attribute(name)}


def owner(name: str) -> Any:
    """The module or class that has the attribute. Raises ``LookupError`` if it is not loaded here."""
    module, _, path = name.partition(":")
    found = sys.modules.get(module)
    for part in path.split(".")[:-1]:
        found = getattr(found, "__dict__", {}).get(part)
    if found is None:
        raise LookupError(f"there is no {shown(name).rpartition('.')[0]} here")
    return found


def read(name: str) -> Any:
    """The attribute's value, or ``Absent``. Descriptors of a class (``staticmethod``, ``property``) stay unresolved."""
    try:
        return vars(owner(name)).get(attribute_of(name), Absent)
    except LookupError:
        return Absent


def with_contents(values: Mapping[str, Any], sent: Callable[[], Mapping[int, Any]]) -> Iterator[tuple[str, Any]]:
    """``values`` in the order in which to send them. A container becomes ``Content`` unless data that was sent before
    contains it, too. ``sent`` gives the objects that were sent, by ``id``."""
    last = {name: value for name, value in values.items() if type(value) in CONTAINERS}
    yield from ((name, value) for name, value in values.items() if name not in last)
    there = sent() if last else {}
    made = {id(value): value if id(value) in there else Content(value) for value in last.values()}
    yield from ((name, made[id(value)]) for name, value in last.items())


def write(name: str, value: Any) -> None:
    """Set or delete the attribute. Raises ``LookupError``, and what the owner raises."""
    if value is not Absent:
        setattr(owner(name), attribute_of(name), value)
    elif read(name) is not Absent:
        delattr(owner(name), attribute_of(name))


def write_back(values: dict[str, Any]) -> tuple[str, ...]:
    """Set the attributes that a rank set, in modules that are loaded here. Returns notes on those that failed."""
    notes = []
    for name, value in values.items():
        if isinstance(value, Content):
            continue  # changes in its items are updated in place
        if module_of(name) in sys.modules and read(name) is not value:
            try:
                put(name, value)
            except Exception as error:  # noqa: BLE001  # the owner's __setattr__ may raise anything
                notes.append(f"{shown(name)} could not be set in the notebook: {type(error).__name__}: {error}")
    return tuple(notes)


def put(name: str, value: Any) -> None:
    """Set the attribute. A container is updated in place, because other code may refer to it."""
    there = read(name)
    if type(there) is not type(value) or type(value) not in CONTAINERS:
        write(name, value)
    else:
        refill(there, value)


def refill(there: Any, value: Any) -> None:
    """Give a container the items of another one of its type."""
    if isinstance(there, (list, deque)):
        there.clear()
        there.extend(value)
    else:
        there.clear()
        there.update(value)
