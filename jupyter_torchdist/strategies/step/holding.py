"""What holds tensors of a batch: attributes of a model, and lists and dicts of the cell that its forward fills.

The cell has put them there, or a forward. Names of places are those of ``core/side_effects.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...usercode.frames import is_users
from ..core.ownership import own_class
from ..core.scatter import tensors_in
from ..core.side_effects import joined, referred

_FEW = 64
"""How many entries of a container are searched for further containers."""
_MANY = 1000
"""Longer dicts are not watched, and no more containers than so many: it is done at every forward."""
_OF_MODULES = frozenset(vars(nn.Module()))

Container = list[Any] | dict[Any, Any] | deque[Any]
_CONTAINERS = (list, dict, deque)


@dataclass(frozen=True)
class Parts:
    """Modules by their path. ``users``: those of other classes than torch's; ``forwards``: of their classes."""

    all: Sequence[tuple[str, nn.Module]]
    users: Sequence[tuple[str, nn.Module]]
    forwards: Sequence[Callable[..., Any]]


_known: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()


def _parts(module: nn.Module) -> Parts:
    """The parts of ``module``, without itself."""
    parts = _known.get(module)
    if parts is None:  # asked at every forward: a large model has hundreds of layers
        inner = [(path, part) for path, part in module.named_modules() if part is not module]
        users = [one for one in inner if not own_class(one[1]).__module__.startswith("torch.")]
        kinds = dict.fromkeys(own_class(part) for part in (module, *(part for _, part in users)))
        parts = _known[module] = Parts(inner, users, [kind.forward for kind in kinds])
    return parts


def holding(module: nn.Module, samples: int) -> tuple[str, ...]:
    """The names of attributes with tensors of so many ``samples``."""
    return tuple(
        joined(path, name)
        for path, part in (("", module), *_parts(module).users)
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and samples in value.shape
    )


class Held:
    """What the attributes of ``module`` and the containers that its forward reaches hold, before a forward."""

    def __init__(self, module: nn.Module) -> None:
        parts = _parts(module)
        self._attributes = [(path, part, dict(vars(part))) for path, part in (("", module), *parts.users)]
        self._seen: set[int] = set()
        self._containers: list[tuple[str, Container, Any]] = []
        for path, _, values in self._attributes:
            for name, value in values.items():
                if name not in _OF_MODULES and isinstance(value, _CONTAINERS):
                    self._walk(joined(path, name), value)
        hooks: list[Callable[..., Any]] = []
        for path, part in (("", module), *parts.all):
            if part._forward_hooks:
                hooks += part._forward_hooks.values()
                for hook in part._forward_hooks.values():
                    self._walk(f"a hook of {path or type(part).__name__}", hook)
        for function in (*parts.forwards, *hooks):
            for name, value in _globals(function):
                self._walk(name, value)

    def _walk(self, where: str, value: Any) -> None:
        waiting = [value]
        while waiting and len(self._seen) < _MANY:
            one = waiting.pop()
            if id(one) in self._seen or isinstance(one, (torch.Tensor, str, int, float)):
                continue
            inner = one.values() if isinstance(one, dict) else one if isinstance(one, _CONTAINERS) else referred(one)
            if inner is None or (isinstance(one, dict) and len(one) > _MANY):
                continue
            self._seen.add(id(one))
            if isinstance(one, _CONTAINERS):
                self._containers.append((where, one, dict(one) if isinstance(one, dict) else len(one)))
            waiting += itertools.islice(inner, _FEW)

    def unseen(self, known: Collection[str], samples: int) -> str | None:
        """A place that is not ``known``, and that has got a tensor of so many ``samples`` since."""
        for path, part, values in self._attributes:
            for name, value in vars(part).items():
                if value is not values.get(name) and _has(value, samples):
                    where = joined(path, name)
                    if where not in known:
                        return where
        for where, container, before in self._containers:
            if where not in known and any(_has(one, samples) for one in _new(container, before)):
                return where
        return None


def _has(value: Any, samples: int) -> bool:
    return any(samples in tensor.shape for tensor in tensors_in(value))


def _new(container: Container, before: Any) -> Iterable[Any]:
    if isinstance(container, dict):
        return [one for key, one in container.items() if before.get(key) is not one]
    return itertools.islice(container, before, None)


def _globals(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function of the cell names."""
    if isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType) and is_users(function.__code__.co_filename):
        for name in function.__code__.co_names:
            yield name, function.__globals__.get(name)
