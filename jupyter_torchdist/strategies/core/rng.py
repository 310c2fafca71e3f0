"""Random numbers: the same on all ranks outside a divided forward, the rank's own within.

Only torch's generators change hands. Python's and NumPy's stay common: they decide *what* is computed (a layer that is
dropped by ``random.random()``), and ranks that compute different things wait for each other for ever.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ...checkpoint import randomness

GOLDEN = 0x9E3779B97F4A7C15
"""Spreads neighbouring seeds over 64 bits (splitmix64)."""


def begin_alike(seed: int | None = None) -> int:
    """One seed, random where none is given, for every generator of every rank; gives it.

    Seeds that user code sets afterwards hold as they are. A random one is as long as those that torch takes by itself:
    nobody seeded (``states.randoms``).
    """
    chosen = [1 << 52 | secrets.randbits(52) if seed is None else seed]
    dist.broadcast_object_list(chosen, src=0)
    torch.manual_seed(chosen[0])  # the GPUs', too
    randomness.seed(chosen[0])
    return chosen[0]


class OwnStream:
    """Draw from a stream of the rank's own; afterwards the common one is where it was, a number further if any was.

    The own stream begins with the common one's state: a forward that activation checkpointing repeats under the state
    of the first draws the same numbers, and a run with the same seed is the same run.
    """

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
            torch.rand(())


@contextmanager
def as_then(states: list[torch.Tensor]) -> Iterator[None]:
    """What is drawn within begins with the common stream as it was at ``present()``; afterwards it is that of now."""
    now = present()
    _restore(states)
    try:
        yield
    finally:
        _restore(now)


@contextmanager
def undone() -> Iterator[None]:
    """What is drawn within, by whichever generator, is as if it had not been."""
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
