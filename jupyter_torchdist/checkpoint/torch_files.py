"""Checkpoints in one file of ``torch.save``: those of Lightning's Trainer, of ``Fabric.save``, and a state dict alone.

Lightning (``pytorch/trainer/connectors/checkpoint_connector.py``, 2.6): ``state_dict``, ``optimizer_states`` and
``lr_schedulers`` (lists), ``global_step``, ``epoch``. Fabric: what the user named, with the ``state_dict()`` of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..protocol.errors import CheckpointError
from .optimizer_states import by_place
from .sources import Content, Whole
from .structures import apart

_LIGHTNING = {"state_dict", "pytorch-lightning_version"}


def read(file: Path, load: Callable[[Path], Any]) -> Whole:
    """The checkpoint in ``file``. Raises ``CheckpointError`` if it is none."""
    found = load(file)
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{file} holds a {type(found).__name__}, not a checkpoint",
            "load a file that Lightning, Fabric.save or torch.save(model.state_dict()) wrote",
        )
    tensors: dict[str, torch.Tensor] = {}
    content = Content(None, {}, {})
    for label, kind, state in _lightning(found) if found.keys() >= _LIGHTNING else _parts(found):
        if label == "step" and isinstance(state, int):
            content.step = state
            continue
        skeleton = by_place(state) if kind == "optimizer" else dict(state) if kind == "model" else state
        content.kinds[label] = kind
        content.objects[label] = skeleton if kind == "value" else apart(skeleton, label, tensors)
    return Whole(file, content, tensors)


Part = tuple[str, str, Any]
"""Name, kind and state of one object."""


def _lightning(found: Mapping[str, Any]) -> Iterator[Part]:
    yield "step", "value", found["global_step"]
    yield "epoch", "value", found["epoch"]
    yield "model", "model", found["state_dict"]
    for kind, states in (("optimizer", "optimizer_states"), ("scheduler", "lr_schedulers")):
        for number, state in enumerate(found.get(states, ())):
            yield kind if number == 0 else f"{kind}_{number}", kind, state


def _parts(found: Mapping[str, Any]) -> Iterator[Part]:
    if found and all(isinstance(value, torch.Tensor) for value in found.values()):
        yield "model", "model", found
        return
    for name, state in found.items():
        yield str(name), _kind(state), state


def _kind(state: Any) -> str:
    if not isinstance(state, Mapping):
        return "value"
    if {"state", "param_groups"} <= state.keys():
        return "optimizer"
    if state and all(isinstance(value, torch.Tensor) for value in state.values()):
        return "model"
    return "scheduler" if {"last_epoch", "_step_count"} <= state.keys() else "stateful"
