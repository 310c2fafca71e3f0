"""How the whole output of a forward is made of the parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JoinedRows:
    """The whole output is the ranks' parts one after the other along ``dim``, as many rows a sample as there are.

    ``turns``: along ``dim`` all samples come in turn, with one row each, as often as there are rows (time in front).
    ``single``: there was one row a sample, which says nothing of the order of more.
    """

    dim: int
    turns: bool = False
    single: bool = False


@dataclass(frozen=True)
class AddedParts:
    """The whole output is the sum of the ranks': of means, each counted with its samples.

    ``counted``: with the targets that took part instead, as a cross entropy leaves out those to be ignored.
    """

    mean: bool
    counted: bool = False


@dataclass(frozen=True)
class SameEverywhere:
    """Nothing of the batch is in the output: every rank has the same."""


Way = JoinedRows | AddedParts | SameEverywhere
