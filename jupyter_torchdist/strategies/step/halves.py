"""A numerical check beside ``batchwise``: two parts of a batch must give the same outputs as the undivided batch.

``batchwise`` does not see where a number in Python comes from: ``h / len(h)``, ``if len(h) >= 8``, a counter in an
attribute, a statistic of NumPy. The values show it, if one part has the rows of a rank and both parts together are the
global batch. For a batch that is too large, fewer rows are used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...torch_private.places import DropoutNd, NormBase
from ..core.rng import OwnStream, undone
from ..core.scatter import BatchShard as Share
from ..core.scatter import tensors_in

Forward = Callable[[int, int], object]
"""``forward(low, high)``: the outputs for the samples from ``low`` to ``high``."""

_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Tolerance relative to the largest value: kernels for other sizes add in another order, TF32 with ten bits."""


ROOM = 16 * 2**20
"""Up to this many bytes of inputs and outputs, every rank tries the global batch."""


Join = Callable[[Sequence[list[torch.Tensor]], int], Sequence[torch.Tensor | None]]
"""``join(halves, first)``: the joined outputs, where the first half has ``first`` samples; None: cannot be joined."""


@dataclass(frozen=True)
class Window:
    """The range of samples in the check, and the number of samples in the first part."""

    start: int
    stop: int
    first: int


def window(share: Share, bytes_of_a_sample: float) -> Window:
    """The global batch, with the rows of a rank as first part; if too large, this rank's rows (at least two)."""
    if share.total * bytes_of_a_sample <= ROOM:
        return Window(0, share.total, share.sizes[0])
    start, stop = at_least_two(share)
    return Window(start, stop, (stop - start) // 2)


def at_least_two(share: Share) -> tuple[int, int]:
    """This rank's rows, with a neighbour if there is only one: one sample shows no order and no pairs."""
    start, stop = share.mine.start, share.mine.stop
    if stop - start > 1:
        return start, stop
    return (0, 2) if start == 0 else (start - 1, stop)


def halves_differ(forward: Forward, tried: Window, join: Join) -> bool:
    """Whether the joined outputs of the parts differ from the undivided outputs. False if random numbers are drawn.

    Each part draws its own numbers, as ranks do. So notes that depend on them differ, too.
    """
    drew = False

    def outputs(low: int, high: int) -> list[torch.Tensor]:
        nonlocal drew
        with undone(), OwnStream(low):
            state = torch.get_rng_state()
            found = [tensor.detach() for tensor in tensors_in(without_grad(lambda: forward(low, high)))]
            drew = drew or not torch.equal(state, torch.get_rng_state())
            return found

    border = tried.start + tried.first
    whole = outputs(tried.start, tried.stop)
    halves = [outputs(tried.start, border), outputs(border, tried.stop)]
    if drew:
        return False
    joined = join(halves, tried.first)
    return len(joined) != len(whole) or not all(map(_close, joined, whole))


def without_grad(forward: Callable[[], object]) -> object:
    """Run without a graph, unless the forward computes gradients itself (forces from an energy)."""
    try:
        with torch.no_grad():
            return forward()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        with torch.enable_grad():
            return forward()


def _close(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    if one is None:
        return True
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    if not one.is_floating_point():
        return bool((one != other).float().mean() < 0.01)  # ties may be resolved differently
    scale = other.abs().nan_to_num(posinf=0.0).max().clamp(min=1e-6)
    return torch.allclose(one, other, rtol=0.0, atol=float(scale) * _CLOSE.get(one.dtype, 5e-2), equal_nan=True)


@contextlib.contextmanager
def without_chance(module: nn.Module) -> Iterator[None]:
    """Disable dropout; batch normalisation (synchronised elsewhere) uses its running statistics."""
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
