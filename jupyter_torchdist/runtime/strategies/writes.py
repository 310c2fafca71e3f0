"""In-place writes: what one view was given, all tensors of its storage have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .lattice import Fact, Kind, Noise, Rows, Same, Total, Unknown

_LOST = Unknown("in-place", "writes the batch into part of a tensor in a way that could not be followed", None)


@dataclass(frozen=True)
class _Entry:
    """The last write to a storage. ``pin`` keeps its address from being used again."""

    pin: StorageWeakRef
    size: torch.Size
    stride: tuple[int, ...]
    fact: Fact


def flat_value(tensor: torch.Tensor) -> float | None:
    """The one value that all elements have; None where they differ."""
    if not tensor.numel():
        return 0.0
    values = tensor.detach().reshape(-1)
    return float(values[0]) if bool((values == values[0]).all()) else None


class Writes:
    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def seen_through(self, tensor: torch.Tensor, fact: Fact) -> Fact:
        """``fact`` of ``tensor``, unless its storage was written to since."""
        if not self._entries or (entry := self._entries.get(_address(tensor))) is None or entry.fact.time <= fact.time:
            return fact
        return entry.fact.of_kind(_mapped(entry, tensor, fact.kind))

    def record(self, tensor: torch.Tensor, before: Fact, fact: Fact, flat: float | None) -> Fact:
        """Note that ``tensor`` was written to; what it is from now on.

        ``flat``: the one value of the whole base beforehand, where it knew nothing of the batch.
        """
        storage = tensor.untyped_storage()
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        if not whole and not _joins(before.kind, fact.kind, flat):
            fact = fact.of_kind(_LOST)
        if not isinstance(fact.kind, Same) or storage._cdata in self._entries:
            self._entries[storage._cdata] = _Entry(StorageWeakRef(storage), tensor.size(), tensor.stride(), fact)
        return fact


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse
        return -1


def _joins(before: Kind, after: Kind, flat: float | None) -> bool:
    """Whether the parts of a storage that were not written fit what was."""
    if isinstance(before, Rows) and isinstance(after, Rows):
        return before.dim == after.dim and before.owners.agrees(after.owners)
    if isinstance(before, Total) and isinstance(after, Total):
        return before.den == after.den
    if isinstance(before, Same | Noise):
        if isinstance(after, Rows):
            return flat is not None
        if isinstance(after, Total):
            return flat == 0 or (after.den is not None and flat is not None)
        return True
    return isinstance(after, type(before))


def _mapped(entry: _Entry, tensor: torch.Tensor, before: Kind) -> Kind:
    kind = entry.fact.kind
    if not isinstance(kind, Rows):
        return kind
    wanted = (entry.size[kind.dim], entry.stride[kind.dim])
    places = [dim for dim in range(tensor.dim()) if (tensor.size(dim), tensor.stride(dim)) == wanted]
    if isinstance(before, Rows) and before.dim in places:
        places = [before.dim]
    return Rows(places[0], kind.owners, kind.over) if len(places) == 1 else _LOST
