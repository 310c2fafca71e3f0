"""Checks on the kinds and suspects that rules give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace

import torch

from .constants import adds_up
from .lattice import Kind, Rows, Suspect, Unknown
from .numerals import user_place
from .rules import Call


def _sound(call: Call, tensor: torch.Tensor, kind: Kind) -> Kind:
    """``kind``, or ``Unknown`` if it does not fit the shape: the rule does not support this form of its operation."""
    if isinstance(kind, Rows) and (tensor.dim() <= kind.dim or tensor.size(kind.dim) != len(kind.owners)):
        return Unknown(call.name, "could not be followed (its shape)", user_place())
    return kind


def _still(suspects: frozenset[Suspect], kind: Kind, call: Call) -> frozenset[Suspect]:
    """Suspects of the result. Copies, one for each sample, are harmless within rows, but a sum of them is not."""
    if isinstance(kind, Rows):
        return frozenset(suspect for suspect in suspects if not suspect.spread)
    if adds_up(call):
        return frozenset(replace(suspect, spread=False) for suspect in suspects)
    return suspects


def tensors_within(thing: object) -> Iterable[torch.Tensor]:
    """All tensors of a batch, in any nesting of containers."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for part in thing.values():
            yield from tensors_within(part)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for part in thing:
            yield from tensors_within(part)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for item in fields(thing):
            yield from tensors_within(getattr(thing, item.name))
    elif isinstance(getattr(thing, "data", None), Mapping):  # a UserDict, as Transformers' BatchEncoding
        yield from tensors_within(thing.data)  # type: ignore[attr-defined]
