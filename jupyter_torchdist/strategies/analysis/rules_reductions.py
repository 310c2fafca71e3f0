"""Sums and means over the samples, and other operations along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .lattice import Den, Kind, MixesError, NoRuleError, Positions, Rows, Total, Unknown
from .orders import sorting, undoing
from .rules import Call, dims_of, plain, refuse_totals, rule, without, wrapped

_WORDS = {
    "amax": "the largest of a batch",
    "amin": "the smallest of a batch",
    "max": "the largest of a batch",
    "min": "the smallest of a batch",
    "var": "the variance over a batch",
    "std": "the standard deviation over a batch",
    "var_mean": "the variance over a batch",
    "logsumexp": "a log-sum-exp over the batch",
    "_softmax": "a softmax over the batch",
    "_log_softmax": "a softmax over the batch",
    "linalg_vector_norm": "a norm over the batch",
    "norm": "a norm over the batch",
    "prod": "a product over the batch",
    "sort": "a sorting of the batch",
    "topk": "the largest of a batch",
    "median": "a median over the batch",
}


def _along(call: Call) -> MixesError:
    return MixesError(
        f"takes {_WORDS.get(call.name, 'values along the batch')}, which a rank cannot compute from its part"
    )


@rule("sum", "nansum")
def _sum(call: Call) -> Kind:
    kind = call.kind(call["self"])
    tensor = call["self"]
    if not isinstance(kind, Rows):
        if call.name == "nansum":
            refuse_totals(call.name, kind)
        return Total(kind.den, kind.counts) if isinstance(kind, Total) and not kind.floored else kind
    dims = dims_of(call.get("dim"), tensor.dim())
    if kind.dim not in dims:
        return Rows(without(kind.dim, dims, bool(call.get("keepdim"))), kind.owners, kind.over)
    return Total(kind.over, _counts(call, kind, dims))


def _counts(call: Call, kind: Rows, dims: Sequence[int]) -> frozenset[tuple[int, Den]]:
    tensor, den = call["self"], mean_den(call, kind)
    return frozenset((size, den) for size in (len(kind.owners), _elements(tensor, dims), tensor.numel()))


def _elements(tensor: torch.Tensor, dims: Sequence[int]) -> int:
    count = 1
    for dim in dims:
        count *= tensor.size(dim)
    return count


@rule("count_nonzero")
def _count(call: Call) -> Kind:
    refuse_totals(call.name, call.kind(call["self"]))
    return _sum(call)


@rule("mean")
def _mean(call: Call) -> Kind:
    kind = call.kind(call["self"])
    tensor = call["self"]
    if not isinstance(kind, Rows):
        return kind
    dims = dims_of(call.get("dim"), tensor.dim())
    if kind.dim not in dims:
        return Rows(without(kind.dim, dims, bool(call.get("keepdim"))), kind.owners, kind.over)
    plain(kind)
    return Total(mean_den(call, kind), _counts(call, kind, dims))


def mean_den(call: Call, kind: Rows) -> Den:
    """The divisor of a mean over these rows: the samples, or the rows if their number differs between samples."""
    if kind.owners.selection is None and kind.owners.even:
        return call.samples_token_of(kind.owners.samples)
    return Den(("rows", kind.owners.selection), float(len(kind.owners)))


@rule(
    *("amax", "amin", "prod", "any", "all", "logsumexp", "var", "std", "var_mean", "std_mean", "norm", "median"),
    *(
        "linalg_vector_norm",
        "nanmedian",
        "argmax",
        "argmin",
        "max",
        "min",
        "mode",
        "kthvalue",
        "aminmax",
        "special_logsumexp",
    ),
)
def _reduce(call: Call) -> Kind | list[Kind]:
    results = list(call.out) if isinstance(call.out, (tuple, list)) else [call.out]
    found = call.rows()
    if call.get("other") is not None or found is None:
        raise NoRuleError
    tensor, kind = found
    dims = dims_of(call.get("dim"), tensor.dim())
    if kind.dim in dims:
        raise _along(call)
    keepdim = bool(call.get("keepdim"))
    return [Rows(without(kind.dim, dims, keepdim), kind.owners)] * len(results)


@rule(
    *("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"),
    *("sort", "argsort", "topk", "_weight_norm_interface", "renorm", "glu", "_safe_softmax"),
)
def _scan(call: Call) -> Kind | list[Kind]:
    results = list(call.out) if isinstance(call.out, (tuple, list)) else [call.out]
    if call.name == "sort" and isinstance(call.kind(call["self"]), Positions) and (inverse := undoing(call)):
        return [Unknown(call.name, "sorts positions in the batch", None), inverse]
    found = call.rows()
    if found is None:
        raise NoRuleError
    tensor, kind = found
    given = call.get("dim")
    if wrapped(-1 if given is None else given, tensor.dim()) == kind.dim:
        if (ordered := sorting(call, tensor, kind)) is not None:
            return ordered
        raise _along(call)
    return [Rows(kind.dim, kind.owners)] * len(results)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(call: Call) -> Kind:
    found = [kind for kind in map(call.kind, call.tensors) if isinstance(kind, Rows)]
    refuse_totals(call.name, *map(call.kind, call.tensors))
    if any(kind.dim == wrapped(call["dim"], call.out.dim()) for kind in found):
        raise _along(call)
    return Rows(found[0].dim, found[0].owners)
