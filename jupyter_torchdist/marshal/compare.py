"""What changed in a rank: the bundle is read again and compared with the live objects.

First the complete value of each name is pickled, live and as captured. Mostly the two are equal. If they differ, the
objects are compared one by one, by their own state. In such a state, captured objects are written as their place in
the stream. A change is therefore found exactly in the object that changed, and aliases are compared, too.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import sys
import types
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import byvalue, codes, rebuild
from .bundle import Loaded
from .mapping import Pages, equal_memory
from .owned import BUILTINS
from .pickler import LARGE, Pickler
from .rebuild import Storage
from .states import is_code, state_of
from .tensors import is_tensor

_LEAVES = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


@dataclass(frozen=True)
class Facts:
    """What is known about one captured object. ``kind`` is its ``State.kind``; ``children`` are places."""

    differs: bool
    kind: str = "leaf"
    children: tuple[int, ...] = ()


class Comparison:
    """The captured objects of one rank, live and as captured. Each object is compared once."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._pages = Pages(loaded.ranges)
        self._facts: dict[int, Facts] = {}
        self._clean: set[int] = set()
        self._pristine = loaded.pristine
        self._live_writer = _Shallow(loaded)
        self._pristine_writer = _Shallow(self._pristine) if self._pristine else None

    def facts(self, place: int) -> Facts:
        found = self._facts.get(place)
        if found is None:
            found = self._facts[place] = self._look(place)
        return found

    def children(self, place: int) -> tuple[int, ...]:
        """Captured objects that the live object refers to."""
        return self.facts(place).children

    def changed(self, place: int) -> bool:
        """Whether the object's own state differs from the captured state. True when that cannot be known."""
        facts = self.facts(place)
        return facts.differs or any(child != place and self.replaced(child) for child in facts.children)

    def replaced(self, place: int) -> bool:
        """Whether the object changed in a way that cannot be put back in place."""
        facts = self.facts(place)
        if facts.kind == "array":
            before = self._pristine.memo.get(place) if self._pristine else None
            live = self.loaded.memo[place]
            return before is None or live.shape != before.shape or live.dtype != before.dtype
        return facts.kind == "constant" and self.changed(place)

    def reaches_change(self, place: int) -> bool:
        """Whether the object or a captured object below it changed."""
        if place in self._clean or self._same_as_a_whole(place):
            return False
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

    def differs(self, value: Any, before: Any) -> bool:
        """Whether ``value``, which has no place in the stream, differs from ``before``, the name's captured value."""
        if self._pristine_writer is None:
            return True
        try:
            now, then = self._live_writer.write(value), self._pristine_writer.write(before)
        except Exception:  # noqa: BLE001  # the user's own reducers run here and may raise anything
            return True
        return now != then or any(self.reaches_change(child) for child in now.places)

    def _same_as_a_whole(self, place: int) -> bool:
        if self._pristine is None or place not in self._pristine.memo or is_code(self.loaded.memo[place]):
            return False
        live, before = _Whole(self.loaded, self._clean), _Whole(self._pristine, self._clean)
        try:
            same = live.sign(self.loaded.memo[place]) == before.sign(self._pristine.memo[place])
        except Exception:  # noqa: BLE001  # the user's own reducers run here and may raise anything
            return False
        if not same or any(self._leaf_changed(leaf) for leaf in live.leaves):
            return False
        self._clean.update(live.met)
        return True

    def _leaf_changed(self, place: int) -> bool:
        if is_code(self.loaded.memo[place]):
            return self.reaches_change(place)
        return self.facts(place).differs

    def became(self, place: int) -> type | None:
        """The class of the live object if it differs from the captured one (a lazy layer changes its class)."""
        kind = type(self.loaded.memo[place])
        before = type(self._pristine.memo.get(place)) if self._pristine else kind
        return kind if (kind.__module__, kind.__qualname__) != (before.__module__, before.__qualname__) else None

    def _look(self, place: int) -> Facts:
        live = self.loaded.memo[place]
        before = self._pristine.memo.get(place) if self._pristine else None
        if _is_leaf(live) or live is self.loaded.main or live is BUILTINS.value:
            return Facts(False)
        if isinstance(live, Storage):
            return Facts(not (isinstance(before, Storage) and self._same_storage(live, before)), "storage")
        if _is_array(live):
            return Facts(not (_is_array(before) and self._same_array(live, before)), "array")
        try:
            now = self._live_writer.write_state(live)
            then = self._pristine_writer.write_state(before) if self._pristine_writer and before is not None else None
        except Exception:  # noqa: BLE001  # the user's own reducers run here and may raise anything
            return Facts(True, "unknown")
        alike = is_tensor(type(live)) and is_tensor(type(before))
        differs = now != then and not (alike and self._same_tensor(live, before))
        return Facts(differs, now.kind, now.places)

    def _same_storage(self, live: Storage, before: Storage) -> bool:
        if live.size != before.size:
            return False
        return self._pages.untouched(live.address) or equal_memory(live.address, before.address, live.size)

    def _same_array(self, live: Any, before: Any) -> bool:
        if live.shape != before.shape or live.dtype != before.dtype or live.flags.writeable != before.flags.writeable:
            return False
        if live.strides == before.strides and (live.flags.c_contiguous or live.flags.f_contiguous):
            here, there = (item.__array_interface__["data"][0] for item in (live, before))
            return self._pages.untouched(here) or equal_memory(here, there, live.nbytes)
        return bool(live.tobytes() == before.tobytes())

    @staticmethod
    def _same_tensor(live: Any, before: Any) -> bool:
        """Whether the numbers are equal in another storage: a model was moved to the GPU and only read there."""
        torch: Any = sys.modules["torch"]
        facts = ("dtype", "layout", "requires_grad", "is_quantized", "is_nested")
        alike = all(getattr(live, name) == getattr(before, name) for name in facts)
        if not alike or live.device.type == "meta" or live.grad is not None or vars(live) or vars(before):
            return False
        try:
            if live.layout is not torch.strided or live.is_quantized or live.is_nested:
                return bool(torch.equal(live.cpu(), before))
            if live.shape != before.shape:
                return False
        except (RuntimeError, NotImplementedError):  # this kind of tensor cannot be compared
            return False
        now, then = (item.detach().cpu().contiguous().view(-1) for item in (live, before))
        return bool(equal_memory(now.data_ptr(), then.data_ptr(), now.numel() * now.element_size()))


