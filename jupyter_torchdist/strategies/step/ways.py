"""How the full output of a forward is combined from the parts of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field


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
