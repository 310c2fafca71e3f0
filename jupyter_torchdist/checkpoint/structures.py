"""Takes a structure of tensors and other values apart, and puts it together again.

torch.distributed.checkpoint gets a flat dictionary of tensors by name. Everything else remains in a *skeleton*: the
same structure with a ``Slot`` instead of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a skeleton; ``name`` is the name of the tensor."""

    name: str


def apart(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The skeleton of ``value``. Its tensors are added to ``tensors``; their names begin with ``name``.

    Dictionaries, lists and tuples are taken apart. Any other value remains unchanged, and will be pickled.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return Slot(name)
    if type(value) is dict:
        return {key: apart(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(apart(item, f"{name}.{index}", tensors) for index, item in enumerate(value))
    return value


def together(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The structure of a skeleton, with the tensors in its slots."""
    return mapped(skeleton, lambda slot: tensors[slot.name])


def slots(skeleton: Any) -> list[Slot]:
    """All slots of a skeleton, in order."""
    found: list[Slot] = []
    mapped(skeleton, found.append)
    return found


def mapped(skeleton: Any, change: Callable[[Slot], Any]) -> Any:
    """The skeleton with each slot replaced by ``change(slot)``."""
    if isinstance(skeleton, Slot):
        return change(skeleton)
    if type(skeleton) is dict:
        return {key: mapped(item, change) for key, item in skeleton.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(mapped(item, change) for item in skeleton)
    return skeleton
