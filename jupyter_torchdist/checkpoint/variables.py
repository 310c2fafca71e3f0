"""Saves variables that a cell's loop changes: a list of losses, the best accuracy, averaged weights in a dictionary."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

_LIMIT = 1 << 20
"""Largest size in bytes of a saved value without tensors (pickled)."""

_TENSORS = 10_000
"""Largest number of tensors in a saved value; a value with more tensors is data."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class Variables:
    """The variables of a namespace that are numbers, strings, tensors, or lists, tuples, sets, dictionaries of these.

    A value that did not change since this object was created belongs to the cell's source, not to its state. So a
    learning rate or number of epochs that was edited before the cell was resumed is not overwritten. Tensors are saved
    only for names that existed at creation. Other tensors belong to a step (its batch, its loss).
    """

    def __init__(self, namespace: MutableMapping[str, Any]) -> None:
        self._namespace = namespace
        self._there = set(namespace)
        self._before = self._frozen()
        self._marks = {name: list(_marks(value)) for name, value in self._with_tensors()}

    def changed(self) -> dict[str, Any]:
        """Names and values that changed since creation, without tensors."""
        frozen = self._frozen()
        return {name: pickle.loads(data) for name, data in frozen.items() if self._before.get(name) != data}

    def changed_tensors(self) -> dict[str, Any]:
        """Names and values with tensors that changed since creation. Equal on all ranks; nothing is copied."""
        return {name: value for name, value in self._with_tensors() if self._marks.get(name) != list(_marks(value))}

    def restore(self, values: dict[str, Any]) -> None:
        """Set variables. Lists, dictionaries, sets and tensors are filled in place, so that other references see it."""
        for name, value in values.items():
            self._namespace[name] = _filled(self._namespace.get(name), value)

    def _frozen(self) -> dict[str, bytes]:
        return {
            name: data
            for name, value in list(self._namespace.items())
            if not name.startswith("_") and _is_plain(value) and len(data := pickle.dumps(value)) <= _LIMIT
        }

    def _with_tensors(self) -> Iterator[tuple[str, Any]]:
        for name, value in list(self._namespace.items()):
            if name in self._there and not name.startswith("_") and _is_plain(value, tensors=True):
                count = len(_tensors(value))
                if 0 < count <= _TENSORS:
                    yield name, value


class _Mark:
    """A tensor and its version, which in-place changes increase. The reference is weak: the tensor may be large."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Mark) or self.version != other.version:
            return False
        tensor = self.tensor()
        return tensor is not None and tensor is other.tensor()

    __hash__ = None  # type: ignore[assignment]


def _marks(value: Any) -> Iterator[Any]:
    """Items that show whether a value has changed: marks of its tensors, and all other items themselves."""
    if isinstance(value, torch.Tensor):
        yield _Mark(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _marks(item)
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for item in value:
            yield from _marks(item)
    else:
        yield value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [tensor for mark in _marks(value) if isinstance(mark, _Mark) and (tensor := mark.tensor()) is not None]


def _filled(there: Any, value: Any) -> Any:
    """``value``, written into the existing object ``there`` if possible."""
    if type(there) is not type(value) and not (isinstance(there, DTensor) and isinstance(value, torch.Tensor)):
        return value
    if isinstance(there, torch.Tensor):
        return _filled_tensor(there, value)
    if isinstance(there, list):
        there[:] = [_filled(old, new) for old, new in zip(there, value, strict=False)] + value[len(there) :]
    elif isinstance(there, dict):
        items = {key: _filled(there.get(key), item) for key, item in value.items()}
        there.clear()
        there.update(items)
    elif isinstance(there, set):
        there.clear()
        there.update(value)
    else:
        return value
    return there


def _filled_tensor(there: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if there.shape != value.shape or there.dtype != value.dtype:
        return value
    if isinstance(there, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value.to(there.device), there.device_mesh, there.placements, src_data_rank=None)
    with torch.no_grad():
        there.copy_(value)
    return there


def _is_plain(value: Any, depth: int = 4, *, tensors: bool = False) -> bool:
    kind = type(value)
    if kind in _ATOMS:
        return True
    if isinstance(value, torch.Tensor):
        return tensors and not isinstance(value, nn.Parameter) and value.grad_fn is None
    if depth == 0:
        return False
    if kind in (list, tuple, set, frozenset):
        return all(_is_plain(item, depth - 1, tensors=tensors) for item in value)
    if kind is dict:
        return all(
            _is_plain(item, depth - 1, tensors=tensors) and _is_plain(key, depth - 1) for key, item in value.items()
        )
    return tensors and _is_state_dict(value, depth)


def _is_state_dict(value: Any, depth: int) -> bool:
    """Whether ``value`` is like ``model.state_dict()``: an ``OrderedDict`` with an attribute, of plain values."""
    return type(value).__name__ == "OrderedDict" and _is_plain(dict(value), depth, tensors=True)
