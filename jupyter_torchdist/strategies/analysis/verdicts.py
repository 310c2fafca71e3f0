"""Verdicts on a loss: how the strategy combines the losses of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from .lattice import Fact, Mixed, Noise, Place, Rows, Suspect, Total, Unknown
from .rules import IGNORED


class Judgement(Enum):
    """What a loss is over the batch: how the ranks' values combine to the single-device value."""

    MEAN = "mean"
    SUM = "sum"
    RATIO = "ratio"
    SAME = "same"
    AMBIGUOUS = "ambiguous"
    MIXED = "mixed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """``weight``: the weight of this rank's value (only for a mean or a ratio, else None).

    The single-device value is ``Σ weight_r · value_r / Σ weight_r`` for a mean and a ratio, ``Σ value_r`` for a sum,
    any rank's value for ``SAME``; the same holds for gradients. ``place``: the line of user code behind ``reason``.
    """

    judgement: Judgement
    reason: str
    weight: float | torch.Tensor | None = None
    place: Place | None = None
    notes: frozenset[str] = frozenset()


def judged(fact: Fact, loss: torch.Tensor) -> Verdict:
    """The verdict on a loss with this ``fact``."""
    kind, notes = fact.kind, fact.notes
    if isinstance(kind, Mixed):
        return Verdict(Judgement.MIXED, f"{kind.operation} {kind.why}", None, kind.place, notes)
    if isinstance(kind, Unknown):
        return Verdict(Judgement.UNKNOWN, f"{kind.operation} {kind.why}", None, kind.place, notes)
    if isinstance(kind, Rows):
        return Verdict(Judgement.UNKNOWN, "the loss has a value for each sample: reduce it", notes=notes)
    if (doubt := _doubt(fact)) is not None:
        why = f"{doubt.value:g} may be this rank's share of the batch or a constant: say -O loss=mean or loss=sum"
        return Verdict(Judgement.AMBIGUOUS, why, None, doubt.place, notes)
    if isinstance(kind, Total):
        return _total(kind, notes)
    drawn = " (it is made of random numbers)" if isinstance(kind, Noise) else ""
    return Verdict(Judgement.SAME, f"the loss does not depend on the batch{drawn}", notes=notes)


def _total(kind: Total, notes: frozenset[str]) -> Verdict:
    if kind.floored:
        return Verdict(Judgement.MIXED, "the loss is a sum with a lower bound", notes=notes)
    if kind.den is None:
        return Verdict(Judgement.SUM, "the loss is a sum over the samples", notes=notes)
    if kind.den.counts_samples:
        more = {IGNORED} if kind.den.full else set()
        return Verdict(Judgement.MEAN, "the loss is a mean over the samples", kind.den.value, notes=notes | more)
    return Verdict(Judgement.RATIO, "the loss is a weighted mean", kind.den.value, notes=notes)


def _doubt(fact: Fact) -> Suspect | None:
    """A number that might be a size; a float only matters to a sum (attention divides by the root of a width)."""
    sums = not isinstance(fact.kind, Total) or fact.kind.den is None
    return next((suspect for suspect in fact.suspects if (suspect.whole or sums) and not suspect.spread), None)
