"""Contractions, described by einsum letters: rows remain, are summed over, or samples are mixed."""

from __future__ import annotations

import torch

from .lattice import SAME, Kind, MixesError, NoRuleError, Rows, Total
from .rules import Call, even_operand, merged, plain, refuse_totals, rule

_LETTERS = {
    "mm": "ik,kj->ij",
    "bmm": "bik,bkj->bij",
    "mv": "ik,k->i",
    "dot": "k,k->",
    "vdot": "k,k->",
    "addmm": "ik,kj->ij",
    "baddbmm": "bik,bkj->bij",
    "addmv": "ik,k->i",
    "addbmm": "bik,bkj->ij",
    "_addmm_activation": "ik,kj->ij",
}
_FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
    "vdot": ("self", "other"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "addmv": ("mat", "vec"),
    "addbmm": ("batch1", "batch2"),
    "_addmm_activation": ("mat1", "mat2"),
}


@rule(*_LETTERS)
def _product(call: Call) -> Kind:
    one, other = (call[name] for name in _FACTORS[call.name])
    product = contracted(call, one, other, _LETTERS[call.name])
    if "add" not in call.name or call.get("beta") == 0:
        return product
    bias = call.kind(call["self"])
    if isinstance(product, Rows) and not isinstance(bias, Rows | Total):
        dim = product.dim - call.out.dim() + call["self"].dim()
        if dim >= 0:
            even_operand(call, call["self"], bias, dim, product.owners)
        return product
    shift = call.out.dim() - call["self"].dim()
    if isinstance(product, Rows) and isinstance(bias, Rows) and bias.dim + shift == product.dim:
        return Rows(product.dim, merged(call, [product.owners, plain(bias).owners]))
    if isinstance(product, Total) and product.den is not None and bias == SAME:
        return product
    raise NoRuleError("adds something to a matrix product in a way that could not be followed")


def contracted(call: Call, one: torch.Tensor, other: torch.Tensor, letters: str) -> Kind:
    """The kind of ``einsum(letters, one, other)``."""
    inputs, output = letters.split("->")
    names = inputs.split(",")
    kinds = [call.kind(one), call.kind(other)]
    rows = [(plain(kind), name[kind.dim]) for kind, name in zip(kinds, names, strict=True) if isinstance(kind, Rows)]
    totals = [kind for kind in kinds if isinstance(kind, Total)]
    if totals:
        if len(totals) + len(rows) > 1:
            raise MixesError(f"multiplies a {totals[0].name} by something that depends on the batch")
        return Total(totals[0].den)
    if not rows:
        return SAME
    if len({letter for _, letter in rows}) > 1:
        raise MixesError("multiplies every sample with every other")
    letter = rows[0][1]
    owners = merged(call, [kind.owners for kind, _ in rows])
    for tensor, kind, name in zip((one, other), kinds, names, strict=True):
        if not isinstance(kind, Rows) and letter in name:
            even_operand(call, tensor, kind, name.index(letter), owners)
    return Rows(output.index(letter), owners) if letter in output else Total()


@rule("_trilinear")
def _trilinear(call: Call) -> Kind:
    """A product of three tensors, unsqueezed at their ``expand`` dimensions and summed over ``sumdim``."""
    found: list[tuple[int, Rows]] = []
    letters = "abcdefgh"[: call["i1"].dim() + len(call["expand1"])]
    refuse_totals(call.name, *map(call.kind, call.tensors))
    for name, expanded in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        own = [dim for dim in range(len(letters)) if dim not in call[expanded]]
        if isinstance(kind := call.kind(call[name]), Rows):
            found.append((own[kind.dim], plain(kind)))
    dims = {dim for dim, _ in found}
    if len(dims) > 1 or dims & set(call["sumdim"]) or 0 not in call["expand2"] or dims != {0}:
        raise MixesError("multiplies along the batch")
    return Rows(0, merged(call, [kind.owners for _, kind in found]))


@rule("linear")
def _linear(call: Call) -> Kind:
    found = call.rows("input")
    if found is None or isinstance(call.kind(call["weight"]), Rows):
        raise NoRuleError("has weights that depend on the batch")
    tensor, kind = found
    if kind.dim == tensor.dim() - 1:
        raise MixesError("multiplies along the batch")
    return Rows(kind.dim, kind.owners)


@rule("_cdist_forward", "_euclidean_dist")
def _distances(call: Call) -> Kind:
    one, other = (call[name] for name in ("x1", "x2"))
    kinds = [call.kind(one), call.kind(other)]
    ndim = call.out.dim()
    if not one.dim() == other.dim() == ndim:
        raise NoRuleError("broadcasts its operands")
    rows = [plain(kind) for kind in kinds if isinstance(kind, Rows)]
    if any(isinstance(kind, Total) for kind in kinds) or any(kind.dim == ndim - 1 for kind in rows):
        raise MixesError("takes distances along the batch")
    if all(kind.dim < ndim - 2 for kind in rows):
        owners = merged(call, [kind.owners for kind in rows])
        for tensor, kind in zip((one, other), kinds, strict=True):
            if not isinstance(kind, Rows):
                even_operand(call, tensor, kind, rows[0].dim, owners)
        return Rows(rows[0].dim, owners)
    if len(rows) == 2:
        raise MixesError("takes the distance of every sample to every other")
    return Rows(rows[0].dim if kinds[0] is rows[0] else ndim - 1, rows[0].owners)
