"""Finds and undoes the side effects of a trial forward: notes in lists, dicts, sets, classes and functions of the cell.

They are those reachable from names of the cell and from attributes and hooks of the model. The notes of a forward are
also compared: a number computed from some samples only differs between ranks, and only its value shows it.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...usercode.frames import is_users
from . import dtensors
from .parameter_writes import ParameterWrites

_MANY = 10_000
"""How many elements of a container are searched for further containers."""
_ROOM = 5_000_000
"""How many elements are searched in total; model and hooks come first, names of the cell (data sets) last."""
_CLOSE = 5e-3
"""Relative tolerance for equal numbers: kernels for other sizes add in another order."""


@dataclass(frozen=True)
class Left:
    """A value that a forward has left in an attribute, a container or a name; ``put`` replaces it."""

    where: str
    value: Any
    put: Callable[[Any], None]


class Belongings:
    """A snapshot of the state of the cell and of ``module``.

    ``only``: look at these attributes and containers alone (as ``Left.where`` names them), and do not restore.
    """

    def __init__(self, module: nn.Module, only: Collection[str] | None = None) -> None:
        self._module = module
        self._parts = [(name, part, dict(part.__dict__), dict(part._buffers)) for name, part in module.named_modules()]
        buffers = module.named_buffers() if only is None else ()
        self._buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in buffers]
        self._main = vars(sys.modules["__main__"])
        self._names = dict(self._main)
        self._found: list[tuple[str, Any, Any]] = []
        self._arrays: list[tuple[str, Any, Any]] = []
        self._room, self._iterates = _ROOM, False
        self._registries: set[int] = set()
        self._only = only
        seen: set[int] = {id(self._main)}
        for path, part, attributes, _ in self._parts:
            for kind in type(part).__mro__:
                self._walk(kind.__name__, kind, seen)
            for name, value in attributes.items():
                if name.endswith("_hooks"):
                    self._registries.add(id(value))
                    self._walk(f"a hook of {path or type(part).__name__}", value, seen)
                elif name not in ("_parameters", "_buffers", "_modules"):
                    self._walk(joined(path, name), value, seen)
        for name, value in self._names.items():
            if not name.startswith("_"):
                self._walk(name, value, seen)

    @functools.cached_property
    def weights(self) -> ParameterWrites:
        """Sees writes to parameters while it is active; to be entered before the forward."""
        return ParameterWrites(self._module)

    def snapshots(self) -> Iterator[tuple[Any, Any]]:
        """Containers, attributes and names, each with the copy that ``restore`` takes its entries from.

        There are none to go through if nothing in them is an iterator.
        """
        if not self._iterates:
            return
        yield from ((part.__dict__, attributes) for _, part, attributes, _ in self._parts)
        yield from ((one, before) for _, one, before in self._found if not isinstance(one, set))
        yield self._main, self._names

    def _walk(self, where: str, value: Any, seen: set[int]) -> None:
        waiting = [value] if self._only is None or where in self._only else []
        while waiting and self._room > 0:
            one = waiting.pop()
            if id(one) in seen:
                continue
            if isinstance(one, (list, set, deque)):
                self._found.append((where, one, list(one)))
                inner: Iterable[Any] = one
            elif isinstance(one, dict):
                self._found.append((where, one, dict(one)))
                inner = one.values()
            elif isinstance(one, tuple):
                inner = one
            elif is_array(one) or (is_dense(one) and not one.requires_grad):
                if (size := one.numel() if isinstance(one, Tensor) else one.size) <= _ROOM:
                    self._room -= size // _MANY
                    self._arrays.append((where, one, one.clone() if isinstance(one, Tensor) else one.copy()))
                seen.add(id(one))
                continue
            elif (inside := referred(one)) is not None:
                if isinstance(one, (type, CellType)):
                    self._found.append((where, kept := Kept(one), dict(kept)))
                inner = inside
            else:
                self._iterates |= is_iterator(one)
                continue
            seen.add(id(one))
            self._room -= len(one) if isinstance(one, (list, dict, set, deque, tuple)) else 1
            few = itertools.islice(inner, _MANY)
            waiting += [each for each in few if not isinstance(each, (Tensor, str, int, float, bool))]

    def noted(self) -> dict[str, Any]:
        """New values in the cell's containers and names, by location."""
        new: dict[str, Any] = {}
        for where, container, before in self._found:
            if id(container) in self._registries:  # hooks registered by the forward (Hugging Face) are not notes
                continue
            if isinstance(container, _MAPPINGS):
                added: Any = {key: one for key, one in container.items() if before.get(key, self) is not one}
            else:
                now = list(container)
                added = now if _differ(now[: len(before)], before) else now[len(before) :]
                added = added if len(now) != len(before) or added else None
            if added:
                new.setdefault(where, []).append(added)
        for where, array, before in self._arrays:
            if not equal_arrays(array, before):
                new.setdefault(where, []).append(array.clone() if isinstance(array, Tensor) else array.copy())
        own = ((name, one) for name, one in self._main.items() if not name.startswith("_"))
        return new | {name: one for name, one in own if self._names.get(name, self) is not one}

    def changed(self) -> dict[str, Any]:
        """Attributes and buffers of the model that have changed, by name."""
        new = {where: value for where, _, _, value in self._attributes()}
        for name, buffer, was in self._buffers:
            if not torch.equal(buffer, was):
                new[name] = buffer.detach().clone()
        return new

    def _attributes(self) -> Iterator[tuple[str, nn.Module, str, Any]]:
        """The attributes of the model that have changed."""
        for path, part, before, _ in self._parts:
            for name, value in list(part.__dict__.items()):
                where = joined(path, name)
                if (
                    before.get(name, self) is not value
                    and name != "training"
                    and (self._only is None or where in self._only)
                ):
                    yield where, part, name, value

    def left(self) -> list[Left]:
        """What has changed, one by one: attributes of the model, entries of containers (but sets), and names."""
        found = [
            Left(where, value, functools.partial(part.__dict__.__setitem__, name))
            for where, part, name, value in self._attributes()
        ]
        for where, container, before in self._found:
            if id(container) in self._registries or isinstance(container, set):
                continue
            if isinstance(container, _MAPPINGS):
                changed = [(key, one) for key, one in container.items() if before.get(key, self) is not one]
            else:
                now = list(container)
                if not _differ(now, before):  # most: a cell's data sets may be long
                    continue
                known = set(map(id, before))
                changed = [(place, one) for place, one in enumerate(now) if id(one) not in known]
            found += [Left(where, one, functools.partial(_put, container, key)) for key, one in changed]
        for name, one in self._main.items():
            asked = self._only is None or name in self._only
            if asked and not name.startswith("_") and self._names.get(name, self) is not one:
                found.append(Left(name, one, functools.partial(self._main.__setitem__, name)))
        return found

    def restore(self) -> None:
        """Restore attributes of the model, containers and names of the cell; ``no_trace`` restores values."""
        for _, part, attributes, table in self._parts:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            part._buffers.clear()
            part._buffers.update(table)
        for _, container, before in self._found:
            if isinstance(container, Kept):
                _give_back(container, before)
            elif isinstance(container, dict):
                if len(container) != len(before) or any(
                    before.get(key, self) is not one for key, one in container.items()
                ):
                    container.clear()
                    container.update(before)
            elif len(container) != len(before) or _differ(list(container), before):
                container.clear()
                container.update(before) if isinstance(container, set) else container.extend(before)
        for _, array, before in self._arrays:
            if array.shape != before.shape and isinstance(array, Tensor):
                array.data = before
            elif not equal_arrays(array, before):
                array[...] = before
        _give_back(self._main, self._names)


