"""Tensors of the cell that share memory with parameters: ``w = p.data``, a kept ``state_dict()``, a vector of weights.

Sharding gives a parameter other memory. From then on such a tensor is an ``Alias``: before each operation it gets the
parameter's current values, and what an operation writes to it is written to the shards. All ranks do this at the same
time, because all of them run the cell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ...torch_private.tensors import storage_references
from ..core.agreement import of_every_rank
from ..core.dtensors import fill, whole
from ..core.holders import all_of
from ..core.scatter import tensors_in

_OURS = 1
"""References to the memory of a parameter beside its tensors: of the object with which it is looked at."""


class Alias(Tensor):
    """A tensor of the cell in ``torchdist_memory``, which was the memory of parameters that are sharded now."""

    torchdist_memory: Memory

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: list[Any] = [one for one in tensors_in((args, kwargs or {})) if isinstance(one, Alias)]
        memories = {id(one): (one, one.torchdist_memory) for one in given}
        for one in given:
            one.__class__ = Tensor
        try:
            if function.__name__ != "__get__":  # a property, such as the shape
                for memory in dict.fromkeys(memory for _, memory in memories.values()):
                    memory.refresh()
            versions = [one._version for one in given]
            made = function(*args, **(kwargs or {}))
            for one, version in zip(given, versions, strict=True):
                if one._version != version:
                    memories[id(one)][1].write()
            for one in tensors_in(made):
                for _, memory in memories.values():
                    memory.take(one)
        finally:
            for one, memory in memories.values():
                memory.take(one)
        return made


class Memory:
    """Memory that the cell's tensors share with ``parameters``, which are about to be sharded."""

    def __init__(self, parameters: Iterable[nn.Parameter], living: Iterable[Tensor] = ()) -> None:
        """``living``: tensors that may be in this memory."""
        self._own = {parameter: parameter.data for parameter in parameters}
        self._places: list[tuple[DTensor, Tensor]] = []
        """Shards, with the places of the whole parameters in this memory."""
        self._versions: dict[int, int] = {}
        self.tensors = [one for one in living if self._has(one)]
        """The tensors in this memory that are no parameters, until these are sharded."""

    def follow(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Parameters have been replaced by shards."""
        for parameter, view in self._own.items():
            shard: Any = replaced.get(parameter)
            if isinstance(shard, DTensor):
                self._places.append((shard, view))
        for one in self.tensors if self._places else ():
            self.take(one)
        self.tensors.clear()

    def take(self, tensor: Tensor) -> None:
        """Make a tensor an alias, if it is in this memory."""
        if type(tensor) is Tensor and self._has(tensor):
            tensor.__class__ = Alias
            tensor.torchdist_memory = self  # type: ignore[attr-defined]

    @torch.no_grad()
    def refresh(self, *, always: bool = False) -> None:
        """Fill this memory with the current values of the parameters. All ranks must call it."""
        for shard, view in self._places:
            if always or self._versions.get(id(shard)) != _version(shard):
                view.copy_(whole(shard))
                self._versions[id(shard)] = _version(shard)

    def write(self) -> None:
        """Copy the values in this memory to the shards."""
        for shard, view in self._places:
            fill(shard, view)
            increment_version(shard)
            self._versions[id(shard)] = _version(shard)

    def give_back(self) -> None:
        """The parameters are whole again, on rank 0: they get this memory, which has the same values."""
        for parameter, view in self._own.items():
            if parameter.device == view.device and parameter.shape == view.shape:
                parameter.data = view

    def _has(self, tensor: Tensor) -> bool:
        if tensor.requires_grad or (address := _address(tensor)) is None:
            return False
        start, stop = _range(tensor)
        return any(
            address == _address(view) and first < stop and start < last
            for view in self._own.values()
            for first, last in [_range(view)]
        )


def shared_with(parameters: Iterable[nn.Parameter]) -> list[Memory]:
    """The memory that tensors of the cell share with ``parameters``, before these are sharded.

    All ranks must call it, and get as many.
    """
    at: dict[int, list[int]] = {}
    listed = list(dict.fromkeys(parameters))
    for place, one in enumerate(listed):
        if (address := _address(one)) is not None:
            at.setdefault(address, []).append(place)
    shared = [places for places in at.values() if storage_references(listed[places[0]]) > _OURS + len(places)]
    living = _living() if shared else {}
    memories = {places: _memory(listed, places, living) for places in map(tuple, shared)}
    found = [places for places, memory in memories.items() if memory.tensors]
    known = of_every_rank(None if any(one.is_meta for one in listed) else found)
    if any(each is None for each in known):
        return []
    together = sorted({one for each in known for one in each or ()})
    return [memories.get(places) or _memory(listed, places, living) for places in together]


def _living() -> dict[int, list[Tensor]]:
    """The plain tensors of this process, by the beginning of their memory."""
    found: dict[int, list[Tensor]] = {}
    for one in all_of(Tensor):
        if type(one) is Tensor and (address := _address(one)) is not None:
            found.setdefault(address, []).append(one)
    return found


def _memory(parameters: Sequence[nn.Parameter], places: Iterable[int], living: Mapping[int, list[Tensor]]) -> Memory:
    own = [parameters[place] for place in places]
    return Memory(own, living.get(_address(own[0]) or 0, ()))


def names_of(tensors: Iterable[Tensor]) -> list[str]:
    """The cell's names of ``tensors``."""
    wanted = set(map(id, tensors))
    return [name for name, value in vars(sys.modules["__main__"]).items() if id(value) in wanted and name[0] != "_"]


def let_go() -> None:
    """Aliases are plain tensors again."""
    for one in all_of(Alias):
        one.__class__ = Tensor  # type: ignore[assignment]
        del one.torchdist_memory


def _address(tensor: Tensor) -> int | None:
    """Where the memory of ``tensor`` begins; None if it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor within a transform of torch.func
        return None


def _range(tensor: Tensor) -> tuple[int, int]:
    """Where the elements of ``tensor`` begin and end in its memory, in bytes."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    last = sum((many - 1) * step for many, step in zip(tensor.shape, tensor.stride(), strict=True))
    return size * start, size * (start + last + 1)


def _version(shard: DTensor) -> int:
    return shard._version + shard._local_tensor._version
