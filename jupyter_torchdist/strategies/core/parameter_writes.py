"""Parameters that a forward writes: ``weight.data = …``, ``weight *= mask``, averages, ``nn.Embedding(max_norm=…)``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...torch_private.places import TorchDispatchMode
from .dtensors import local


@dataclass(frozen=True, eq=False)
class _Place:
    """A parameter of a module: its full name, where it is, and its memory before the forward."""

    name: str
    module: nn.Module
    own: str
    parameter: nn.Parameter
    memory: Tensor


class ParameterWrites(TorchDispatchMode):
    """While it is active, it keeps the values of parameters that are about to be written. ``undo`` restores them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = [
            _Place(f"{path}.{own}" if path else own, part, own, parameter, local(parameter).data)
            for path, part in module.named_modules()
            for own, parameter in part._parameters.items()
            if parameter is not None
        ]
        self._at: dict[int, list[_Place]] = {}
        for place in self._places:
            if (where := address(place.memory)) >= 0:
                self._at.setdefault(where, []).append(place)
        self._before: dict[_Place, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: see ``BatchwiseTracker``."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _about_to_be_written(func, args, kwargs or {}):
            for place in self._at.get(address(local(tensor)), ()):
                if place not in self._before:
                    self._before[place] = place.memory.clone()
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> set[str]:
        """The parameters that were written, or may have been."""
        return {place.name for place in self._places if place in self._before or self._moved(place)}

    @property
    def bound(self) -> set[str]:
        """The names to which another parameter was bound."""
        return {place.name for place in self._places if _is_another(self._now(place), place.parameter)}

    def current(self) -> dict[str, Tensor]:
        """The parameters of ``names``."""
        names = self.names
        return {
            place.name: now for place in self._places if place.name in names and (now := self._now(place)) is not None
        }

    @torch.no_grad()
    def changes(self) -> dict[str, Tensor]:
        """By how much the parameters of ``names`` have changed."""
        found = {}
        for name, now in self.current().items():
            place = next(one for one in self._places if one.name == name)
            before, after = self._before.get(place, place.memory), local(now).detach()
            found[name] = after - before if after.shape == before.shape else after.clone()
        return found

    @torch.no_grad()
    def undo(self) -> bool:
        """Restore parameters, their memory and their values. Returns whether values were written."""
        for place in self._places:
            if _is_another(self._now(place), place.parameter):
                place.module._parameters[place.own] = place.parameter
            if address(local(place.parameter)) != address(place.memory):
                place.parameter.data = place.memory
        for place, values in self._before.items():
            place.memory.copy_(values)
        written = bool(self._before)
        self._before.clear()
        return written

    def _moved(self, place: _Place) -> bool:
        now = self._now(place)
        if now is place.parameter:
            return address(local(now)) != address(place.memory)
        return _is_another(now, place.parameter)

    def _now(self, place: _Place) -> nn.Parameter | None:
        return place.module._parameters.get(place.own)


def _is_another(now: nn.Parameter | None, before: nn.Parameter) -> bool:
    """Whether the forward has bound another parameter. fsdp binds gathered ones in place of its shards."""
    return now is not before and not isinstance(now, DTensor) and not isinstance(before, DTensor)


def address(tensor: Tensor) -> int:
    """An identity of the memory of ``tensor``; -1 for a tensor without one (a sparse one)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -1


def _about_to_be_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation changes in place."""
    for place, name in _written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Tensor):
                yield one


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        (place, one.name)
        for place, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
