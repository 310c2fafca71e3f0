"""Tensors made from nothing, and numbers in the arithmetic that may be the size of this rank's slice."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .lattice import NOISE, SAME, Kind, NoRuleError, Rows, Same, Total
from .numerals import Origin
from .rules import RANDOM, Call

_SCALING = {"mul", "div", "full", "fill", "full_like", "new_full", "addcmul", "addcdiv", "scalar_tensor", "pow"}


def made(call: Call, tensor: torch.Tensor) -> Kind:
    """What a factory gives. ``*_like`` of rows are rows; so are random draws as many as the samples."""
    if call.name == "lift_fresh":
        if tensor.dim() and tensor.size(0) == call.follower.samples() > 1:
            raise NoRuleError("makes a tensor of Python values, as many as the batch has samples")
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


def sized(call: Call) -> bool:
    """Whether an operation on constants may bring the number of this rank's samples into them."""
    if call.name.removesuffix("_") in _SCALING:
        return any(True for _ in _candidates(call))
    return call.name == "sum" and _counts_constants(call)


def look_for_sizes(call: Call) -> None:
    """Note numbers that may be the size of this rank's slice; a rule that scales a total asks for itself."""
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
    for value in call.arguments.values():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value:
            for number in {value, 1 / value}:
                size = round(number) if abs(number) < 2**53 else 0
                hidden = not call.in_python and size % samples == 0
                if size > 1 and abs(number - size) < 1e-9 * size and (size in sizes or hidden):
                    yield value


def _counts_constants(call: Call) -> bool:
    """A sum over as many constants as there are samples."""
    tensor = call["self"]
    samples = call.follower.samples()
    return (
        samples > 1
        and isinstance(call.kind(tensor), Same)
        and not tensor.requires_grad
        and any(size % samples == 0 and size for size in tensor.shape)
    )
