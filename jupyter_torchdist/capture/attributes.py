"""Attributes of modules that travel with a capture, because an import on the ranks would not give them.

* What the notebook's cells set (``F.relu = mine``, ``setattr(settings, "BATCH", 64)``, ``del``) on a module, or on a
  class in a module. This holds for all libraries, and for the local modules that travel.
* For local modules that travel, also data that their functions, other local modules or cells change.

The source tells which attributes may have changed (``touched``). Their values are the current values in this process.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..marshal import attributes, byvalue
from ..marshal.attributes import Absent
from ..marshal.owned import Owned, of_modules
from . import sources
from .modules import LocalSources
from .touched import CLASS, INSTANCE, Facts, Kind, Touch, facts

_OF_THE_KERNEL = frozenset({"jupyter_torchdist", "IPython", "ipykernel", "ipywidgets", "traitlets", "jupyter_client"})
"""Attributes set on these modules matter in the notebook's process only."""
_OF_THE_IMPORT = frozenset({
    "__name__", "__spec__", "__loader__", "__package__", "__path__", "__file__", "__cached__",
    "__builtins__", "__dict__",
})  # fmt: skip
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FIXED = (str, bytes, int, float, complex, type(None), range)
_OF_ONE_PROCESS = frozenset({"logging", "re", "threading", "_thread", "_io", "pathlib"})
"""Modules whose objects have no data that a cell would change, or cannot leave a process."""

Place = tuple[Any, str, Kind]
"""A module, class or function, the name of its attribute, and what happens to the attribute."""


class Attributes:
    """The attributes of one capture. ``source`` is the code that will run; it has not run yet."""

    def __init__(self, namespace: Mapping[str, Any], source: str, local: LocalSources) -> None:
        self.values: dict[str, Any] = {}
        """The values that travel, by name (``marshal.attributes``)."""
        self.watched: dict[str, None] = {}
        """Attributes that the ranks may set; they come back if they were set."""
        self._namespace, self._local = namespace, local
        self._cells = _history.of(namespace)
        self._own = facts(source)
        self._waiting = [*self._by_cells(), *self._by_modules(self._cells.imports)]
        self._read: set[str] = set()
        self._began = False
        self._shared = {id(value) for value in self._changed_values()}
        for touch in self._own.touches:
            self._watch(touch)

    def along_with(self, modules: Iterable[str]) -> dict[str, Any]:
        """All attributes that travel when ``modules`` and their imports travel."""
        self._local.add(modules)
        scope = self._in_scope()
        new = [name for name in scope if name not in self._read]
        if self._began and not new:
            return self.values
        self._began = True
        self._read.update(new)
        self._waiting += self._by_modules(new)
        for owned in self._waiting:
            self._take(*owned)
        for name in scope if self._shared else ():
            for attribute, value in vars(sys.modules[name]).items():
                if id(value) in self._shared and _is_data(value):
                    self.values.setdefault(attributes.name_of(name, (attribute,)), value)
        return self.values

    def objects(self) -> dict[int, Owned]:
        """The objects of libraries that the notebook has imported, by ``id``."""
        named = [sys.modules[name] for name in self._cells.imports if name in sys.modules]
        there = [value for value in self._namespace.values() if type(value) is types.ModuleType]
        return of_modules(module for module in (*named, *there) if not sources.is_loaded(module.__name__))

    def _in_scope(self) -> list[str]:
        return [name for top in self._local.tops for name, _ in sources.of_package(top)]

    # ---- what may have been touched

    def _by_cells(self) -> Iterator[Place]:
        for touch in self._cells.touches:
            yield from _resolved(touch, self._namespace)
        for touch in self._own.touches:
            for owned in _resolved(touch, self._namespace):
                if owned[2] in (Kind.CHANGED, Kind.CALLED):
                    yield owned

    def _by_modules(self, names: Iterable[str]) -> Iterator[Place]:
        """What functions of local modules change in their own module and in other modules."""
        for name in names:
            for touch in facts(sources.text_of(name)).own:
                scope = vars(sys.modules[name])
                yield from _resolved(touch, scope)
                yield from _of_classes(touch, name)
                if touch.path[0] in scope and (len(touch.path) == 1 or not _is_owner(scope[touch.path[0]])):
                    kind = touch.kind if len(touch.path) == 1 else Kind.CHANGED
                    yield sys.modules[name], touch.path[0], kind

    def _changed_values(self) -> Iterator[Any]:
        """Objects that cells change under a name of the notebook: ``from settings import HISTORY``."""
        for touch in (*self._cells.touches, *self._own.touches):
            value = self._namespace.get(touch.path[0])
            if touch.path[0] in self._namespace and _is_data(value):
                yield value

    # ---- what becomes of it

    def _take(self, owner: Any, attribute: str, kind: Kind) -> None:
        name = _name_of(owner, attribute)
        if name is None or name in self.values:
            return
        module = attributes.module_of(name)
        is_local = sources.is_loaded(module)
        if is_local and module.partition(".")[0] not in self._local.tops:
            return
        value = vars(owner).get(attribute, Absent)
        if kind in (Kind.CHANGED, Kind.CALLED):
            if is_local and _is_data(value) and not (kind is Kind.CALLED and hasattr(type(value), "__array__")):
                self.values[name] = value
                self._shared.add(id(value))
        elif (value is Absent and kind is not Kind.DELETED) or (
            not is_local and _is_original(module, attribute, value)
        ):
            self.watched[name] = None
        else:
            self.values[name] = value

    def _watch(self, touch: Touch) -> None:
        if touch.kind not in (Kind.SET, Kind.DELETED):
            return
        for owner, attribute, kind in _resolved(touch, self._namespace):
            if kind is touch.kind and (name := _name_of(owner, attribute)) is not None:
                self.watched[name] = None
        if touch.module and touch.module not in sys.modules and len(touch.path) == 2:
            self.watched[attributes.name_of(touch.module, touch.path[1:])] = None


