"""Reading and writing by index and mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

from .lattice import SAME, Kind, MixesError, Noise, NoRuleError, Owners, Positions, Rows, Same, Unknown
from .orders import taken, undoing
from .rules import RANDOM, Call, even_operand, merged, plain, refuse_totals, rule, wrapped


@rule("embedding")
def _embedding(call: Call) -> Kind:
    if isinstance(call.kind(call["weight"]), Rows):
        raise MixesError("looks samples up in a table that depends on the batch")
    refuse_totals(call.name, call.kind(call["weight"]), call.kind(call["indices"]))
    found = call.rows("indices")
    return SAME if found is None else Rows(found[1].dim, found[1].owners)


@rule("index_select")
def _index_select(call: Call) -> Kind:
    indices: list[torch.Tensor | None] = [None] * wrapped(call["dim"], call["self"].dim())
    return _picked(call, [*indices, call["index"]])


@rule("index", "_unsafe_index")
def _index(call: Call) -> Kind:
    indices = list(call["indices"])
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        if len(given) > 1:
            raise NoRuleError("uses a mask beside other indices")
        return _masked(call, call["self"], given[0], indices.index(given[0]) if indices[0] is None else 0)
    return _picked(call, indices)


@rule("masked_select")
def _masked_select(call: Call) -> Kind:
    tensor, mask = torch.broadcast_tensors(call["self"], call["mask"])
    kinds = (call.kind(call["self"]), call.kind(call["mask"]))
    rows = [
        (kind, part) for kind, part in zip(kinds, (call["self"], call["mask"]), strict=True) if isinstance(kind, Rows)
    ]
    refuse_totals(call.name, *kinds)
    places = {kind.dim + tensor.dim() - part.dim() for kind, part in rows}
    if len(places) > 1:
        raise MixesError("broadcasts samples against samples: compare the shapes")
    owners = merged(call, [plain(kind).owners for kind, _ in rows])
    return Rows(0, _chosen(call, owners, places.pop(), mask, call["mask"]))


def _masked(call: Call, tensor: torch.Tensor, mask: torch.Tensor, at: int) -> Kind:
    """``tensor[mask]`` with the mask at dimension ``at``."""
    kind, chooses = call.kind(tensor), call.kind(mask)
    refuse_totals(call.name, kind, chooses)
    covered = range(at, at + mask.dim())
    if isinstance(kind, Rows) and kind.dim not in covered:
        if isinstance(chooses, Rows):
            raise MixesError("chooses from every sample with a mask of other samples")
        return Rows(kind.dim if kind.dim < at else kind.dim - mask.dim() + 1, plain(kind).owners)
    rows = [(plain(one).owners, one.dim - start) for one, start in ((kind, at), (chooses, 0)) if isinstance(one, Rows)]
    if len({dim for _, dim in rows}) > 1:
        raise MixesError("chooses samples by a mask of another dimension")
    dim = rows[0][1]
    owners = merged(call, [one for one, _ in rows])
    if not isinstance(kind, Rows):
        even_operand(call, tensor, kind, at + dim, owners)
    return Rows(at, _chosen(call, owners, dim, mask, mask))


def _chosen(call: Call, owners: Owners, dim: int, mask: torch.Tensor, named: torch.Tensor) -> Owners:
    """The owners of the elements that a mask selects."""
    if not isinstance(call.kind(named), Rows):
        even_operand(call, mask, call.kind(named), dim, owners)
    shape = [-1 if index == dim else 1 for index in range(mask.dim())]
    vector = owners.vector.view(shape).expand(mask.shape)[mask.detach().bool().cpu()]
    return owners.but(vector=vector, selection=(owners.selection, call.follower.number(named)))


def _picked(call: Call, indices: Sequence[torch.Tensor | None]) -> Kind:
    """``tensor[indices]`` with integer indices."""
    kind = call.kind(call["self"])
    refuse_totals(call.name, kind)
    given = [(at, index) for at, index in enumerate(indices) if index is not None]
    if isinstance(kind, Same) and len(given) == 1 and _sorts(positions := call.kind(given[0][1])):
        even_operand(call, call["self"], kind, given[0][0], positions.owners)
        return kind  # initial states, equal for all samples
    shape = torch.broadcast_shapes(*(index.shape for _, index in given))
    places = [at for at, _ in given]
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    owners, dim = _index_rows(call, [index for _, index in given], len(shape))
    if not isinstance(kind, Rows):
        return SAME if owners is None else Rows(first + dim, owners)
    plain(kind)
    if len(given) == 1 and places == [kind.dim] and _sorts(positions := call.kind(given[0][1])):
        return taken(call, kind, given[0][1], positions)
    if any(isinstance(call.kind(index), Positions) for at, index in given if at != kind.dim):
        raise MixesError("picks by positions in the batch")
    if kind.dim not in places:
        if owners is not None:
            raise MixesError("picks from every sample with an index of other samples")
        before = sum(at not in places for at in range(kind.dim))
        return Rows(before if before < first else before + len(shape), kind.owners)
    chosen, dim = _owners_at(call, kind.owners, dict(given)[kind.dim], shape)
    if owners is not None and not chosen.agrees(owners):
        raise MixesError("picks from other samples of the batch")
    if owners is None or owners.selection is None:
        if not chosen.even or (owners is None and not call.follower.is_all_positions(dict(given)[kind.dim])):
            raise MixesError("takes samples by their position in the batch")
    else:
        chosen = owners
    for _, index in given:
        if index is not dict(given)[kind.dim] and not isinstance(call.kind(index), Rows | Positions):
            own = dim - len(shape) + index.dim()
            if own >= 0:
                even_operand(call, index, call.kind(index), own, chosen)
    return Rows(first + dim, chosen)


def _sorts(kind: Kind) -> TypeGuard[Positions]:
    return isinstance(kind, Positions) and kind.owners.order is not None


def _index_rows(call: Call, indices: Sequence[torch.Tensor], ndim: int) -> tuple[Owners | None, int]:
    """The owners of the indices themselves, and the dimension of their samples."""
    found = [(kind, index) for index in indices if isinstance(kind := call.kind(index), Rows | Positions)]
    refuse_totals(call.name, *map(call.kind, indices))
    if not found:
        return None, 0
    places = {kind.dim + ndim - index.dim() for kind, index in found}
    if len(places) > 1:
        raise MixesError("broadcasts samples against samples: compare the shapes")
    dim = places.pop()
    owners = merged(call, [(plain(kind) if isinstance(kind, Rows) else kind).owners for kind, _ in found])
    if not isinstance(call.kind(call["self"]), Rows):
        if any(isinstance(kind, Positions) for kind, _ in found):
            raise MixesError("picks by positions in the batch")
        for index in indices:
            own = dim - ndim + index.dim()
            if not isinstance(call.kind(index), Rows | Positions) and own >= 0:
                even_operand(call, index, call.kind(index), own, owners)
    return owners, dim


def _owners_at(call: Call, owners: Owners, index: torch.Tensor, shape: torch.Size) -> tuple[Owners, int]:
    """The owners of the rows that ``index`` takes, and the dimension of ``shape`` along which they change."""
    drawn = isinstance(call.kind(index), Noise)
    if drawn:
        call.notes.add(RANDOM)
    block = owners.vector[index.detach().cpu()].expand(shape)
    if not block.numel():
        return owners.with_vector(owners.vector[:0]), 0
    moving = [dim for dim in range(block.dim()) if bool((block != block.narrow(dim, 0, 1)).any())]
    if len(moving) != 1:
        raise MixesError("takes samples by their position in the batch")
    line = block.movedim(moving[0], 0).reshape(block.size(moving[0]), -1)[:, 0]
    return owners.but(vector=line.contiguous(), shuffled=owners.shuffled or drawn), moving[0]


@rule("gather", "scatter", "scatter_add", "scatter_reduce", "index_fill", "index_add", "index_copy")
def _along_dim(call: Call) -> Kind:
    """Works within each sample if ``dim`` is not the dimension of the samples."""
    at = wrapped(call["dim"], call["self"].dim())
    if call.name.removesuffix("_") == "scatter" and call.get("src") is not None and (found := undoing(call)):
        return found
    kinds = {id(tensor): call.kind(tensor) for tensor in call.tensors}
    refuse_totals(call.name, *kinds.values())
    rows = [plain(kind) for kind in kinds.values() if isinstance(kind, Rows)]
    if len({kind.dim for kind in rows}) > 1 or rows[0].dim == at:
        raise MixesError("picks along the batch")
    dim = rows[0].dim
    if call.name.startswith("index_") and isinstance(call.kind(call["index"]), Rows):
        raise MixesError("writes at an index of other samples")
    owners = merged(call, [kind.owners for kind in rows])
    for tensor in call.tensors:
        if tensor.dim() == call["self"].dim():
            if tensor.size(dim) != len(owners):
                raise MixesError("takes samples by their position in the batch")
            if not isinstance(call.kind(tensor), Rows):
                even_operand(call, tensor, call.kind(tensor), dim, owners)
    return Rows(dim, owners)


@rule("nonzero")
def _nonzero(call: Call) -> Kind:
    found = call.rows()
    if found is None:
        raise NoRuleError
    mask, kind = found
    owners = _chosen(call, kind.owners, kind.dim, mask != 0, mask)
    return Positions(0, owners) if kind.dim == 0 else Unknown(call.name, "has its samples in another dimension", None)


@rule("index_put")
def _index_put(call: Call) -> Kind:
    """A value written at a mask of the samples."""
    given = [index for index in call["indices"] if index is not None]
    target, value = call["self"], call["values"]
    kind = call.kind(target)
    refuse_totals(call.name, kind, call.kind(value))
    mask = given[0]
    chooses = call.kind(mask)
    if len(given) > 1 or call["indices"][0] is None or mask.dtype != torch.bool or not isinstance(chooses, Rows):
        raise NoRuleError
    if isinstance(kind, Rows) and kind.dim != chooses.dim:
        raise MixesError("writes at a mask of other samples")
    owners = merged(call, [one.owners for one in (kind, chooses) if isinstance(one, Rows)])
    if not isinstance(kind, Rows):
        even_operand(call, target, kind, chooses.dim, owners)
    values = call.kind(value)
    if isinstance(values, Rows):
        if values.dim or not _chosen(call, owners, chooses.dim, mask, mask).agrees(values.owners):
            raise MixesError("writes the rows of other samples")
    elif value.numel() > 1 and not bool((value == value.reshape(-1)[0]).all()):
        raise MixesError("treats a sample by its position in the batch")
    return Rows(chooses.dim, owners)


@rule("bincount", "histc", "_unique2", "unique_dim", "unique_consecutive", "masked_scatter", "segment_reduce")
def _flattened(call: Call) -> Kind:
    raise MixesError("works on the whole batch at once")


@rule("bucketize", "searchsorted")
def _search(call: Call) -> Kind:
    found = call.rows("self")
    if found is None or any(isinstance(call.kind(tensor), Rows) for tensor in call.tensors if tensor is not found[0]):
        raise NoRuleError
    return Rows(found[1].dim, found[1].owners)
