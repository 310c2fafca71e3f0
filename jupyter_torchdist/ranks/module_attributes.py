"""Attributes of modules in a rank: set as in the notebook before user code runs, read again after it.

Containers of libraries are only watched: what user code puts into them stays in the rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, ModuleType
from typing import Any

from ..marshal import attributes, codes
from ..marshal.owned import of_modules
from ..protocol.errors import StrategyError
from .afterimport import after_import


class ModuleAttributes:
    """``say`` shows the user one line."""

    def __init__(self, names: dict[str, Any], bound: Iterable[str], say: Callable[[str], None]) -> None:
        """Removes the attributes from ``names`` and sets each, now or right after the import of its module. User code
        may set the attributes among ``bound``."""
        self._say = say
        self._sent = attributes.take(names)
        self._before: dict[str, Any] = {}
        """Values before user code runs; only attributes whose module is imported."""
        modules: dict[str, list[str]] = {}
        for name in dict.fromkeys([*self._sent, *filter(attributes.is_attribute, bound)]):
            modules.setdefault(attributes.module_of(name), []).append(name)
        for module, own in modules.items():
            after_import({module: partial(self._begin, own)})

    def _begin(self, names: list[str], _module: ModuleType) -> None:
        for name in names:
            try:
                if name in self._sent:
                    self._set(name, self._sent[name])
                self._before[name] = attributes.read(name)
            except Exception as error:  # noqa: BLE001  # a module's or a class's own __setattr__
                why = str(error) if isinstance(error, StrategyError) else f"{type(error).__name__}: {error}"
                self._say(f"{attributes.shown(name)} differs from the notebook: {why}")

    def _set(self, name: str, value: Any) -> None:
        if isinstance(value, attributes.Content):
            attributes.put(name, value.container)
        elif value is not attributes.read(name):
            if _is_patched(name):
                raise StrategyError("the strategy uses its own value there")
            attributes.write(name, value)

    def now(self) -> dict[str, Any]:
        """The current values of the attributes that were sent, and of others that user code has set."""
        found = {name: self._of(name) for name in self._before}
        return {name: value for name, value in found.items() if name in self._sent or value is not self._before[name]}

    def _of(self, name: str) -> Any:
        """The current value; the sent ``Content`` if it is still in place, so that only its items are compared."""
        value, sent = attributes.read(name), self._sent.get(name)
        return sent if isinstance(sent, attributes.Content) and sent.is_in(value) else value


class Libraries:
    """The containers of libraries that ``code`` names, with the items that they had before it ran."""

    def __init__(self, code: CodeType, there: Iterable[ModuleType], own: str) -> None:
        """``there``: modules that have a name. ``own``: the directory of the user's modules."""
        self._own = own
        self._before: dict[str, attributes.Content] = {}
        references = codes.references(code)
        note = partial(self._note, references.attributes)
        for module in there:
            note(module)
        after_import(dict.fromkeys(references.imports, note))

    def _note(self, names: set[str], module: ModuleType) -> None:
        if str(getattr(module, "__file__", "")).startswith(self._own):
            return
        for owned in of_modules([module], names).values():
            if (content := owned.content) is not None:
                self._before[attributes.name_of(owned.module, (owned.name,))] = attributes.Content(content)

    def changed(self) -> list[str]:
        """Names of the containers that have other items now."""
        return [name for name, before in self._before.items() if not before.is_in(attributes.read(name))]


def _is_patched(name: str) -> bool:
    """Whether a strategy has replaced the attribute during the job."""
    patches = sys.modules.get("jupyter_torchdist.strategies.core.patches")
    return patches is not None and patches.is_replaced(attributes.owner(name), attributes.attribute_of(name))
