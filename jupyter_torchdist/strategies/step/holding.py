"""What holds tensors of a batch: attributes of a model, and lists and dicts of the cell that its forward fills.

The cell has put them there, or a forward. Names of places are those of ``core/side_effects.py``.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from ..core.agreement import of_every_rank
from ..core.ownership import own_class
from ..core.scatter import tensors_in
from ..core.side_effects import is_number, joined, named_globals, referred

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
            for name, value in named_globals(function):
                self._walk(name, value)
                if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                    for kept, one in named_globals(value.backward):
                        self._walk(kept, one)

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

    def numbers(self) -> Iterator[tuple[str, float]]:
        """The numbers there, and the sums of arrays, each with its place."""
        for path, _, values in self._attributes:
            for name, value in values.items():
                if name not in _OF_MODULES:
                    yield from ((joined(path, name), one) for one in _numbers(value))
        for where, container, _ in self._containers:
            for value in container.values() if isinstance(container, dict) else container:
                yield from ((where, one) for one in _numbers(value))


def differing(modules: Iterable[nn.Module], counts: Collection[str], group: dist.ProcessGroup) -> list[str]:
    """Where forwards have left numbers of a rank's own samples: ``counts``, and where they differ between the ranks.

    A collective call.
    """
    numbers: dict[str, list[float]] = {}
    for module in modules:
        for where, number in Held(module).numbers():
            numbers.setdefault(where, []).append(number)
    sums = {where: (len(some), sum(some), where in counts) for where, some in numbers.items()}
    of_first, *others = of_every_rank(sums, group)
    places = dict.fromkeys([*of_first, *(where for one in others for where in one)])
    return [where for where in places if any(_differ(of_first.get(where), one.get(where)) for one in others)]


def _differ(one: tuple[int, float, bool] | None, other: tuple[int, float, bool] | None) -> bool:
    if one is None or other is None or one[0] != other[0] or one[2] or other[2]:
        return True
    return not math.isclose(one[1], other[1], rel_tol=1e-3, abs_tol=1e-9) and not math.isnan(one[1] + other[1])


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _numbers(one)
    elif is_number(value) and value.dtype.kind in "biuf":
        yield float(value.sum())


def _has(value: Any, samples: int) -> bool:
    return any(samples in tensor.shape for tensor in tensors_in(value))


def _new(container: Container, before: Any) -> Iterable[Any]:
    if isinstance(container, dict):
        return [one for key, one in container.items() if before.get(key) is not one]
    return itertools.islice(container, before, None)
