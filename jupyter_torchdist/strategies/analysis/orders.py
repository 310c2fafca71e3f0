"""Samples in a sorted order: rows taken by the positions of a sorting, and put back by the inverse.

The order in which one device's samples come is not that of the ranks' one after the other, so rows that were sorted
serve only what is blind to their order, until what undoes the sorting has taken them back.
"""

from __future__ import annotations

import torch

from .lattice import Kind, MixesError, Positions, Rows, Same
from .rules import Call


def sorting(call: Call, tensor: torch.Tensor, kind: Rows) -> list[Kind] | None:
    """Values and positions of ``tensor.sort()``, one value a sample; None where it is another sorting."""
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
    """``inverse[positions] = arange(n)``, or ``positions.argsort()``: what undoes a sorting; None for anything else."""
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
    """``rows[positions]`` of a sorting, or of what undoes it. Raises ``MixesError`` where they are of other rows."""
    before, order = kind.owners, positions.owners.order
    fits = index.dim() == 1 and before.order == (order if positions.undoes else None) and before.selection is None
    if not fits or not torch.equal(before.vector[index.cpu()], positions.owners.vector):
        raise MixesError("takes samples in the sorted order of other samples")
    return Rows(kind.dim, before.but(vector=positions.owners.vector, order=None if positions.undoes else order))
