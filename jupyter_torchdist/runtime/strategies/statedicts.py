"""``state_dict``, ``load_state_dict``, ``zero_grad`` and ``torch.save`` of user code, as on one device.

The state of a sharded model is given whole (FULL_STATE_DICT), and a whole one is taken. Every rank calls
``torch.save``, as every rank runs the cell; the first one writes, aside and renamed, and the others wait for it when
they load what it saved.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def whole_state(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``Module.state_dict`` in full tensors; all ranks call it when the model is sharded."""
    state = original(module, *args, **kwargs)
    nested = bool(args) or "destination" in kwargs  # of a module within the one that user code asks
    if not nested:
        for name, value in state.items():
            if isinstance(value, DTensor):
                state[name] = value.full_tensor().detach()
    return state


def taken_state(
    original: Callable[..., Any], module: nn.Module, state: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """``Module.load_state_dict`` of full tensors into a sharded model."""
    own = {name: value for name, value in _named(module) if isinstance(value, DTensor)}
    placed = {
        name: distribute_tensor(value, own[name].device_mesh, own[name].placements, src_data_rank=None)
        if name in own and isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        else value
        for name, value in state.items()
    }
    for attribute in ("_metadata",):
        if hasattr(state, attribute):
            placed = _with(placed, attribute, getattr(state, attribute))
    return original(module, placed, *args, **kwargs)


def cleared_gradients(original: Callable[..., Any], module: nn.Module, set_to_none: bool = True) -> None:
    """``Module.zero_grad``. Between forward and backward a sharded model shows whole parameters; shards are meant."""
    original(module, set_to_none)
    parts = set(module.modules())
    for unit in module.modules():
        group = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        for sharded in group.fsdp_params if group is not None else ():
            gradient = sharded.sharded_param.grad
            if sharded._module_info.module in parts and gradient is not None:
                if set_to_none:
                    sharded.sharded_param.grad = None
                else:
                    gradient.zero_()


class _State(dict[str, Any]):
    """A state dict may have attributes."""


def _with(state: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    changed = _State(state)
    setattr(changed, name, value)
    return changed


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


class Files:
    """What ``torch.save`` wrote, so that ``torch.load`` finds it whole on every rank."""

    def __init__(self) -> None:
        self._saved: Counter[str] = Counter()

    def save(self, original: Callable[..., Any], value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        """To a path: once, by the first rank. To an open file: as ever."""
        if not isinstance(file, (str, os.PathLike)):
            return original(value, file, *args, **kwargs)
        path = os.path.abspath(file)
        self._saved[path] += 1
        if dist.get_rank() != 0:
            return None
        aside = f"{path}.part"
        try:
            original(value, aside, *args, **kwargs)
            os.replace(aside, path)
        finally:
            Path(aside).unlink(missing_ok=True)
            _store().set(_key(path, self._saved[path]), b"1")
        return None

    def load(self, original: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
        """From a path that user code saved to: when the first rank has written it."""
        if isinstance(file, (str, os.PathLike)) and (count := self._saved[os.path.abspath(file)]):
            _store().wait([_key(os.path.abspath(file), count)])
        return original(file, *args, **kwargs)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(path: str, count: int) -> str:
    return f"torchdist/saved/{count}/{path}"
