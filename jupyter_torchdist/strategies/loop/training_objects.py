"""The objects of a cell that belong to the state of its training, each under a name.

The names are the same on every rank and in a later run of the cell: objects are found in the order in which they were
built, and the search is at the same points of the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from ...checkpoint.objects import kind_of
from ..core.patches import Patches

_SCHEDULERS = (
    lr_scheduler.LRScheduler,
    lr_scheduler.ReduceLROnPlateau,
    lr_scheduler.SequentialLR,
    lr_scheduler.ChainedScheduler,
)
"""Classes of schedulers that do not call the ``__init__`` of one another."""

_ROOM = 1000
_LABELS = {torch.amp.GradScaler: "scaler"}
_KEPT = ("model", "optimizer", "scheduler", "generator", "stateful")


class TrainingObjects:
    """Models, optimizers, schedulers, scalers, generators and loaders of a cell.

    They have the names that the cell gives them at its top level. Objects without such a name (local variables of a
    function) are numbered in the order in which they were built: ``model``, ``model_1``.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        optimizers: Iterable[torch.optim.Optimizer],
        copies: Callable[[], Iterable[nn.Module]],
    ) -> None:
        """``copies``: modules made by ``copy.deepcopy``, which does not call ``__init__``."""
        self._namespace, self._optimizers, self._copies = namespace, optimizers, copies
        self._modules: list[weakref.ref[nn.Module]] = []
        self._room = _ROOM
        self._others: list[weakref.ref[Any]] = []
        self._names: dict[str, weakref.ref[Any]] = {}
        self._loaders: weakref.WeakKeyDictionary[DataLoader[Any], str] = weakref.WeakKeyDictionary()
        self._places: dict[tuple[CodeType, int], str] = {}

    def watch(self, patches: Patches) -> None:
        """Record the objects that are built from now on."""
        for kind in (*_SCHEDULERS, torch.amp.GradScaler):
            patches.around(kind, "__init__", self._build_other)
        patches.around(nn.Module, "__init__", self._build_module)

    def _build_module(self, original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        if len(self._modules) >= self._room:  # for example losses that are built in each step
            self._modules = [known for known in self._modules if known() is not None]
            self._room = 2 * len(self._modules) + _ROOM
        self._modules.append(weakref.ref(module))

    def _build_other(self, original: Callable[..., None], thing: Any, *args: Any, **kwargs: Any) -> None:
        original(thing, *args, **kwargs)
        self._others.append(weakref.ref(thing))

    def objects(self) -> dict[str, Any]:
        """All objects with a state, except loaders, by name. An object keeps its name."""
        found = [*self._top_modules(), *self._optimizers, *_living(self._others), *self._in_namespace(_KEPT[2:])]
        for thing in found:
            if not any(known() is thing for known in self._names.values()):
                self._names[self._name_for(thing)] = weakref.ref(thing)
        self._names = {name: known for name, known in self._names.items() if known() is not None}
        return {name: known() for name, known in self._names.items()}

    def name_of_loader(self, loader: DataLoader[Any], frame: FrameType) -> str:
        """The name of a loader. One that is built in the loop's own line for each epoch keeps the same name."""
        if loader not in self._loaders:
            place = (frame.f_code, frame.f_lasti)
            name = self._called(loader) or self._places.get(place) or _numbered("loader", self._taken())
            if name not in self._namespace:
                self._places[place] = name
            self._loaders[loader] = name
        return self._loaders[loader]

    def _top_modules(self) -> list[nn.Module]:
        """Modules with a state that are not a part of another module."""
        top: dict[int, nn.Module] = {}
        within: set[int] = set()
        for module in (*self._in_namespace(("model",)), *_living(self._modules), *self._copies()):
            if id(module) in within or not _has_state(module):
                continue
            parts = {id(part) for part in module.modules()}
            top = {number: one for number, one in top.items() if number not in parts}
            top[id(module)] = module
            within |= parts
        return list(top.values())

    def _in_namespace(self, kinds: tuple[str, ...]) -> Iterator[Any]:
        for name, value in sorted(self._namespace.items()):
            if not name.startswith("_") and not isinstance(value, type) and kind_of(value) in kinds:
                yield value

    def _name_for(self, thing: Any) -> str:
        label = next((label for kind, label in _LABELS.items() if isinstance(thing, kind)), kind_of(thing))
        called = self._called(thing)
        return called if called is not None and called not in self._names else _numbered(label, self._taken())

    def _taken(self) -> set[str]:
        return {*self._names, *self._places.values(), *self._loaders.values(), *self._namespace, *_RESERVED}

    def _called(self, thing: Any) -> str | None:
        names = (name for name, value in self._namespace.items() if value is thing)
        return min((name for name in names if not name.startswith("_") and name not in _RESERVED), default=None)


_RESERVED = ("random", "variables", "seed", "tensors")
"""Names of other data in a checkpoint."""


def _living(known: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [thing for one in known if (thing := one()) is not None]


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _numbered(label: str, taken: set[str]) -> str:
    name, count = label, 0
    while name in taken:
        count += 1
        name = f"{label}_{count}"
    return name
