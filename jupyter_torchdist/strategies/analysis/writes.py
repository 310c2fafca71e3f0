"""In-place writes: a write to one view changes all tensors on the same storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.parameter_writes import address
from .lattice import Fact, Kind, Noise, Rows, Same, Total, Unknown, uniform

_LOST = Unknown("in-place", "writes the batch into part of a tensor in a way that could not be followed", None)


@dataclass(frozen=True)
class _Entry:
    """The last write to a storage. ``pin`` prevents that its address is reused."""

    pin: StorageWeakRef
    size: torch.Size
    stride: tuple[int, ...]
    fact: Fact


def flat_value(tensor: torch.Tensor) -> float | None:
    """The common value of all elements; None if they differ."""
    if not tensor.numel():
        return 0.0
    values = tensor.detach().reshape(-1)
    return float(values[0]) if bool((values == values[0]).all()) else None


class Writes:
    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def seen_through(self, tensor: torch.Tensor, fact: Fact) -> Fact:
        """``fact`` of ``tensor``, or the fact of a later write to its storage."""
        if not self._entries or (entry := self._entries.get(address(tensor))) is None or entry.fact.time <= fact.time:
            return fact
        return entry.fact.of_kind(_mapped(entry, tensor, fact.kind))

    def record(self, tensor: torch.Tensor, before: Fact, fact: Fact, base: torch.Tensor | None, *, alone: bool) -> Fact:
        """Note that ``tensor`` was written to, and return its new fact.

        ``base``: a copy of its base before the write, if the base did not depend on the batch. ``alone``: the base is
        not used any more.
        """
        storage = tensor.untyped_storage()
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        if not (whole or alone) and not _joins(tensor, before.kind, fact.kind, base):
            fact = fact.of_kind(_LOST)
        if not isinstance(fact.kind, Same) or storage._cdata in self._entries:
            self._entries[storage._cdata] = _Entry(StorageWeakRef(storage), tensor.size(), tensor.stride(), fact)
        return fact


def _joins(tensor: torch.Tensor, before: Kind, after: Kind, base: torch.Tensor | None) -> bool:
    """Whether the unwritten parts of a storage fit the new kind, too."""
    if isinstance(before, Rows) and isinstance(after, Rows):
        return before.dim == after.dim and before.owners.agrees(after.owners)
    if isinstance(before, Total) and isinstance(after, Total):
        return before.den == after.den
    if isinstance(before, Same | Noise):
        if isinstance(after, Rows):
            return base is not None and _even(tensor, after, base)
        if isinstance(after, Total):
            return base is not None and (after.den is not None or flat_value(base) == 0)
        return True
    return isinstance(after, type(before))


def _even(tensor: torch.Tensor, rows: Rows, base: torch.Tensor) -> bool:
    """Whether ``base``, of which ``tensor`` is a view, had equal values for all samples."""
    wanted = (tensor.size(rows.dim), tensor.stride(rows.dim))
    places = [dim for dim in range(base.dim()) if (base.size(dim), base.stride(dim)) == wanted]
    return len(places) == 1 and uniform(base, places[0], rows.owners)


def _mapped(entry: _Entry, tensor: torch.Tensor, before: Kind) -> Kind:
    kind = entry.fact.kind
    if not isinstance(kind, Rows):
        return kind
    wanted = (entry.size[kind.dim], entry.stride[kind.dim])
    places = [dim for dim in range(tensor.dim()) if (tensor.size(dim), tensor.stride(dim)) == wanted]
    if isinstance(before, Rows) and before.dim in places:
        places = [before.dim]
    return Rows(places[0], kind.owners, kind.over) if len(places) == 1 else _LOST
