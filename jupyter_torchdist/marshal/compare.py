"""What changed in a rank: the bundle is read again and held against the live objects, one object at a time.

An object is compared by its own state only; captured objects it refers to stand there by their place in the
stream, so that a change is known exactly where it happened, and aliases count.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from cloudpickle import cloudpickle

from . import codes
from .bundle import Loaded
from .mapping import Pages, equal_memory
from .pickler import Pickler
from .rebuild import Storage
from .states import State, state_of
from .tensors import is_tensor

_LEAVES = (type, types.FunctionType, types.ModuleType)


class Comparison:
    """The captured objects of one rank, live and as they were. ``places`` holds only live objects."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.pages = Pages(loaded.ranges)
        self._changed: dict[int, bool] = {}
        self._children: dict[int, tuple[int, ...]] = {}
        self._clean: set[int] = set()
        self._writers: tuple[_Shallow, _Shallow] | None = None

    def changed(self, place: int) -> bool:
        """Whether the object's own state differs from what was captured. True when that cannot be known."""
        found = self._changed.get(place)
        if found is None:
            found = self._changed[place] = self._compare(place)
        return found

    def children(self, place: int) -> tuple[int, ...]:
        """Captured objects that the live object refers to."""
        self.changed(place)
        return self._children.get(place, ())

    def reaches_change(self, place: int) -> bool:
        """Whether the object or a captured one below it changed."""
        seen = {place}
        waiting = [place]
        while waiting:
            current = waiting.pop()
            if current in self._clean:
                continue
            if self.changed(current):
                return True
            fresh = [child for child in self.children(current) if child not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
        self._clean |= seen
        return False

    def _compare(self, place: int) -> bool:
        live = self.loaded.memo[place]
        if isinstance(live, _LEAVES):
            return False
        pristine = self.loaded.pristine
        if pristine is None:
            return True
        before = pristine.memo.get(place)
        if type(live).__name__ != type(before).__name__:
            return True
        if isinstance(live, Storage) and isinstance(before, Storage):
            return not self._same_storage(live, before)
        if self._writers is None:
            self._writers = _Shallow(self.loaded), _Shallow(pristine)
        if _is_array(live):
            return not self._same_array(live, before)
        try:
            now, self._children[place] = self._writers[0].write(live)
            then, _ = self._writers[1].write(before)
        except Exception:  # the user's own reducers run here and may raise anything
            return True
        if now != then and is_tensor(type(live)):
            return not self._same_tensor(live, before)
        return now != then

    def _same_storage(self, live: Storage, before: Storage) -> bool:
        if live.size != before.size:
            return False
        if self.pages.untouched(live.address):
            return True
        return equal_memory(live.address, before.address, live.size)

    def _same_array(self, live: Any, before: Any) -> bool:
        if live.shape != before.shape or live.dtype != before.dtype or live.dtype.hasobject:
            return False
        if live.strides == before.strides and (live.flags.c_contiguous or live.flags.f_contiguous):
            address = live.__array_interface__["data"][0]
            if self.pages.untouched(address):
                return True
            return equal_memory(address, before.__array_interface__["data"][0], live.nbytes)
        return bool(live.tobytes() == before.tobytes())

    @staticmethod
    def _same_tensor(live: Any, before: Any) -> bool:
        """The same numbers in another storage: a model that went to the GPU and was only read there."""
        torch: Any = sys.modules["torch"]
        alike = all(getattr(live, name) == getattr(before, name) for name in ("shape", "dtype", "layout", "requires_grad"))
        plain = alike and live.layout is torch.strided and not live.is_quantized and not live.is_nested
        if not plain or live.device.type == "meta" or live.grad is not None or vars(live) or vars(before):
            return False
        now, then = (item.detach().cpu().contiguous().view(-1) for item in (live, before))
        return bool(equal_memory(now.data_ptr(), then.data_ptr(), now.numel() * now.element_size()))


def changed_names(loaded: Loaded, main: dict[str, Any] | types.ModuleType) -> list[str]:
    """Captured names whose object changed, was replaced, or was set by a captured function's ``global``."""
    scope = vars(main) if isinstance(main, types.ModuleType) else main
    comparison = comparison_of(loaded)
    pristine = loaded.pristine
    names = [name for name in loaded.names if name in scope and _differs(name, scope, comparison, pristine)]
    stored = dict.fromkeys(name for value in loaded.memo.values() for name in _stores(value, scope))
    return names + [name for name in stored if name in scope and name not in loaded.names]


def comparison_of(loaded: Loaded) -> Comparison:
    """The comparison of a rank: made once, at the end."""
    found = loaded.__dict__.get("comparison")
    if not isinstance(found, Comparison):
        found = loaded.__dict__["comparison"] = Comparison(loaded)
    return found


def _differs(name: str, scope: dict[str, Any], comparison: Comparison, pristine: Loaded | None) -> bool:
    value = scope[name]
    place = comparison.loaded.places.get(id(value))
    if isinstance(value, types.ModuleType):
        return pristine is not None and pristine.main.get(name) is not value
    if pristine is None or name not in pristine.main:
        return not isinstance(value, _LEAVES)
    before = pristine.main[name]
    if place is not None:
        return pristine.places.get(id(before)) != place or comparison.reaches_change(place)
    if isinstance(value, _LEAVES):
        return value is not before
    try:
        now, children = _Shallow(comparison.loaded).write_value(value)
        then, _ = _Shallow(pristine).write_value(before)
    except Exception:  # the user's own reducers run here and may raise anything
        return True
    return now != then or any(comparison.reaches_change(child) for child in children)


def _stores(value: Any, scope: dict[str, Any]) -> Iterable[str]:
    if isinstance(value, types.FunctionType) and value.__globals__ is scope:
        yield from codes.references(value.__code__).stores


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


class _Shallow(Pickler):
    """Writes one object's state; captured objects in it are written as their place."""

    def __init__(self, loaded: Loaded) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, loaded.main)
        self._places = loaded.places
        self._seen: list[int] = []
        for value in loaded.memo.values():
            if isinstance(value, Storage):
                self.storages.add(value)

    def persistent_id(self, value: Any) -> Any:
        place = self._places.get(id(value))
        if place is not None:
            self._seen.append(place)
        return place

    def write(self, value: Any) -> tuple[bytes, tuple[int, ...]]:
        return self.write_value(state_of(value, self))

    def write_value(self, value: Any) -> tuple[bytes, tuple[int, ...]]:
        self._file.seek(0)
        self._file.truncate()
        self._seen = []
        self.clear_memo()
        self.buffers.clear()
        self.dump(value)
        content = self._file.getvalue() + b"".join(bytes(buffer) for buffer in self.buffers)
        return content, tuple(dict.fromkeys(self._seen))


def iterate_states(states: Iterable[State]) -> Iterator[Any]:
    yield from states


_ = pickle, cloudpickle
