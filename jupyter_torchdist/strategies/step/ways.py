"""How the full output of a forward is combined from the parts of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class JoinedRows:
    """The full output is the concatenation of the ranks' parts along ``dim``, with any number of rows per sample.

    ``turns``: along ``dim`` the samples repeat, with one row each in every repetition (time in front).
    ``single``: the trial had one row per sample, so the order of several rows is unknown.
    """

    dim: int
    turns: bool = False
    single: bool = False


@dataclass(frozen=True)
class AddedParts:
    """The full output is the sum of the ranks' outputs; for a ``mean``, weighted by the number of samples.

    ``counted``: weighted by the number of targets that count: a cross entropy leaves out ignored targets.
    """

    mean: bool
    counted: bool = False


@dataclass(frozen=True)
class SameEverywhere:
    """The output does not depend on the batch: it is equal on every rank."""


Way = JoinedRows | AddedParts | SameEverywhere


@dataclass(frozen=True)
class Found:
    """What a trial has found. ``ways``: of the outputs; ``kept``: of the tensors that the forward keeps in ``places``.

    ``places``: attributes of the model and containers of the cell; ``others``: those that hold no samples; ``counts``:
    those that hold an integer that changes with fewer samples.
    """

    ways: tuple[Way, ...]
    places: frozenset[str] = frozenset()
    kept: tuple[Way, ...] = ()
    others: frozenset[str] = field(default=frozenset(), compare=False)
    counts: frozenset[str] = field(default=frozenset(), compare=False)


def joined(way: object, parts: tuple[torch.Tensor, torch.Tensor], samples: tuple[int, int]) -> torch.Tensor | None:
    """The joined output of two parts with these numbers of samples; None if it cannot be joined."""
    one, other = parts
    if isinstance(way, JoinedRows) and way.turns:
        in_turns = [part.unflatten(way.dim, (-1, count)) for part, count in zip(parts, samples, strict=True)]
        return torch.cat(in_turns, way.dim + 1).flatten(way.dim, way.dim + 1)
    if isinstance(way, JoinedRows):
        return torch.cat(parts, way.dim)
    if isinstance(way, AddedParts) and not way.counted:
        first = samples[0] / sum(samples)
        return first * one + (1 - first) * other if way.mean else one + other
    return one if isinstance(way, SameEverywhere) else None
