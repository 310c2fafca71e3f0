"""The results of a rank: values of the names that the cell bound or changed, or its exception."""

from __future__ import annotations

import functools
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import marshal
from ..marshal import codes
from ..marshal.attributes import Absent, is_attribute, name_of, shown
from ..marshal.owned import Owned, of_modules
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..states import adapter_of
from .eventfile import EventFile
from .execution import CALL, VALUE
from .module_attributes import Libraries

AUTO_LIMIT = 4 << 30
"""Largest number of bytes that come back automatically; more must be named with ``--out``."""

_OF_LIBRARIES = re.compile(r"__(torchdist|.*(?<!__)$)|.*\]_+$")
"""Names such as ``__compiled_fn_1`` of ``torch.compile``, and ``Box[int]_`` of pydantic for a second ``Box[int]``."""

_DEPTH = 8
_Cache = type(functools.lru_cache(lambda: None))
_WEIGHTLESS = (str, int, float, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


@dataclass(frozen=True)
class Questions:
    """Functions that are called at each ``publish``."""

    apart: Callable[[], marshal.Stays | None]
    """Values that are not sent because the rank has only a part of them."""
    attributes: Callable[[], dict[str, Any]] = dict
    """Attributes of modules that were captured or that user code has set."""
    state: Callable[[], dict[str, Any]] = dict
    """State of the process that user code has changed (see the subpackage ``states``)."""


class Results:
    """The values of one rank; publishing them again replaces them."""

    def __init__(
        self, rank: int, plan: Plan, loaded: marshal.Loaded, paths: JobPaths, events: EventFile, ask: Questions
    ) -> None:
        self._rank, self._plan, self._ask = rank, plan, ask
        self._loaded, self._paths, self._events = loaded, paths, events
        self._before = frozenset({*loaded.main, "__builtins__", "__annotations__"})
        self._objects = of_modules(value for value in loaded.main.values() if isinstance(value, types.ModuleType))
        self._code: types.CodeType | None = None
        self._libraries: Libraries | None = None

    def begin(self, code: types.CodeType) -> None:
        """``code`` is about to run."""
        there = [value for value in self._loaded.main.values() if isinstance(value, types.ModuleType)]
        self._code, self._libraries = code, Libraries(code, there, str(self._paths.source))

    @property
    def wanted(self) -> bool:
        """Whether this rank's values go to the notebook."""
        return self._rank == 0 or self._plan.collect == "all"

    def publish(self, namespace: dict[str, Any], *, midway: bool = False) -> None:
        """Write the requested values of ``namespace``, and report which were written and which were left out.

        ``midway``: user code has not ended. Then the state of the process is not written: it may be set only for some
        lines, for example the grad mode in ``with torch.no_grad()``.

        Raises ``StoreError`` if the disk is full.
        """
        if not self.wanted:
            return
        vars(self._loaded).pop("comparison", None)  # computed by an earlier ``publish``
        chosen, left = self._choose(namespace)
        if self._rank == 0 and not midway and self._plan.out != ("none",):
            chosen = {**self._ask.state(), **chosen}  # values of modules may need the import path
        objects = {**self._objects, **self._imported()}
        chosen |= self._contents(chosen, objects)
        dumped = marshal.dump_results(chosen, self._loaded, self._paths, self._rank, self._ask.apart(), objects)
        left += [[shown(name), why] for name, why in dumped.left]
        left += [] if midway else [*self._caches(), *self._of_libraries(chosen)]
        told = [shown(name) for name in dumped.names if not adapter_of(name) and chosen[name] is not Absent]
        self._events.write("rank.result", names=told, left=left, size=dumped.size)

    def _choose(self, names: dict[str, Any]) -> tuple[dict[str, Any], list[list[str]]]:
        """The values to send, and [name, reason] for values that are left out."""
        out = self._plan.out
        last = {VALUE: names[VALUE]} if names.get(VALUE) is not None else {}
        if out == ("none",):
            return last, []
        if out == ("auto",):
            new = [name for name in names if name not in self._before and not _OF_LIBRARIES.match(name)]
            found = [*self._loaded.manifest.bound, *marshal.changed_names(self._loaded, names), *new]
            chosen = {name: names[name] for name in found if name in names and name != CALL}
            gone = (name for name in self._loaded.names if name not in names and name.isidentifier() and name != CALL)
            return self._within_limit({**chosen, **dict.fromkeys(gone, Absent), **self._of_modules(), **last})
        left = [[name, "there is no such name after the cell"] for name in out if name not in names]
        return {**{name: names[name] for name in out if name in names}, **self._of_modules(), **last}, left

    def _imported(self) -> dict[int, Owned]:
        """Objects of modules that ``from … import`` in the code has bound."""
        if self._code is None:
            return {}
        references = codes.references(self._code)
        modules = [sys.modules[name] for name in references.imports if name in sys.modules]
        return of_modules(modules, references.attributes)

    def _contents(self, chosen: Mapping[str, Any], objects: Mapping[int, Owned]) -> dict[str, Any]:
        """Items of containers of the user's modules, by the attribute's name: the containers are sent as references."""
        found = {}
        for name, value in chosen.items():
            owned = objects.get(id(value))
            file = str(getattr(sys.modules.get(owned.module), "__file__", "")) if owned else ""
            if owned and owned.content is not None and (is_attribute(name) or file.startswith(str(self._paths.source))):
                found[name if is_attribute(name) else name_of(owned.module, (owned.name,))] = owned.content
        return found

    def _caches(self) -> list[list[str]]:
        """What the functions under ``functools.lru_cache`` have kept, which nobody can read."""
        caches = [value for value in self._loaded.memo.values() if type(value) is _Cache]
        kept = [(one.__qualname__, one.cache_info().currsize) for one in caches]
        return [[f"{name}.cache", f"{count} results that lru_cache keeps"] for name, count in kept if count]

    def _of_libraries(self, chosen: Mapping[str, Any]) -> list[list[str]]:
        """Containers of libraries that the code has changed."""
        changed = self._libraries.changed() if self._libraries and self._rank == 0 else []
        return [
            [shown(name), "what a cell puts into a library's own container"] for name in changed if name not in chosen
        ]

    def _of_modules(self) -> dict[str, Any]:
        """Attributes that were set or changed; only from rank 0, because the notebook has only one of each."""
        found = self._ask.attributes() if self._rank == 0 else {}
        changed = marshal.changed_names(self._loaded, found)
        return {name: value for name, value in found.items() if name in changed or name not in self._loaded.names}

    def _within_limit(self, values: dict[str, Any]) -> tuple[dict[str, Any], list[list[str]]]:
        sizes = Sizes(self._loaded)
        chosen: dict[str, Any] = {}
        left = []
        total = 0
        for name, value in values.items():
            size = sizes.of(value)
            if total + size > AUTO_LIMIT:
                much = f"{size / 2**30:.1f} GiB"
                left.append([name, f"it is too large to come back unasked ({much}); name it with --out {name}"])
                continue
            total += size
            chosen[name] = value
        return chosen, left

    def dump_error(self, error: BaseException) -> None:
        """Write the exception object for the notebook. Never raises, since its text was reported already."""
        try:
            marshal.dump_exception(error, self._loaded, self._paths.error(self._rank))
        except Exception:  # noqa: BLE001  # the user's __reduce__
            print("the exception could not be pickled, so the notebook raises a similar one:", file=sys.stderr)
            traceback.print_exc()


class Sizes:
    """Approximate sizes of values when written. Shared memory counts once."""

    def __init__(self, loaded: marshal.Loaded) -> None:
        self._captured = loaded.places
        self._seen: set[int] = set()
        self._memory: set[int] = set()

    def of(self, value: Any) -> int:
        """Bytes of the arrays and tensors in ``value``, without captured objects, which the notebook already has."""
        return self._below(value, _DEPTH)

    def _below(self, value: Any, depth: int) -> int:
        if id(value) in self._seen or depth == 0 or issubclass(type(value), _WEIGHTLESS):
            return 0
        self._seen.add(id(value))
        if (own := _own_bytes(value)) is not None:
            memory, size = own
            size = 0 if memory in self._memory else size
            self._memory.add(memory)
            return size
        return sum(self._below(part, depth - 1) for part in _parts(value) if id(part) not in self._captured)


def _own_bytes(value: Any) -> tuple[int, int] | None:
    """(address, bytes) of the memory of a tensor, array or bytes object; None for other values."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    kind = type(value)  # not isinstance: ``__class__`` may be a property with side effects
    if issubclass(kind, torch.Tensor):
        try:
            storage = value.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a wrapper subclass has no storage
            return id(value), value.numel() * value.element_size()
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return value.__array_interface__["data"][0], value.nbytes
    if issubclass(kind, (bytes, bytearray)):
        return id(value), len(value)
    return None


def _parts(value: Any) -> Iterable[Any]:
    if issubclass(type(value), dict):
        yield from list(value.values())
    elif issubclass(type(value), (list, tuple, set, frozenset)):
        yield from list(value)
    try:
        yield from list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        return
