"""Whether a loader collates a sample to the same values alone and with others. Padding to the longest does not.

A rank that has its part of a batch collates only this part. So the first batch of a watched loop is also collated in
parts, and the results are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, StackDataset, Subset, default_collate

from ...checkpoint import randomness
from ..core.scatter import rows_of, tensors_in
from .loading_state import LoadingState
from .sampler_rng import Drawn, drew

_PADS = "its batches are padded to the longest of their samples"
_OTHER = "its collate_fn makes other values of samples beside others"
_LOADED = "its dataset loads whole batches (__getitems__), and may pad them"
_MOST = 64
"""The maximum number of samples that are collated one by one."""
_LOOKS = 4
"""In how many batches of a process it is seen whether random numbers are drawn."""


def loads_batches(dataset: Dataset[Any]) -> str | None:
    """Why a dataset that loads all samples of a batch at once may give other values for a part; None if it does not."""
    if isinstance(dataset, Subset):  # it loads samples from another dataset
        return loads_batches(dataset.dataset)
    if isinstance(dataset, StackDataset):
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return next(filter(None, map(loads_batches, parts)), None)
    if not hasattr(dataset, "__getitems__"):
        return None
    given = getattr(dataset, "format", None)
    if isinstance(given, Mapping) and "type" in given:  # Hugging Face: one sample at a time, except transforms
        return _LOADED if given["type"] == "custom" else None
    return _LOADED


class Collate:
    """In place of a loader's ``collate_fn``: gives its batch, and why parts would differ (None if they do not)."""

    def __init__(self, own: Callable[[list[Any]], Any], rank: int, ranks: int, drawing: Drawn) -> None:
        """``drawing``: what changes from the loading of the samples to the end of ``own``."""
        self.own, self._rank, self._ranks, self.drawing = own, rank, ranks, drawing
        self._tested = own is default_collate  # it stacks, so all samples have the same shape
        self._looks = _LOOKS
        self._objection: str | None = None
        """What was found for the first batch in this process."""

    def __call__(self, samples: list[Any]) -> tuple[Any, str | None]:
        batch, objection = self._collated(samples)
        if self._looks:
            self._looks -= 1
            self._objection = objection = objection or self.drawing.objection()
        return batch, objection

    def begins(self) -> None:
        """The samples of a batch are about to be loaded, in this process."""
        if self._looks:
            self.drawing.begin()

    def _collated(self, samples: list[Any]) -> tuple[Any, str | None]:
        if self._tested:
            return self.own(samples), self._objection
        self._tested = True
        before = randomness.capture(randomness.ON_CPU)
        whole = self.own(samples)
        after, left = randomness.capture(randomness.ON_CPU), LoadingState(self.own).capture()
        try:
            self._objection = self._found(samples, tensors_in(whole), by_chance=drew(before, after))
        finally:
            randomness.restore(after)
            left.restore()
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
        # All may have the same length by chance, for example when batches are sorted by length.
        cut = _shorter(samples[-1])
        beside, by_itself = self._made([samples[0], cut]), self._made([cut])
        return _PADS if beside and by_itself and _shapes(beside) != _shapes(by_itself) else None

    def _made(self, samples: list[Any]) -> list[torch.Tensor] | None:
        """The tensors collated from ``samples``; None if they cannot be collated."""
        try:
            return tensors_in(self.own(samples))
        except Exception:  # noqa: BLE001  # the user's function may raise anything on unusual samples
            return None


def _shapes(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    """The shapes without the dimension of the samples."""
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
    """The sample with half the length in all its parts that have a length."""
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