def _resolved(touch: Touch, scope: Mapping[str, Any]) -> Iterator[Place]:
    """The last module, class or function on the path, and its attribute. Nothing if the root is none of them."""
    root, *rest = touch.path
    home, _, name = touch.module.rpartition(".")
    module = sys.modules.get(home)
    if touch.module not in sys.modules and module is not None and name in vars(module):  # from home import name
        current = vars(module)[name]
        if not _is_owner(current):
            yield module, name, Kind.CHANGED if rest else touch.kind
            return
    else:
        current = scope[root] if root in scope else sys.modules.get(touch.module)
    for index, name in enumerate(rest, 1):
        if not _is_owner(current):
            return
        inside = vars(current).get(name)
        if index == len(rest) or not _is_owner(inside):
            yield current, name, touch.kind if index == len(rest) else Kind.CHANGED
            return
        current = inside


def _of_classes(touch: Touch, module: str) -> Iterator[Place]:
    """What a method of the module's classes does to ``cls``, and to attributes of the class through ``self``."""
    root, *rest = touch.path
    if root not in (CLASS, INSTANCE) or not rest:
        return
    kind = touch.kind if len(rest) == 1 else Kind.CHANGED
    for value in vars(sys.modules[module]).values():
        if isinstance(value, type) and value.__module__ == module:
            own = vars(value).get(rest[0], Absent)
            if (root == CLASS and (own is Absent or not callable(own))) or (kind is not Kind.SET and _is_data(own)):
                yield value, rest[0], kind


def _is_owner(value: Any) -> bool:
    kind = type(value)  # not isinstance: ``__class__`` may be a property that runs user code
    return issubclass(kind, (types.ModuleType, type, types.FunctionType))


def _name_of(owner: Any, attribute: str) -> str | None:
    """The name under which the attribute travels; None if it does not travel, or travels with its owner."""
    if isinstance(owner, (type, types.FunctionType)):
        module, path = owner.__module__, [*owner.__qualname__.split("."), attribute]
    else:
        module, path = vars(owner).get("__name__"), [attribute]
    if not isinstance(module, str) or module in ("__main__", "__mp_main__") or attribute in _OF_THE_IMPORT:
        return None
    if module.partition(".")[0] in _OF_THE_KERNEL or (module == "sys" and attribute != "argv"):
        return None
    if byvalue.travels(sys.modules.get(module)) or byvalue.exists_only_here(module):
        return None
    name = attributes.name_of(module, path)
    try:
        return name if attributes.owner(name) is owner else None
    except LookupError:
        return None


def _is_data(value: Any) -> bool:
    """Whether the value can be changed in place and may leave the process."""
    kind = type(value)
    return not issubclass(kind, (*_CODE, *_FIXED)) and kind.__module__ not in _OF_ONE_PROCESS


def _is_original(module: str, attribute: str, value: Any) -> bool:
    """Whether the attribute is the library's own code, so that no cell has set it."""
    if isinstance(value, types.FunctionType):
        source = value.__globals__.get("__name__")
    else:
        source = value.__module__ if isinstance(value, _CODE) and not isinstance(value, types.ModuleType) else None
    of_library = isinstance(source, str) and source.partition(".")[0] == module.partition(".")[0]
    return of_library and value.__name__ == attribute


class _History:
    """What the executed cells have set and changed; new cells are added on each call."""

    def __init__(self) -> None:
        self._cells: list[str] | None = None
        self._count = 0
        self._facts = Facts()

    def of(self, namespace: Mapping[str, Any]) -> Facts:
        """The facts from IPython's history or the script's file, without the ``%%distribute`` cell that runs now."""
        cells = namespace.get("In")
        if not isinstance(cells, list):
            return facts("".join(linecache.getlines(str(namespace.get("__file__", "")))))
        if cells is not self._cells or len(cells) < self._count:
            self._cells, self._count, self._facts = cells, 0, Facts()
        runs = len(cells) - bool(cells and "run_cell_magic('distribute'" in str(cells[-1]))
        new = [facts(str(text)) for text in cells[self._count : runs]]
        self._count = max(self._count, runs)
        imports = self._facts.imports.union(*[one.imports for one in new])
        self._facts = Facts(imports, self._facts.touches.union(*[one.touches for one in new]))
        return self._facts


_history = _History()


def note(namespace: Mapping[str, Any]) -> None:
    """Read the new cells, so that the next capture does not need to."""
    _history.of(namespace)
