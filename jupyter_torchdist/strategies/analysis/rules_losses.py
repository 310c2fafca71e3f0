"""Losses with a reduction of their own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from .lattice import Den, Kind, MixesError, Noise, NoRuleError, Rows, Same, Total
from .rules import Call, elementwise, even_operand, merged, plain, refuse_totals, rule
from .rules_reductions import mean_den

_NONE, _MEAN, _SUM = range(3)


@rule(
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("soft_margin_loss", "l1_loss"),
)
def _pointwise(call: Call) -> Kind:
    ndim = max(tensor.dim() for tensor in call.tensors)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in call.tensors))
    kind = elementwise(call, call.tensors, ndim)
    assert isinstance(kind, Rows)
    return _reduced(call, kind, shape)


@rule("multi_margin_loss", "multilabel_margin_loss_forward")
def _per_sample(call: Call) -> Kind | list[Kind]:
    """Losses of ``[N, C]`` with a target for each of the N samples."""
    ahead, target = call.kind(call["self"]), call.kind(call["target"])
    refuse_totals(call.name, ahead, target)
    rows = [plain(kind) for kind in (ahead, target) if isinstance(kind, Rows)]
    if any(kind.dim for kind in rows):
        raise MixesError("takes the dimension of the samples as the classes")
    owners = merged(call, [kind.owners for kind in rows])
    for name in ("self", "target"):
        if not isinstance(call.kind(call[name]), Rows):
            even_operand(call, call[name], call.kind(call[name]), 0, owners)
    kind = _reduced(call, Rows(0, owners), torch.Size([len(owners)]))
    return kind if isinstance(call.out, torch.Tensor) else [kind, Rows(0, owners)]


def _reduced(call: Call, kind: Rows, shape: Sequence[int]) -> Kind:
    if call["reduction"] == _NONE:
        return kind
    if call["reduction"] == _SUM:
        den = mean_den(call, kind)
        return Total(None, frozenset((size, den) for size in (shape[kind.dim], torch.Size(shape).numel())))
    return Total(mean_den(call, kind))


@rule("nll_loss_forward", "nll_loss2d_forward")
def _nll(call: Call) -> list[Kind]:
    """The mean is divided by ``total_weight``, the weights of the targets that are not ignored."""
    scores, target = call["self"], call["target"]
    kinds = [call.kind(scores), call.kind(target)]
    refuse_totals(call.name, *kinds)
    rows = [plain(kind) for kind in kinds if isinstance(kind, Rows)]
    if scores.dim() == 1:
        raise NoRuleError("has no dimension of samples")
    if call["weight"] is not None and not isinstance(call.kind(call["weight"]), Same | Noise):
        raise MixesError("weights classes by the batch")
    places = {_without_classes(kind.dim) if of is scores else kind.dim for of, kind in _pairs(call, scores, target)}
    if len(places) > 1:
        raise MixesError("compares samples with other dimensions")
    dim = places.pop()
    owners = merged(call, [kind.owners for kind in rows])
    if not isinstance(kinds[1], Rows):
        even_operand(call, target, kinds[1], dim, owners)
    if not isinstance(kinds[0], Rows):
        even_operand(call, scores, kinds[0], dim if dim == 0 else dim + 1, owners)
    if call["reduction"] == _NONE:
        return [Rows(dim, owners), Total(None)]
    kept = Total(None)
    if call["reduction"] == _SUM:
        den = mean_den(call, Rows(dim, owners))
        return [Total(None, frozenset((size, den) for size in (len(owners), target.numel()))), kept]
    return [Total(_kept(call, target, owners)), kept]


def _pairs(call: Call, scores: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, Rows]]:
    return [(of, kind) for of in (scores, target) if isinstance(kind := call.kind(of), Rows)]


def _without_classes(dim: int) -> int:
    if dim == 1:
        raise MixesError("takes the dimension of the samples as the classes")
    return dim if dim == 0 else dim - 1


def _kept(call: Call, target: torch.Tensor, owners: object) -> Den:
    """Gets the same number as ``(target != ignore_index).sum()``, because both are the same divisor."""
    follower = call.follower
    number: Hashable = follower.number_of("ne", follower.number(target), follower.number(call["ignore_index"]))
    if call["weight"] is not None:
        return Den(("weighted", number, follower.number(call["weight"])), call.out[1].detach())
    token = follower.number_of("sum", number, follower.number(None))
    everything = float(call.out[1]) == target.numel()
    from_all = getattr(owners, "selection", None) is None and getattr(owners, "even", False)
    return Den(token, call.out[1].detach(), full=bool(everything and from_all))


@rule("_ctc_loss", "_cudnn_ctc_loss")
def _ctc(call: Call) -> list[Kind]:
    found = call.rows("log_probs")
    if found is None or found[1].dim != 1:
        raise MixesError("has log-probabilities whose samples are not in dimension 1")
    kind = found[1]
    for name in ("targets", "input_lengths", "target_lengths"):
        tensor = call[name]
        if isinstance(tensor, torch.Tensor):
            given = call.kind(tensor)
            if isinstance(given, Rows):
                merged(call, [kind.owners, plain(given).owners])
            elif tensor.size(0) == len(kind.owners):
                even_operand(call, tensor, given, 0, kind.owners)
            else:
                raise NoRuleError("has its targets joined together")
    return [Rows(0, kind.owners)] * 2