class Kept(MutableMapping[str, Any]):
    """The attributes of a class, or the variable of a closure that a cell holds."""

    def __init__(self, owner: type | CellType) -> None:
        self._owner = owner

    def _names(self) -> dict[str, Any]:
        if isinstance(self._owner, type):
            return {name: value for name, value in vars(self._owner).items() if not name.startswith("__")}
        return dict.fromkeys(["cell_contents"], *held) if (held := _contents(self._owner)) else {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __getitem__(self, name: str) -> Any:
        return self._names()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        (type if isinstance(self._owner, type) else CellType).__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        (type if isinstance(self._owner, type) else CellType).__delattr__(self._owner, name)


_MAPPINGS = (dict, Kept)


def _give_back(names: MutableMapping[str, Any], before: dict[str, Any]) -> None:
    """Make ``names`` what they were ``before``."""
    for name in [name for name in names if name not in before]:
        if not name.startswith("__"):  # torch.compile needs the names that it adds
            del names[name]
    now = dict(names)
    for name, value in before.items():
        if now.get(name, names) is not value:
            names[name] = value


def _put(container: Any, key: Any, value: Any) -> None:
    """Replace an entry, or append it to a list that has been shortened since."""
    if not isinstance(container, _MAPPINGS) and key >= len(container):
        container.append(value)
    else:
        container[key] = value


def joined(path: str, name: str) -> str:
    """The name of an attribute of the part of a model that is at ``path``."""
    return f"{path}.{name}" if path else name


def referred(value: Any) -> Iterator[Any] | None:
    """Objects that a function, a class or an object of the cell refers to; None for other objects."""
    if isinstance(value, functools.partial):
        return iter((value.func, *value.args, *value.keywords.values()))
    if isinstance(value, MethodType):
        return iter((value.__self__, value.__func__))
    if isinstance(value, (staticmethod, classmethod)):
        return iter((value.__func__,))
    if isinstance(value, CellType):
        return iter(_contents(value))
    if isinstance(value, type):
        return iter(vars(value).values()) if is_users_class(value) else None
    if isinstance(value, FunctionType):
        if not is_users(value.__code__.co_filename):
            return None
        return iter((vars(value), *(value.__closure__ or ()), *(value.__defaults__ or ())))
    return iter((vars(value),)) if is_users_own(value) else None


def named_globals(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function of the cell names."""
    if isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType) and is_users(function.__code__.co_filename):
        for name in function.__code__.co_names:
            yield name, function.__globals__.get(name)


def _contents(cell: CellType) -> tuple[Any, ...]:
    """What a cell of a closure holds; nothing before its variable is bound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def is_users_own(value: Any) -> bool:
    """Whether the class of ``value`` is from the cell or a local module. Modules and optimizers do not count."""
    if isinstance(value, (type, nn.Module, torch.optim.Optimizer)) or not hasattr(value, "__dict__"):
        return False
    return is_users_class(type(value))


def is_users_class(kind: type) -> bool:
    """Whether a class is from the cell or a local module."""
    home = kind.__module__
    file = getattr(sys.modules.get(home), "__file__", None)
    return home == "__main__" or (file is not None and is_users(file))


def _differ(some: list[Any], others: list[Any]) -> bool:
    return len(some) != len(others) or any(one is not other for one, other in zip(some, others, strict=True))


def is_iterator(value: Any) -> bool:
    """Whether ``value`` is an iterator of no class of the cell (the attributes of those are looked at), and no file."""
    if isinstance(value, (io.IOBase, nn.Module, type)) or not hasattr(type(value), "__next__"):
        return False
    return not is_users_own(value)


def is_array(value: Any) -> bool:
    """Whether ``value`` is a NumPy array of numbers that can be written to."""
    if not hasattr(type(value), "__array_interface__") or not hasattr(value, "flags"):
        return False
    return bool(value.flags.writeable) and value.dtype.kind in "biufc"


def is_dense(value: Any) -> bool:
    """Whether ``value`` is a tensor, and of no subclass, whose numbers can be compared and copied."""
    return type(value) is Tensor and value.layout is torch.strided and not (value.is_meta or value.is_quantized)


def equal_arrays(one: Any, other: Any) -> bool:
    """Whether two arrays, or two tensors, have the same shape and numbers."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())  # NaN


def is_number(value: Any) -> bool:
    """Whether ``value`` is a float or a NumPy number or array."""
    return isinstance(value, float) or hasattr(type(value), "__array_interface__")


def other_notes(some: dict[str, Any], others: dict[str, Any]) -> str | None:
    """The first location where the notes of two forwards differ."""
    for where in sorted(some.keys() | others.keys()):
        if where not in some or where not in others or not _alike(some[where], others[where]):
            return where
    return None


@torch.no_grad()
def _alike(one: Any, other: Any) -> bool:
    """Compare numbers, strings, tensors, NumPy arrays and containers of these; other objects count as equal."""
    one, other = _as_tensor(one), _as_tensor(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        some, others = dtensors.whole(one.detach()), dtensors.whole(other.detach())
        if some.shape != others.shape:
            return False
        if not some.is_floating_point() or not some.numel():
            return bool(torch.equal(some, others))
        room = _CLOSE * float(others.abs().nan_to_num(posinf=0.0).max())
        return torch.allclose(some, others.to(some.dtype), rtol=_CLOSE, atol=room, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (int, str, bytes)) or isinstance(other, (int, str, bytes)):
        return bool(type(one) is type(other) and one == other)
    return True


def _as_tensor(value: Any) -> Any:
    """Convert NumPy numbers and arrays to tensors."""
    if not hasattr(type(value), "__array_interface__"):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError):  # arrays of strings or objects
        return value
