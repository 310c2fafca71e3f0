"""Samples in a sorted order: rows indexed with the positions of a sort, and put back with the inverse.

A sort of the global batch gives another order than the sorted slices of the ranks one after the other. So sorted
rows may only go to operations that do not depend on their order, until the inverse restores it.
"""

from __future__ import annotations

import torch

from .lattice import Kind, MixesError, Positions, Rows, Same
from .rules import Call


def sorting(call: Call, tensor: torch.Tensor, kind: Rows) -> list[Kind] | None:
    """Kinds of the values and positions of ``tensor.sort()`` with one value per sample; None for other sorts."""
    owners = kind.owners
    if call.name != "sort" or tensor.dim() != 1 or owners.selection is not None or owners.order is not None:
        return None
    _, positions = call.out
    vector = owners.vector[positions.cpu()]
    ordered = owners.but(
        vector=vector, order=call.follower.number_of("sort", *map(call.follower.number, call.arguments.values()))
    )
    return [Rows(0, ordered), Positions(0, ordered)]


def undoing(call: Call) -> Positions | None:
    """The inverse of a sort: ``inverse[positions] = arange(n)`` or ``positions.argsort()``; None for anything else."""
    positions = call["self"] if call.name == "sort" else call["index"]
    kind = call.kind(positions)
    if not isinstance(kind, Positions) or kind.undoes or kind.owners.order is None or positions.dim() != 1:
        return None
    if call.name == "sort":
        if call.get("descending"):
            return None
    else:
        source = call["src"]
        counting = torch.arange(len(kind.owners))
        if not isinstance(call.kind(source), Same) or not torch.equal(source.cpu(), counting):
            return None
    vector = torch.empty_like(kind.owners.vector)
    vector[positions.cpu()] = kind.owners.vector
    return Positions(0, kind.owners.but(vector=vector), undoes=True)


def taken(call: Call, kind: Rows, index: torch.Tensor, positions: Positions) -> Rows:
    """``rows[positions]`` for a sort or its inverse. Raises ``MixesError`` if the positions belong to other rows."""
    before, order = kind.owners, positions.owners.order
    fits = index.dim() == 1 and before.order == (order if positions.undoes else None) and before.selection is None
    if not fits or not torch.equal(before.vector[index.cpu()], positions.owners.vector):
        raise MixesError("takes samples in the sorted order of other samples")
    return Rows(kind.dim, before.but(vector=positions.owners.vector, order=None if positions.undoes else order))
