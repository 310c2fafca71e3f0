"""A trial beside the proof: a model's rows in two parts must give what they give in one.

What is followed operation by operation (``batchwise``) does not see how a number in Python came about: ``h / len(h)``,
``if len(h) >= 8``, a count kept in an attribute, a statistic taken by NumPy. It shows in the values, where a part has
the rows of a rank and both together are the whole batch. A batch too large for that is tried with fewer rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...torch_private.places import DropoutNd, NormBase
from ..core.rng import undone
from ..core.scatter import BatchShard as Share
from ..core.scatter import tensors_in

Forward = Callable[[int, int], object]
"""The outputs for the samples from one number to another."""

_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Of the largest value: kernels for other sizes add in another order, those of a GPU with ten bits."""


ROOM = 16 * 2**20
"""Bytes of inputs and outputs up to which the whole batch is tried on every rank."""


Join = Callable[[Sequence[list[torch.Tensor]], int], Sequence[torch.Tensor | None]]
"""The whole's outputs, of both halves' and how many samples the first has; None for what cannot be told."""


@dataclass(frozen=True)
class Window:
    """The samples that are tried, and how many of them the first part has."""

    start: int
    stop: int
    first: int


def window(share: Share, bytes_of_a_sample: float) -> Window:
    """The whole batch, of which the first part is a rank's; else this rank's rows, two at the least."""
    if share.total * bytes_of_a_sample <= ROOM:
        return Window(0, share.total, share.sizes[0])
    start, stop = at_least_two(share)
    return Window(start, stop, (stop - start) // 2)


def at_least_two(share: Share) -> tuple[int, int]:
    """This rank's rows; beside a single one its neighbour's, as one sample shows no order and no pairs."""
    start, stop = share.mine.start, share.mine.stop
    if stop - start > 1:
        return start, stop
    return (0, 2) if start == 0 else (start - 1, stop)


def halves_differ(forward: Forward, tried: Window, join: Join) -> bool:
    """Whether the two parts' outputs, joined, are not the whole's. A forward of chance is not judged."""
    drew = False

    def outputs(low: int, high: int) -> list[torch.Tensor]:
        nonlocal drew
        with undone():
            state = torch.get_rng_state()
            found = [tensor.detach() for tensor in tensors_in(_run(forward, low, high))]
            drew = drew or not torch.equal(state, torch.get_rng_state())
            return found

    border = tried.start + tried.first
    whole = outputs(tried.start, tried.stop)
    halves = [outputs(tried.start, border), outputs(border, tried.stop)]
    if drew:
        return False
    joined = join(halves, tried.first)
    return len(joined) != len(whole) or not all(map(_close, joined, whole))


def _run(forward: Forward, low: int, high: int) -> object:
    """Without a graph, unless the model takes gradients in its forward (forces of an energy)."""
    try:
        with torch.no_grad():
            return forward(low, high)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        with torch.enable_grad():
            return forward(low, high)


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
            isinstance(part, (DropoutNd, nn.MultiheadAttention))
            or (isinstance(part, NormBase) and part.running_mean is not None)
        )
    ]
    for part in still:
        part.training = False
    try:
        yield
    finally:
        for part in still:
            part.training = True
