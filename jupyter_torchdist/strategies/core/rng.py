"""Random numbers: equal on all ranks outside a divided forward, different on each rank within.

Only torch's generators are switched. Python's and NumPy's generators stay equal: they decide *what* is computed (a
layer dropped by ``random.random()``). Ranks that compute different things would deadlock.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ...checkpoint import randomness

GOLDEN = 0x9E3779B97F4A7C15
"""Spreads neighbouring seeds over 64 bits (splitmix64)."""


def begin_alike(seed: int | None = None) -> int:
    """Seed every generator of every rank with one seed (random if none is given), and return it.

    User code may set other seeds afterwards. A random seed is as long as torch's own default seeds, which tells
    ``states.randoms`` that nobody seeded.
    """
    chosen = [1 << 52 | secrets.randbits(52) if seed is None else seed]
    dist.broadcast_object_list(chosen, src=0)
    torch.manual_seed(chosen[0])  # seeds the GPUs, too
    randomness.seed(chosen[0])
    return chosen[0]


class OwnStream:
    """Draw from the rank's own stream. Afterwards the common stream continues, one number further if any was drawn.

    The seed of the own stream comes from the state of the common one. So a forward that activation checkpointing
    repeats draws the same numbers, and runs with the same seed are equal. ``drew``: whether any rank's stream was used.
    """

    drew = False

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        self._common = present()
        seed = (zlib.crc32(self._common[0].numpy().tobytes()) + (self._rank + 1) * GOLDEN) % 2**63
        torch.default_generator.manual_seed(seed)
        if len(self._common) > 1:
            torch.cuda.manual_seed(seed)
        self._begun = present()

    def __exit__(self, *_: object) -> None:
        drew = any(not torch.equal(now, then) for now, then in zip(present(), self._begun, strict=False))
        _restore(self._common)
        if drew:
            OwnStream.drew = True
            torch.rand(())


class Noise:
    """Called after each step: says once that the model draws random numbers."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, False

    def __call__(self, *_: object) -> None:
        if OwnStream.drew and not self._said:
            self._said = True
            self._say(
                "the model draws random numbers (dropout, noise): each rank draws its own, so the losses are not those "
                "of one device"
            )


@contextmanager
def as_then(states: list[torch.Tensor]) -> Iterator[None]:
    """Set the generators to ``states`` (from ``present()``) within, and restore the current states afterwards."""
    now = present()
    _restore(states)
    try:
        yield
    finally:
        _restore(now)


@contextmanager
def undone() -> Iterator[None]:
    """Restore the states of all generators afterwards, as if nothing had been drawn within."""
    state = randomness.capture()
    try:
        yield
    finally:
        randomness.restore(state)


def present() -> list[torch.Tensor]:
    """The states of torch's generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _restore(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
