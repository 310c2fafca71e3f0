"""The objects that can be saved: their kinds, their names, their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..protocol.errors import CheckpointError
from . import optimizer_states, position, structures
from .optimizer_states import Names, Sizes

OWN = ("loader", "generator")
"""Kinds with a separate state on each rank. Other objects are equal on all ranks, or divided among them."""


def kind_of(value: object) -> str:
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, LRScheduler):
        return "scheduler"
    if isinstance(value, torch.Generator):
        return "generator"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "stateful"
    return "loader" if isinstance(value, DataLoader) else "value"


def named(objects: tuple[object, ...], given: Mapping[str, object]) -> dict[str, Any]:
    """All objects by name. Objects without a name are named by their kind: ``model``, ``optimizer``, ``model_1``, …

    Raises ``CheckpointError`` for a plain value without a name, and for a name that is used twice.
    """
    result: dict[str, Any] = {}
    for value in objects:
        kind = kind_of(value)
        if kind == "value":
            raise CheckpointError(
                f"a {type(value).__name__} needs a name in the checkpoint",
                f"td.save(directory, …, name={value!r:.40})",
            )
        label = type(value).__name__.lower() if kind == "stateful" else kind
        name, count = label, 0
        while name in result:
            count += 1
            name = f"{label}_{count}"
        result[name] = value
    for name, value in given.items():
        if name in result:
            raise CheckpointError(
                f"two objects are called {name!r}", "give both a name: td.save(directory, first=…, second=…)"
            )
        result[name] = value
    return result


def models_of(objects: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {name: value for name, value in objects.items() if isinstance(value, nn.Module)}


@dataclass
class Captured:
    """The state of one rank: skeletons, and the tensors for their slots, not yet copied."""

    common: dict[str, Any]
    """Skeletons of the objects that are equal on all ranks or divided among them."""
    own: dict[str, Any]
    """State of this rank alone, by name."""
    tensors: dict[str, torch.Tensor]
    parameters: set[str]
    """Names of tensors that are surely equal on all ranks that have them in full: any of these ranks may write them."""


def capture(objects: Mapping[str, Any]) -> Captured:
    """The current state of all ``objects``. Tensors are not copied."""
    names = optimizer_states.parameter_names(models_of(objects))
    captured = Captured({}, {}, {}, set())
    for label, value in objects.items():
        kind = kind_of(value)
        if kind in OWN:
            captured.own[label] = _own_state(label, value)
            continue
        tensors: dict[str, torch.Tensor] = {}
        captured.common[label] = _skeleton(label, kind, value, names, tensors)
        if kind == "optimizer":
            captured.parameters |= set(tensors)
        elif kind == "model":
            captured.parameters |= {
                f"{label}.{optimizer_states.clean(n)}" for n, _ in optimizer_states.plain(value).named_parameters()
            }
        captured.tensors |= tensors
    return captured


def _skeleton(label: str, kind: str, value: Any, names: Names, tensors: dict[str, torch.Tensor]) -> Any:
    if kind == "model":
        return structures.apart(dict(_model_state(label, value)), label, tensors)
    if kind == "optimizer":
        return optimizer_states.capture(value, label, names, tensors)
    if kind in ("scheduler", "stateful"):
        return structures.apart(dict(value.state_dict()), label, tensors)
    return structures.apart(value, label, tensors)


def _model_state(label: str, model: nn.Module) -> dict[str, Any]:
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise CheckpointError(
            f"{label} is sharded by FullyShardedDataParallel (FSDP1), whose parts have no names of their own",
            "shard it with torch.distributed.fsdp.fully_shard",
        )
    return get_model_state_dict(model)


def _own_state(label: str, value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    where = position.position_of(value)
    if where is None:
        raise CheckpointError(
            f"the position of the loop over {label} is unknown: the loop began before its batches were counted",
            "call td.follow(loader) before the loop; td.load(directory, …, loader) does it too",
        )
    return where.saved()


class Restoring:
    """Objects that are being loaded from one checkpoint: first checked, then read, then completed (``finish``)."""

    def __init__(self, objects: Mapping[str, Any], skeletons: Mapping[str, Any], sizes: Sizes, where: str) -> None:
        self.objects, self.skeletons, self.where = objects, skeletons, where
        self.targets: dict[str, torch.Tensor] = {}
        """Tensors to read into, by their names in the checkpoint."""
        self.values: dict[str, Any] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._optimizers: list[optimizer_states.RestoringOptimizer] = []
        names = optimizer_states.parameter_names(models_of(objects))
        for label, value in objects.items():
            kind = kind_of(value)
            if kind == "model":
                self._begin_model(label, value, sizes)
            elif kind == "optimizer":
                restoring = optimizer_states.RestoringOptimizer(value, label, names, skeletons[label], sizes)
                self._optimizers.append(restoring)
                self.targets |= restoring.targets
            elif kind not in OWN:
                self._begin_value(label, sizes)
        for label in skeletons:
            if label not in objects:
                self._begin_value(label, sizes)

    def _begin_model(self, label: str, model: nn.Module, sizes: Sizes) -> None:
        state = _model_state(label, model)
        skeleton = self.skeletons[label]
        if difference := differences(state, skeleton, sizes):
            raise CheckpointError(
                f"{self.where} was saved from a different {label}: {difference[0]}"
                + (f" (and {len(difference) - 1} more differences)" if len(difference) > 1 else ""),
                "build the model in the same way as when it was saved; nothing was loaded",
            )
        if meta := [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
            raise CheckpointError(
                f"{label} has no memory yet: {meta[0]} is on the meta device",
                "materialise it first: model.to_empty(device=td.device)",
            )
        self._states[label] = state
        for name, slot in skeleton.items():
            if isinstance(slot, structures.Slot):
                self.targets[slot.name] = state[name]

    def _begin_value(self, label: str, sizes: Sizes) -> None:
        for slot in structures.slots(self.skeletons[label]):
            self.targets[slot.name] = optimizer_states.empty(sizes, slot)

    def finish(self) -> None:
        """Give the objects what was read."""
        for label, state in self._states.items():
            extra = {name: v for name, v in self.skeletons[label].items() if not isinstance(v, structures.Slot)}
            set_model_state_dict(self.objects[label], {**state, **extra})
        for restoring in self._optimizers:
            restoring.finish()
        for label, skeleton in self.skeletons.items():
            kind = kind_of(self.objects[label]) if label in self.objects else "value"
            if kind in ("scheduler", "stateful"):
                self.objects[label].load_state_dict(structures.together(skeleton, self.targets))
            elif kind == "value":
                self.values[label] = structures.together(skeleton, self.targets)


def differences(state: Mapping[str, Any], skeleton: Mapping[str, Any], sizes: Sizes) -> list[str]:
    """The differences between a model and a checkpoint, in words."""
    found = []
    for name, value in state.items():
        if name not in skeleton:
            found.append(f"it has no {name}")
            continue
        slot = skeleton[name]
        if isinstance(value, torch.Tensor) and isinstance(slot, structures.Slot):
            there, here = tuple(sizes[slot.name][0]), tuple(value.size())
            if there != here:
                found.append(f"{name} has the shape {there} in the checkpoint and {here} in the model")
    return found + [f"{name} is in the checkpoint but not in the model" for name in skeleton if name not in state]