def changed_names(loaded: Loaded, main: dict[str, Any] | types.ModuleType) -> list[str]:
    """Captured names whose object changed or was replaced, and globals that captured functions set."""
    scope = vars(main) if isinstance(main, types.ModuleType) else main
    comparison = comparison_of(loaded)
    names = [name for name in loaded.names if name in scope and _differs(name, scope, comparison)]
    stored = dict.fromkeys(name for value in loaded.memo.values() for name in _stores(value, scope))
    return names + [name for name in stored if name in scope and name not in loaded.names]


def comparison_of(loaded: Loaded) -> Comparison:
    """The comparison of a rank, made once and kept in ``loaded``."""
    found = loaded.__dict__.get("comparison")
    if not isinstance(found, Comparison):
        found = loaded.__dict__["comparison"] = Comparison(loaded)
    return found


def _differs(name: str, scope: dict[str, Any], comparison: Comparison) -> bool:
    value, pristine = scope[name], comparison.loaded.pristine
    if pristine is None or name not in pristine.main:
        return not _is_leaf(value)
    before = pristine.main[name]
    place = comparison.loaded.places.get(id(value))
    if place is not None:
        return pristine.places.get(id(before)) != place or comparison.reaches_change(place)
    if _is_leaf(value):
        return value is not before
    return comparison.differs(value, before)


def _stores(value: Any, scope: dict[str, Any]) -> Iterable[str]:
    if isinstance(value, types.FunctionType) and value.__globals__ is scope:
        yield from codes.references(value.__code__).stores


def _is_leaf(value: Any) -> bool:
    """Whether the value is never compared: code and modules that each process imports."""
    return isinstance(value, _LEAVES) and not byvalue.travels(value) and not is_code(value)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


@dataclass
class Written:
    """An object's own state as bytes. ``places`` are the captured objects that it refers to."""

    stream: bytes
    buffers: list[memoryview]
    places: tuple[int, ...]
    kind: str

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Written) or self.stream != other.stream or len(self.buffers) != len(other.buffers):
            return False
        return all(ours == theirs for ours, theirs in zip(self.buffers, other.buffers, strict=True))


class _Writer(Pickler):
    """Writes objects for comparison only. Large tensors over memory that was not captured always differ."""

    _fresh = itertools.count()

    def __init__(self, file: Any, loaded: Loaded) -> None:
        super().__init__(file, loaded.main)
        self._places = loaded.places
        self._captured = loaded.storages
        self.storages.share(loaded.storages)
        self.scopes.update(loaded.scopes)

    def tensor(self, value: Any) -> Any:
        try:
            here = value.device.type == "cpu" and value.untyped_storage().nbytes() < LARGE
            plain = here or value.device.type == "meta" or value.untyped_storage()._cdata in self._captured
        except (RuntimeError, NotImplementedError, ValueError):  # a sparse or lazy tensor has no storage
            return super().tensor(value)
        return super().tensor(value) if plain else (rebuild.same, (next(self._fresh),))


class _Shallow(_Writer):
    """Writes one object's state; captured objects in it are written as their place."""

    def __init__(self, loaded: Loaded) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, loaded)
        self._seen: dict[int, None] = {}

    def persistent_id(self, value: Any) -> Any:
        place = self._places.get(id(value))
        if place is not None:
            self._seen[place] = None
        return place

    def write_state(self, value: Any) -> Written:
        """The state of a captured object."""
        state = state_of(value, self)
        return self.write(state, state.kind)

    def write(self, value: Any, kind: str = "value") -> Written:
        """The bytes of any value."""
        self.clear_memo()
        self._file.seek(0)
        self._file.truncate()
        for kept in (self._seen, self.buffers, self._cells):
            kept.clear()
        self.dump(value)
        buffers = [buffer.raw() for buffer in self.buffers]
        return Written(self._file.getvalue(), buffers, tuple(self._seen), kind)


class _Hash:
    """A file that keeps only a digest of the written bytes."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def write(self, content: Any) -> int:
        self._digest.update(content)
        return len(content)

    def value(self) -> bytes:
        return self._digest.digest()


class _Whole(_Writer):
    """Signs an object with all objects below it. Storages, arrays and code are leaves, compared separately."""

    def __init__(self, loaded: Loaded, clean: set[int]) -> None:
        self._hash = _Hash()
        super().__init__(self._hash, loaded)
        self._clean = clean
        self.met = array("Q")
        """Places in the order of pickling: an alias of another, equal object counts as a difference."""
        self.leaves: dict[int, None] = {}

    def persistent_id(self, value: Any) -> Any:
        place = self._places.get(id(value))
        if place is None:
            return None
        self.met.append(place)
        if place in self._clean or _is_leaf(value) or value is self.main or value is BUILTINS.value:
            return place
        if isinstance(value, Storage) or _is_array(value) or is_code(value):
            self.leaves[place] = None
            return place
        return None

    def sign(self, value: Any) -> tuple[bytes, bytes, int]:
        self.dump(value)
        return self._hash.value(), self.met.tobytes(), next(self._fresh) if self.buffers else 0
