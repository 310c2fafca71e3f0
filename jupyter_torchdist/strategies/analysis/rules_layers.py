"""Layers that are one operation: all but batch normalisation process each sample independently."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .lattice import SAME, Kind, MixesError, Noise, NoRuleError, Owners, Rows, Same, Total
from .rules import SYNCHRONISE, Call, elementwise, even_operand, merged, plain, refuse_totals, rule


def _independent(call: Call, names: tuple[str, ...], free: int) -> Rows:
    """The common rows of the arguments ``names``; their samples must be in one of the first ``free`` dimensions."""
    given = [call[name] for name in names if isinstance(call.get(name), torch.Tensor)]
    refuse_totals(call.name, *map(call.kind, call.tensors))
    for tensor in call.tensors:
        if isinstance(call.kind(tensor), Rows) and not any(tensor is one for one in given):
            raise NoRuleError("has weights that depend on the batch")
    rows = [plain(kind) for kind in map(call.kind, given) if isinstance(kind, Rows)]
    if len({kind.dim for kind in rows}) != 1 or rows[0].dim >= free:
        raise MixesError("goes along the batch")
    owners = merged(call, [kind.owners for kind in rows])
    for tensor in given:
        if not isinstance(call.kind(tensor), Rows) and tensor.dim() > rows[0].dim:
            even_operand(call, tensor, call.kind(tensor), rows[0].dim, owners)
    return Rows(rows[0].dim, owners)


def _everywhere(call: Call, rows: Rows) -> Kind | list[Kind]:
    """``rows`` for every result with such a dimension, ``SAME`` for the others."""
    if isinstance(call.out, torch.Tensor):
        return rows
    results = [out for out in call.out if isinstance(out, torch.Tensor)]
    return [rows if _has(out, rows.dim, rows.owners) else SAME for out in results]


def _has(tensor: torch.Tensor, dim: int, owners: Owners) -> bool:
    return tensor.dim() > dim and tensor.size(dim) == len(owners)


@rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution", "convolution_overrideable")
def _convolution(call: Call) -> Kind | list[Kind]:
    return _independent(call, ("input",), 1)


@rule("convolution_backward")
def _convolution_backward(call: Call) -> Sequence[Kind]:
    rows = _independent(call, ("grad_output", "input"), 1)
    kinds: list[Kind] = [rows, Total(), Total()]
    return kinds[: sum(isinstance(out, torch.Tensor) for out in call.out)]


def _trailing(spatial: int, *names: str) -> None:
    """Register operations on the last ``spatial`` dimensions."""

    def within(call: Call) -> Kind | list[Kind]:
        first = next((tensor for tensor in call.tensors if isinstance(call.kind(tensor), Rows)), None)
        if first is None:  # the inverse of a sum over the samples
            raise NoRuleError
        arguments = tuple(name for name, value in call.arguments.items() if isinstance(value, torch.Tensor))
        return _everywhere(call, _independent(call, arguments, first.dim() - spatial))

    rule(*names)(within)


_trailing(1, "avg_pool1d", "max_pool1d", "_adaptive_avg_pool1d", "reflection_pad1d", "replication_pad1d")
_trailing(1, "upsample_linear1d", "upsample_nearest1d", "adaptive_max_pool1d", "max_pool1d_with_indices")
_trailing(
    2,
    *("avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "fractional_max_pool2d"),
    *("upsample_bilinear2d", "upsample_nearest2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "col2im"),
    *("reflection_pad2d", "replication_pad2d", "im2col", "max_unpool2d", "_upsample_nearest_exact2d"),
    *("avg_pool2d_backward", "max_pool2d_with_indices_backward", "_adaptive_avg_pool2d_backward"),
    *(
        "linalg_inv_ex",
        "_linalg_det",
        "linalg_cholesky_ex",
        "matrix_exp",
        "_linalg_svd",
        "_linalg_eigh",
        "_linalg_slogdet",
    ),
)
_trailing(
    3,
    *("avg_pool3d", "max_pool3d_with_indices", "_adaptive_avg_pool3d", "adaptive_max_pool3d", "pixel_shuffle"),
    *("upsample_trilinear3d", "upsample_nearest3d", "replication_pad3d", "reflection_pad3d", "pixel_unshuffle"),
    *("channel_shuffle", "native_channel_shuffle"),
)


@rule("log_sigmoid_forward")
def _log_sigmoid(call: Call) -> Sequence[Kind]:
    return [elementwise(call, [call["self"]], call["self"].dim()), SAME]


@rule("grid_sampler_2d", "grid_sampler_3d")
def _grid(call: Call) -> Kind:
    return _independent(call, ("input", "grid"), 1)


@rule("affine_grid_generator")
def _affine(call: Call) -> Kind:
    return _independent(call, ("theta",), 1)


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: Call) -> Kind | list[Kind]:
    return _everywhere(call, _independent(call, ("input",), call["input"].dim() - len(call["normalized_shape"])))


@rule("native_group_norm")
def _group_norm(call: Call) -> Kind | list[Kind]:
    return _everywhere(call, _independent(call, ("input",), 1))


@rule(
    *("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"),
    *("_batch_norm_with_update", "batch_norm_with_update", "_native_batch_norm_legit_no_training"),
    "_batch_norm_no_update",
)
def _batch_norm(call: Call) -> Sequence[Kind]:
    """Also for instance normalisation, which passes the samples as channels: ``[1, N·C, …]``."""
    tensor = call["input"]
    found = call.rows("input")
    if found is None or any(isinstance(call.kind(one), Rows) for one in call.tensors if one is not tensor):
        raise NoRuleError("has weights that depend on the batch")
    kind = found[1]
    results = [out for out in call.out if isinstance(out, torch.Tensor)]
    if kind.dim == 1:
        for name in ("weight", "bias", "running_mean", "running_var"):
            if isinstance(one := call.get(name), torch.Tensor):
                even_operand(call, one, call.kind(one), 0, kind.owners)
        return [kind, *[Rows(0, kind.owners)] * (len(results) - 1)]
    training = bool(call.get("training")) or call.name == "_batch_norm_with_update"
    if kind.dim != 0:
        raise MixesError("takes its statistics along the batch") if training else NoRuleError
    if training:
        call.notes.add(SYNCHRONISE)
    return [kind, *[SAME] * (len(results) - 1)]


@rule(
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_attention_math", "_scaled_dot_product_fused_attention_overrideable"),
    "_scaled_dot_product_attention_math_for_mps",
)
def _attention(call: Call) -> Sequence[Kind]:
    names = ("query", "key", "value")
    mask = next((name for name in ("attn_mask", "attn_bias") if isinstance(call.get(name), torch.Tensor)), None)
    if mask is not None and call[mask].dim() == call["query"].dim():
        names = (*names, mask)  # type: ignore[assignment]
    rows = _independent(call, names, call["query"].dim() - 2)
    return [
        rows if index < 2 and _has(out, rows.dim, rows.owners) else SAME
        for index, out in enumerate(one for one in call.out if isinstance(one, torch.Tensor))
    ]


@rule("mkldnn_rnn_layer")
def _mkldnn_rnn(call: Call) -> Sequence[Kind]:
    """One layer with time first; returns the output, the last states and a workspace."""
    tensor, kind = call["input"], call.kind(call["input"])
    if not isinstance(kind, Rows) or kind.dim != 1 or tensor.dim() != 3:
        raise MixesError("runs along the batch")
    weights = [call[name] for name in ("weight0", "weight1", "weight2", "weight3")]
    if not all(isinstance(call.kind(weight), Same | Noise) for weight in weights):
        raise NoRuleError("has weights that depend on the batch")
    for name in ("hx_", "cx_"):
        state = call.kind(call[name])
        if isinstance(state, Rows):
            if state.dim != call[name].dim() - 2:
                raise MixesError("starts from states of other samples")
            merged(call, [kind.owners, plain(state).owners])
        else:
            even_operand(call, call[name], state, call[name].dim() - 2, kind.owners)
    states = Rows(call.out[1].dim() - 2, kind.owners)
    return [Rows(1, kind.owners), states, states, SAME]


@rule("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def _cell(call: Call) -> Sequence[Kind]:
    rows = _independent(call, ("input_gates", "hidden_gates", "cx", "hx"), 1)
    return [rows] * len(call.out)


@rule("nan_to_num", "_prelu_kernel")
@rule("threshold_backward", "tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward")
def _pointwise(call: Call) -> Kind:
    return elementwise(call, call.tensors, call.out.dim())
