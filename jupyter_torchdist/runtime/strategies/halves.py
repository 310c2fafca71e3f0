"""A trial beside the proof: a model's rows in two parts must give what they give in one.

What is followed operation by operation (``batchwise``) does not see how a number in Python came about: ``h / len(h)``,
``if len(h) >= 8``, a count kept in an attribute, a statistic taken by NumPy. It shows in the values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from .shares import tensors_in
from .streams import undone

Forward = Callable[[int, int], object]
"""The outputs for the samples from one number to another."""

_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Of the largest value: kernels for other sizes add in another order, those of a GPU with ten bits."""


Join = Callable[[Sequence[list[torch.Tensor]], int], Sequence[torch.Tensor | None]]
"""The whole's outputs, of both halves' and how many samples the first has; None for what cannot be told."""


def halves_differ(forward: Forward, samples: int, join: Join) -> bool:
    """Whether the two halves' outputs, joined, are not the whole's. A forward of chance is not judged."""
    first = samples // 2
    if first == 0:
        return False
    drew = False

    def outputs(low: int, high: int) -> list[torch.Tensor]:
        nonlocal drew
        with undone(), torch.no_grad():
            state = torch.get_rng_state()
            found = tensors_in(forward(low, high))
            drew = drew or not torch.equal(state, torch.get_rng_state())
            return found

    whole, halves = outputs(0, samples), [outputs(0, first), outputs(first, samples)]
    if drew:
        return False
    joined = join(halves, first)
    return len(joined) != len(whole) or not all(map(_close, joined, whole))


def _close(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    if one is None:
        return True
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    if not one.is_floating_point():
        return bool((one != other).float().mean() < 0.01)  # a tie may fall the other way
    scale = other.abs().nan_to_num(posinf=0.0).max().clamp(min=1e-6)
    return torch.allclose(one, other, rtol=0.0, atol=float(scale) * _CLOSE.get(one.dtype, 5e-2), equal_nan=True)


@contextlib.contextmanager
def without_chance(module: nn.Module) -> Iterator[None]:
    """Dropout lets all through, and batch normalisation, which is synchronised elsewhere, takes what it knows."""
    still = [
        part
        for part in module.modules()
        if part.training
        and (
            isinstance(part, (nn.modules.dropout._DropoutNd, nn.MultiheadAttention))
            or (isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None)
        )
    ]
    for part in still:
        part.training = False
    try:
        yield
    finally:
        for part in still:
            part.training = True
