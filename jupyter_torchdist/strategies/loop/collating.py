"""Whether a loader makes of a sample what it makes of it beside others: what pads to the longest of a batch does not.

Each rank that has its part of a batch collates that part alone. So the batches of a loop that is watched are collated
in other ways, too, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, StackDataset, Subset

from ...checkpoint import randomness
from ..core.scatter import rows_of, tensors_in
from .sampler_rng import drew

_PADS = "its batches are padded to the longest of their samples"
_OTHER = "its collate_fn makes other values of samples beside others"
_LOADED = "its dataset loads whole batches (__getitems__), and may pad them"
_MOST = 64
"""Samples that are collated by themselves at the most."""


def loads_batches(dataset: Dataset[Any]) -> str | None:
    """Why a dataset that is asked for all samples of a batch at once may make others of a part; None where not."""
    if isinstance(dataset, Subset):  # it asks another one for what it loads
        return loads_batches(dataset.dataset)
    if isinstance(dataset, StackDataset):
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return next(filter(None, map(loads_batches, parts)), None)
    if not hasattr(dataset, "__getitems__"):
        return None
    given = getattr(dataset, "format", None)
    if isinstance(given, Mapping) and "type" in given:  # of Hugging Face's: each sample by itself, but for transforms
        return _LOADED if given["type"] == "custom" else None
    return _LOADED


class Collate:
    """In place of a loader's ``collate_fn``: what it makes, and why parts would be others; None where they are not."""

    def __init__(self, own: Callable[[list[Any]], Any], rank: int, ranks: int) -> None:
        self.own, self._rank, self._ranks = own, rank, ranks
        self._tested = False
        self._objection: str | None = None
        """Of the first batch, in this process."""

    def __call__(self, samples: list[Any]) -> tuple[Any, str | None]:
        if self._tested:
            return self.own(samples), self._objection
        self._tested = True
        before = randomness.capture(randomness.ON_CPU)
        whole = self.own(samples)
        after = randomness.capture(randomness.ON_CPU)
        try:
            self._objection = self._found(samples, tensors_in(whole), by_chance=drew(before, after))
        finally:
            randomness.restore(after)
        return whole, self._objection

    def _found(self, samples: list[Any], whole: list[torch.Tensor], *, by_chance: bool) -> str | None:
        mine = rows_of(self._rank, self._ranks, len(samples))
        part = self._made(samples[mine]) if len(samples) >= self._ranks else None
        if part is not None and _shapes(part) != _shapes(whole):
            return _PADS
        if part is not None and not by_chance and not _are_rows(part, whole, mine, len(samples)):
            return _OTHER
        alone = [made for sample in samples[:_MOST] if (made := self._made([sample])) is not None]
        if any(_shapes(made) != _shapes(whole) for made in alone):
            return _PADS
        # All may have the same length by chance, as in the first of batches that are sorted by it.
        cut = _shorter(samples[-1])
        beside, by_itself = self._made([samples[0], cut]), self._made([cut])
        return _PADS if beside and by_itself and _shapes(beside) != _shapes(by_itself) else None

    def _made(self, samples: list[Any]) -> list[torch.Tensor] | None:
        """Tensors of fewer samples; None where they are not to be collated."""
        try:
            return tensors_in(self.own(samples))
        except Exception:  # noqa: BLE001  # whatever the user's function raises on samples that it was not made for
            return None


def _shapes(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    """But for the number of samples."""
    return [tensor.shape[1:] for tensor in tensors]


def _are_rows(part: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], mine: slice, samples: int) -> bool:
    if len(part) != len(whole):
        return False
    return all(
        one.shape == all_of[mine].shape and bool(((one == all_of[mine]) | (one != one)).all())
        for one, all_of in zip(part, whole, strict=True)
        if all_of.dim() and all_of.size(0) == samples
    )


def _shorter(sample: Any) -> Any:
    """A sample of which everything that has a length has half of it."""
    if isinstance(sample, Mapping):
        return {name: _shorter(part) for name, part in sample.items()}
    if isinstance(sample, tuple):
        return tuple(map(_shorter, sample))
    if isinstance(sample, list) and not all(isinstance(part, (int, float)) for part in sample):
        return [_shorter(part) for part in sample]
    try:
        return sample[: len(sample) // 2] if len(sample) > 1 else sample
    except (TypeError, IndexError, KeyError):
        return sample
