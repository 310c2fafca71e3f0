"""Tensors of factory functions, and numbers in the arithmetic that may be the size of this rank's slice."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .lattice import NOISE, SAME, Kind, MixesError, Noise, NoRuleError, Rows, Same, Total
from .numerals import Origin
from .rules import RANDOM, Call, dims_of

_PUTTING = {"scatter", "fill", "masked_fill", "full", "full_like", "new_full", "index_fill", "eq", "ne"}
_SUMMING = {
    *("sum", "nansum", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "vdot", "norm", "linalg_vector_norm", "logsumexp"),
    *("prod", "cumsum", "index_add", "scatter_add", "count_nonzero"),
}
_SCALING = {"mul", "div", "full", "fill", "full_like", "new_full", "addcmul", "addcdiv", "scalar_tensor"}


def made(call: Call, tensor: torch.Tensor) -> Kind:
    """The kind of a factory's result. ``*_like`` of rows are rows; so are random draws, one for each sample."""
    if call.name == "lift_fresh":
        if tensor.dim() and tensor.size(0) == call.follower.samples() > 1:
            raise NoRuleError("makes a tensor of Python values, one for each sample of the batch")
        return SAME
    if call.draws:
        call.notes.add(RANDOM)
        return drawn(call, tensor)
    like = call.kind(call.get("self"))
    if call.name.endswith("_like") and isinstance(like, Rows):
        return Rows(like.dim, like.owners)
    return SAME


def drawn(call: Call, tensor: torch.Tensor) -> Kind:
    like = call.kind(call.get("self"))
    if isinstance(like, Rows) and call.get("self").shape == tensor.shape:
        return Rows(like.dim, like.owners)
    samples = call.follower.samples()
    if call.name != "randperm" and tensor.dim() and tensor.size(0) == samples:
        return Rows(0, call.follower.owners(samples))
    return NOISE


def is_counting(call: Call) -> bool:
    """Whether a factory gives every position in this rank's slice: its length was read from a size."""
    if call.name not in {"arange", "randperm"} or call.out.shape != (call.follower.samples(),):
        return False
    size = call.follower.samples()
    starts = call.name == "randperm" or int(call.out[0]) == 0
    return starts and call.follower.origin(size) is Origin.SIZE


def refuse_numbers_read(call: Call) -> None:
    """Raise if a number from ``item()`` is used; only a sum may be divided by it."""
    scales = call.name.removesuffix("_") in {"mul", "div"}
    if scales and any(isinstance(call.kind(tensor), Total) for tensor in call.tensors):
        return
    if any(_was_read(call, number) for number in call.numbers):
        raise MixesError("uses a number that was read from the batch")


def _was_read(call: Call, number: float) -> bool:
    if number in (0, 1) and call.name.removesuffix("_") in _PUTTING:
        return False  # a one-hot code, a mask
    read = call.follower.read_number(number)
    if read is None or isinstance(read[0], Same | Noise):
        return False
    return call.follower.origin(number) is not Origin.LITERAL


def sized(call: Call) -> bool:
    """Whether an operation on constants may use this rank's number of samples, or a number read from the batch."""
    if any(_was_read(call, number) for number in call.numbers):
        return True
    if call.name.removesuffix("_") in _SCALING:
        return any(True for _ in _candidates(call))
    return spreads(call) or (call.name == "sum" and _counts_constants(call))


def spreads(call: Call) -> bool:
    """Whether a tensor that does not depend on the batch is repeated once for each sample."""
    samples = call.follower.samples()
    if call.makes:
        return call.name != "lift_fresh" and any(size == samples for size in call.out.shape)
    if call.name not in {"expand", "repeat", "repeat_interleave"} or isinstance(call.kind(call.get("self")), Rows):
        return False
    before = [1] * (call.out.dim() - call["self"].dim()) + list(call["self"].shape)
    return any(size != was and size % samples == 0 for size, was in zip(call.out.shape, before, strict=True))


def adds_up(call: Call) -> bool:
    """Whether an operation on constants sums over a dimension that has the length of the batch."""
    if call.get("reduction") == 2:
        return True
    factor = next((call[name] for name in ("mat1", "batch1", "mat", "self") if call.get(name) is not None), None)
    if call.name not in _SUMMING or not isinstance(factor, torch.Tensor) or not factor.dim():
        return False
    if not factor.detach().any():  # the initial state of a recurrent layer: its width may equal the batch size
        return False
    products = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "vdot"}
    dims = [factor.dim() - 1] if call.name in products else dims_of(call.get("dim"), factor.dim())
    samples = call.follower.samples()
    others = [size for dim, size in enumerate(factor.shape) if dim not in dims]
    return any(
        factor.size(dim) == samples or (factor.size(dim) % samples == 0 and samples not in others) for dim in dims
    )


def look_for_sizes(call: Call) -> None:
    """Note numbers that may be the size of this rank's slice; rules that scale a total check it themselves."""
    if any(isinstance(call.kind(tensor), Total) for tensor in call.tensors):
        return
    if call.name.removesuffix("_") in _SCALING:
        for number in _candidates(call):
            if call.follower.origin(number) is not Origin.LITERAL or not call.in_python:
                call.suspects.add(call.follower.suspect(number))
    elif call.name == "sum" and _counts_constants(call):
        call.suspects.add(call.follower.suspect(call.follower.samples()))


def _candidates(call: Call) -> Iterator[float]:
    samples = call.follower.samples()
    sizes = {samples, samples - 1, *(tensor.numel() for tensor in call.tensors if tensor.numel() % samples == 0)}
    several = any(isinstance(call.kind(tensor), Rows) for tensor in call.tensors)  # two views of each sample
    for value in call.arguments.values():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value:
            for number in {value, 1 / value}:
                size = round(number) if abs(number) < 2**53 else 0
                multiple = (several or not call.in_python) and size % samples == 0
                if (
                    (size > 1 or size == value == samples)
                    and abs(number - size) < 1e-9 * size
                    and (size in sizes or multiple)
                ):
                    yield value


def _counts_constants(call: Call) -> bool:
    """Whether a sum is over as many constants as there are samples."""
    tensor = call["self"]
    samples = call.follower.samples()
    return (
        samples > 1
        and isinstance(call.kind(tensor), Same)
        and not tensor.requires_grad
        and any(size % samples == 0 and size for size in tensor.shape)
    )
