"""What the loading of samples may change beside them: generators, counters, caches, iterators.

They are those that a dataset, its transforms and a ``collate_fn`` refer to: with fewer samples they change less.
"""

from __future__ import annotations

import io
import itertools
import random
from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ..core.side_effects import Kept, equal_arrays, is_array, is_dense, named_globals, referred

_MOST, _FEW = 2000, 64
"""How many objects are looked at, and how many entries of each."""
_LONG = 1000
"""Of longer containers only the length is compared."""
_SMALL = 65_536
"""Larger tensors and arrays are taken to be data."""
_PLAIN = (int, float, complex, str, bytes, type(None), ModuleType, torch.dtype)
_SEQUENCES = (list, set, deque)
_NAMES = (type, FunctionType, MethodType, CellType, BuiltinFunctionType)


class _Globals(MutableMapping[str, Any]):
    """The globals that a function of the cell names."""

    def __init__(self, function: FunctionType) -> None:
        self._all, self._names = function.__globals__, [name for name, _ in named_globals(function)]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if name in self._all])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> Any:
        return self._all[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._all[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all[name]


@dataclass(frozen=True)
class Snapshot:
    """States, each with what has it, by its identity."""

    generators: dict[int, tuple[Any, Any]]
    others: dict[int, tuple[Any, Any]]
    iterates: bool
    """Whether there is an iterator, whose state nobody can see."""

    def other_numbers(self, later: Snapshot) -> bool:
        """Whether a generator has drawn."""
        return any(
            key in later.generators and not _same_numbers(state, later.generators[key][1])
            for key, (_, state) in self.generators.items()
        )

    def other_values(self, later: Snapshot) -> bool:
        """Whether a container, an attribute, an array or a global has changed."""
        return any(
            key in later.others and _differ(held, later.others[key][1]) for key, (_, held) in self.others.items()
        )

    def restore(self) -> None:
        for generator, state in self.generators.values():
            _set_state(generator, state)
        for owner, held in self.others.values():
            _give_back(owner, held)


class LoadingState:
    """The states of what ``roots`` refer to."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots

    def capture(self) -> Snapshot:
        generators: dict[int, tuple[Any, Any]] = {}
        others: dict[int, tuple[Any, Any]] = {}
        iterates = False
        for one, own in self._reached():
            if (state := state_of(one)) is not None:
                generators[id(one)] = one, state
            elif not own:
                continue
            elif isinstance(one, Iterator) and not isinstance(one, io.IOBase):
                iterates = True
            elif (owner := _owner(one)) is not None:
                others[id(one)] = owner, _copy(owner)
        return Snapshot(generators, others, iterates)

    def _reached(self) -> Iterator[tuple[Any, bool]]:
        """Each object, and whether it belongs to user code. In objects of libraries only generators are looked for."""
        waiting = [(one, True) for one in self._roots]
        seen: set[int] = set()
        while waiting and len(seen) < _MOST:
            one, own = waiting.pop()
            if id(one) in seen or isinstance(one, _PLAIN):
                continue
            seen.add(id(one))
            yield one, own
            if isinstance(one, dict):
                inner: Any = one.values()
            elif isinstance(one, (tuple, *_SEQUENCES)):
                inner = one
            elif (inner := referred(one)) is not None:
                inner = [*inner, *(_Globals(one).values() if isinstance(one, FunctionType) else ())]
                inner += [] if isinstance(one, _NAMES) else [type(one)]
            elif type(one).__dictoffset__ and not isinstance(one, _NAMES):  # hasattr may run code of the object
                own = own and isinstance(one, (nn.Module, Dataset))
                inner = [vars(one), type(one)]
            else:
                continue
            waiting += [(each, own) for each in itertools.islice(inner, _FEW)]


def _owner(one: Any) -> Any:
    """What holds the state of ``one``; None if it has none."""
    if isinstance(one, (type, CellType)):
        return Kept(one)
    if isinstance(one, FunctionType):
        return _Globals(one)
    if isinstance(one, torch.Tensor):
        return one if is_dense(one) and one.numel() <= _SMALL else None
    if is_array(one):
        return one if one.size <= _SMALL else None
    return one if isinstance(one, (dict, *_SEQUENCES)) else None


def _copy(owner: Any) -> Any:
    if isinstance(owner, MutableMapping):
        return dict(owner)
    if isinstance(owner, _SEQUENCES):
        return list(owner)
    return owner.detach().clone() if isinstance(owner, torch.Tensor) else owner.copy()


def _differ(one: Any, other: Any) -> bool:
    if not isinstance(one, (dict, list)):
        return not equal_arrays(one, other)
    if len(one) != len(other) or len(one) > _LONG:
        return len(one) != len(other)
    if isinstance(one, dict):
        return any(key not in other or _other(value, other[key]) for key, value in one.items())
    return any(map(_other, one, other))


def _other(one: Any, other: Any) -> bool:
    if one is other:
        return False
    return type(one) is not type(other) or not isinstance(one, _PLAIN) or bool(one != other)


def _give_back(owner: Any, held: Any) -> None:
    if not _differ(held, _copy(owner)):
        return
    if isinstance(owner, MutableMapping):
        for key in [key for key in owner if key not in held]:
            del owner[key]
        for key, value in held.items():
            if key not in owner or owner[key] is not value:
                owner[key] = value
    elif isinstance(owner, set):
        owner.clear()
        owner.update(held)
    elif isinstance(owner, (list, deque)):
        owner.clear()
        owner.extend(held)
    elif isinstance(owner, torch.Tensor):
        owner.data = held
    else:
        owner[...] = held


def state_of(value: Any) -> Any:
    """The state of a generator of torch, NumPy or Python; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if kind == "numpy.random._generator.Generator":
        return value.bit_generator.state
    return value.get_state() if kind == "numpy.random.mtrand.RandomState" else None


def _same_numbers(one: Any, other: Any) -> bool:
    """Whether two states of a generator are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return repr(one) == repr(other)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
