"""Sends values that forwards change in a model's layers from the ranks of their stages to all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...protocol.errors import StrategyError
from ...torch_private.places import FakeTensor
from ..core.scatter import map_tensors, tensors_in
from ..core.side_effects import Belongings
from .wires import Wires


def kept(belongings: Belongings) -> list[str]:
    """Attributes and buffers that a forward changed. Raises ``StrategyError`` for values that it stores elsewhere, that
    have a graph, or that cannot be pickled.
    """
    changed = belongings.changed()
    bound = [name for name, one in changed.items() if _has_graph(one) or not _can_be_sent(one)]
    for where in (*belongings.noted(), *bound):
        raise left_behind(where)
    return list(changed)


def hand_out(root: nn.Module, keepers: Mapping[str, int], wires: Wires) -> None:
    """Send attributes and buffers from the ranks that keep them to all. All ranks must call it.

    Raises ``StrategyError`` if one was computed from another stage's values.
    """
    for keeper in sorted(set(keepers.values())):
        names = [name for name, rank in keepers.items() if rank == keeper]
        values = [_attribute(root, name) for name in names] if wires.rank == keeper else []
        without = next((name for name, one in zip(names, values, strict=False) if _has_no_values(one)), None)
        found = wires.of_owner(without or values, keeper)
        if isinstance(found, str):
            raise left_behind(found)
        if wires.rank != keeper:
            for name, value in zip(names, found, strict=True):
                _put(root, name, map_tensors(value, lambda tensor: tensor.to(wires.device)))


def left_behind(where: str) -> StrategyError:
    """The error for a value that cannot be sent to other ranks."""
    return StrategyError(
        f"the model's forward stores something in {where}, which the ranks of other stages do not have",
        "return it from the model's forward, or use --strategy ddp or fsdp",
    )


def _has_graph(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(value))


def _has_no_values(value: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors_in(value))


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001  # whatever the value's own code raises
        return False
    return True


def owner_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module of an attribute or a buffer, and its name in this module."""
    path, _, own = name.rpartition(".")
    return root.get_submodule(path), own


def _attribute(root: nn.Module, name: str) -> Any:
    module, own = owner_of(root, name)
    return getattr(module, own, None)


def _put(root: nn.Module, name: str, value: Any) -> None:
    module, own = owner_of(root, name)
    buffer = module._buffers.get(own)
    if buffer is None:
        setattr(module, own, value)
    else:
        with torch.no_grad():
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                buffer.data = value
