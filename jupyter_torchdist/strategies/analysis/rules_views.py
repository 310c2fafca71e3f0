"""Shape operations: the dimension of the samples after a view, permutation, slice or concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .lattice import SAME, Kind, MixesError, NoRuleError, Owners, Positions, Rows, Total, regroup
from .numerals import Origin
from .rules import Call, dims_of, even_operand, merged, refuse_totals, rule, wrapped
from .slices import BY_NUMBER

_END = 2**63 - 1


def _moved(call: Call, dim: int) -> Kind:
    kind = call.kind(call["self"])
    if isinstance(kind, Positions):
        return replace(kind, dim=dim)
    return Rows(dim, kind.owners, kind.over) if isinstance(kind, Rows) else kind


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "_view_copy")
def _view(call: Call) -> Kind:
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows):
        return kind
    if call.get("dtype") is not None:
        raise NoRuleError("reads the bytes as another type")
    if not call.out.numel():
        raise NoRuleError("has no elements")
    dim, owners = regroup(call["self"].shape, kind.dim, kind.owners, call.out.shape)
    return Rows(dim, owners, kind.over)


@rule("unsqueeze")
def _unsqueeze(call: Call) -> Kind:
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows):
        return kind
    at = wrapped(call["dim"], call.out.dim())
    return _moved(call, kind.dim + (at <= kind.dim))


@rule("squeeze")
def _squeeze(call: Call) -> Kind:
    tensor, kind = call["self"], call.kind(call["self"])
    if not isinstance(kind, Rows | Positions):
        return kind
    shape = call.shape_before or tensor.shape
    gone = [dim for dim in dims_of(call.get("dim"), len(shape)) if shape[dim] == 1]
    if kind.dim in gone:
        raise NoRuleError("removes the batch dimension of a batch of one sample")
    return _moved(call, kind.dim - sum(dim < kind.dim for dim in gone))


@rule("transpose", "swapaxes", "swapdims")
def _transpose(call: Call) -> Kind:
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows):
        return kind
    one, other = (wrapped(call[name], call["self"].dim()) for name in ("dim0", "dim1"))
    return _moved(call, {one: other, other: one}.get(kind.dim, kind.dim))


@rule("t", "numpy_T")
def _t(call: Call) -> Kind:
    kind = call.kind(call["self"])
    return _moved(call, call["self"].dim() - 1 - kind.dim) if isinstance(kind, Rows) else kind


@rule("permute")
def _permute(call: Call) -> Kind:
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows):
        return kind
    return _moved(call, [wrapped(dim, call.out.dim()) for dim in call["dims"]].index(kind.dim))


@rule("expand")
def _expand(call: Call) -> Kind:
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows):
        return kind
    dim = kind.dim + call.out.dim() - call["self"].dim()
    if call.out.size(dim) != len(kind.owners):
        raise NoRuleError("broadcasts a batch of one sample")
    return _moved(call, dim)


@rule("repeat")
def _repeat(call: Call) -> Kind:
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows):
        return kind
    dim = kind.dim + call.out.dim() - call["self"].dim()
    return Rows(dim, kind.owners.with_vector(kind.owners.vector.repeat(call["repeats"][dim])), kind.over)


@rule("select")
def _select(call: Call) -> Kind:
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows | Positions):
        return kind
    at = wrapped(call["dim"], call["self"].dim())
    if at == kind.dim:
        raise MixesError("takes a sample by its position in the batch")
    return _moved(call, kind.dim - (at < kind.dim))


@rule("unbind")
def _unbind(call: Call) -> list[Kind]:
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows | Positions):
        return [kind] * len(call.out)
    at = wrapped(call["dim"], call["self"].dim())
    if at == kind.dim:
        raise MixesError("takes the samples of the batch one by one")
    return [_moved(call, kind.dim - (at < kind.dim))] * len(call.out)


@rule("slice", "narrow")
def _slice(call: Call) -> Kind:
    kind = call.kind(call["self"])
    at = wrapped(call["dim"], call["self"].dim())
    if not isinstance(kind, Rows | Positions) or at != kind.dim:
        others = [bound for bound in (call.get("start"), call.get("end")) if bound != _END]
        if isinstance(kind, Rows) and any(map(call.follower.is_read, others)):
            raise MixesError(BY_NUMBER)
        return kind
    first, last, step = call.get("start") or 0, call.get("end"), call.get("step") or 1
    size = call["self"].size(at)
    bounds = [abs(bound) for bound in (first, last) if bound not in (0, None, _END)]
    if not bounds and step == 1:
        return kind
    # ``x[:32]`` on a rank with 32 samples: on one device it would take only a part of the samples.
    if (
        isinstance(kind, Positions)
        or step != 1
        or any(call.follower.origin(bound) is not Origin.SIZE or bound > size for bound in bounds)
    ):
        raise MixesError("takes samples by their position in the batch")
    vector = kind.owners.vector[slice(first, last, step)]
    return Rows(at, _part(kind.owners, vector, call.out.size(at)), kind.over)


def _part(owners: Owners, vector: torch.Tensor, size: int) -> Owners:
    """Owners of a piece chosen by position. Raises unless the piece has the same number of rows of every sample."""
    part = owners.with_vector(vector)
    if len(vector) != size or owners.selection is not None or not size or not part.even:
        raise MixesError("takes samples by their position in the batch")
    return part


@rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes", "tensor_split")
def _split(call: Call) -> list[Kind]:
    kind = call.kind(call["self"])
    at = wrapped(call["dim"], call["self"].dim())
    if not isinstance(kind, Rows) or at != kind.dim:
        return [kind] * len(call.out)
    if call.follower.origin(call.out[0].size(at)) is not Origin.SIZE:
        raise MixesError("takes samples by their position in the batch")
    vectors = kind.owners.vector.split([piece.size(at) for piece in call.out])
    return [
        Rows(at, _part(kind.owners, vector, piece.size(at)), kind.over)
        for vector, piece in zip(vectors, call.out, strict=True)
    ]


@rule("cat", "concat")
def _cat(call: Call) -> Kind:
    tensors = [tensor for tensor in call["tensors"] if tensor.shape != (0,)]
    at = wrapped(call["dim"], call.out.dim())
    return _joined(call, tensors, call.out.dim(), along=at)


@rule("stack")
def _stack(call: Call) -> Kind:
    at = wrapped(call["dim"], call.out.dim())
    kind = _joined(call, call["tensors"], call.out.dim() - 1, along=None)
    return Rows(kind.dim + (at <= kind.dim), kind.owners) if isinstance(kind, Rows) else kind


def _joined(call: Call, tensors: Sequence[torch.Tensor], ndim: int, along: int | None) -> Kind:
    kinds = [call.kind(tensor) for tensor in tensors]
    found = [kind for kind in kinds if isinstance(kind, Rows)]
    if not found:
        return _totals(kinds)
    refuse_totals(call.name, *kinds)
    if len({kind.dim for kind in found}) > 1 or any(kind.over for kind in found):
        raise MixesError("joins rows of different dimensions")
    dim = found[0].dim
    if along != dim:
        owners = merged(call, [kind.owners for kind in found])
        for tensor, kind in zip(tensors, kinds, strict=True):
            if not isinstance(kind, Rows):
                even_operand(call, tensor, kind, dim, owners)
        return Rows(dim, owners)
    if len(found) < len(kinds):
        raise MixesError("puts rows that are not of the batch among its rows")
    if len({kind.owners.samples for kind in found}) > 1:
        raise MixesError("joins batches of different sizes")
    orders = {kind.owners.order for kind in found}
    if len(orders) > 1:
        raise MixesError("joins rows of different orders")
    selections = tuple(kind.owners.selection for kind in found)
    return Rows(
        dim,
        Owners(
            torch.cat([kind.owners.vector for kind in found]),
            found[0].owners.samples,
            None if selections == (None,) * len(found) else selections,
            shuffled=any(kind.owners.shuffled for kind in found),
            order=orders.pop(),
        ),
    )


def _totals(kinds: Sequence[Kind]) -> Kind:
    totals = [kind for kind in kinds if isinstance(kind, Total)]
    first = totals[0]
    if any(kind.den != first.den or kind.floored for kind in totals):
        raise MixesError("joins sums and means over the batch")
    if first.den is None and len(totals) < len(kinds):
        raise MixesError("joins sums over the batch with what does not depend on it")
    return Total(first.den)


@rule("repeat_interleave")
def _repeat_interleave(call: Call) -> Kind:
    kind = call.kind(call.get("self"))
    if not isinstance(kind, Rows) or call.get("dim") is None or not isinstance(call["repeats"], int):
        raise NoRuleError
    dim = wrapped(call["dim"], call["self"].dim())
    if dim != kind.dim:
        return kind
    return Rows(dim, kind.owners.with_vector(kind.owners.vector.repeat_interleave(call["repeats"])), kind.over)


@rule("flip", "roll")
def _reordered(call: Call) -> Kind:
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows):
        refuse_totals(call.name, kind)
        return SAME
    if not call["dims"]:
        raise MixesError("rolls over the flattened batch")
    dims = [wrapped(dim, call.out.dim()) for dim in call["dims"]]
    if kind.dim not in dims:
        return kind
    if call.name == "roll":
        shift = call["shifts"][dims.index(kind.dim)]
        return Rows(kind.dim, kind.owners.with_vector(kind.owners.vector.roll(shift)), kind.over)
    return Rows(kind.dim, kind.owners.with_vector(kind.owners.vector.flip(0)), kind.over)


@rule("diagonal", "tril", "triu", "diag_embed", "constant_pad_nd", "unfold")
def _within(call: Call) -> Kind:
    """Operations on other dimensions than the dimension of the samples."""
    kind = call.kind(call["self"])
    if not isinstance(kind, Rows):
        refuse_totals(call.name, kind)
        return SAME
    ndim = call["self"].dim()
    if call.name == "constant_pad_nd":
        touched = [
            ndim - 1 - index for index in range(len(call["pad"]) // 2) if any(call["pad"][2 * index : 2 * index + 2])
        ]
    elif call.name == "unfold":
        touched = [wrapped(call["dimension"], ndim)]
    elif call.name in {"tril", "triu"}:
        touched = [ndim - 2, ndim - 1]
    elif call.name == "diag_embed":
        return _embedded(call, kind)
    else:
        touched = [wrapped(call["dim1"], ndim), wrapped(call["dim2"], ndim)]
    if kind.dim in touched:
        raise MixesError(f"({call.name}) goes along the batch")
    if call.name != "diagonal":
        return kind
    return _moved(call, kind.dim - sum(dim < kind.dim for dim in touched))


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c", "unfold_backward")
def _along(call: Call) -> Kind:
    """Transforms along other dimensions; the number of samples does not change."""
    kind = call.kind(call["grad_in"] if call.name == "unfold_backward" else call["self"])
    if not isinstance(kind, Rows):
        refuse_totals(call.name, kind)
        return SAME
    dims = [call["dim"]] if call.name == "unfold_backward" else call["dim"]
    if kind.dim in [wrapped(dim, call.out.dim()) for dim in dims] or kind.dim >= call.out.dim():
        raise MixesError(f"({call.name}) goes along the batch")
    return kind


@rule("as_strided")
def _windows(call: Call) -> Kind:
    """Overlapping windows of each sample, as in ``torch.stft``."""
    given, kind = call["self"], call.kind(call["self"])
    if not isinstance(kind, Rows):
        refuse_totals(call.name, kind)
        return SAME
    out = call.out
    reach = sum((size - 1) * stride for size, stride in zip(out.shape[1:], out.stride()[1:], strict=True))
    begins_alike = out.storage_offset() == given.storage_offset()
    apart = out.dim() > 0 and out.size(0) == given.size(0) and out.stride(0) == given.stride(0) > reach
    if kind.dim or not apart or not begins_alike:
        raise MixesError("(as_strided) goes along the batch")
    return kind


def _embedded(call: Call, kind: Rows) -> Kind:
    last = {wrapped(call[name], call.out.dim()) for name in ("dim1", "dim2")}
    if last != {call.out.dim() - 2, call.out.dim() - 1} or kind.dim == call["self"].dim() - 1:
        raise MixesError("(diag_embed) goes along the batch")
    return kind
