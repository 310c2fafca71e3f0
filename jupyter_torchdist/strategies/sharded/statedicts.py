"""``state_dict``, ``load_state_dict``, ``zero_grad`` and ``torch.save`` of user code, as on one device.

The state dict of a sharded model has full tensors (FULL_STATE_DICT), and loading takes full tensors. Every rank runs
the cell, so every rank calls ``torch.save``. Rank 0 writes a temporary file and renames it; the other ranks wait for
the file when they load it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...torch_private.places import AsyncCollectiveTensor
from ...torch_private.tensors import storage_references
from ...usercode.frames import is_users
from ..core import dtensors
from ..core.optimizers import placed_like
from ..core.ownership import own_class
from ..core.patches import Patches
from ..core.scatter import map_tensors
from ..core.side_effects import is_users_own
from .aliases import Alias
from .dtensor_data import DATA, PLAIN_DATA
from .files import Files, _is_elsewhere, _parameters
from .unsharded import groups_of, units_in
from .writable_views import WritableView


def install(patches: Patches, lent: Lent, *, whole: bool = True) -> None:
    """Make sharded parameters and states look as on one device while user code runs.

    ``whole`` false: ``state_dict`` returns shards, for ``-O state_dict_type=SHARDED_STATE_DICT``.
    """
    patches.give(DTensor, "data", DATA)
    patches.give(nn.Parameter, "data", PLAIN_DATA)
    for name in NUMBERS:
        patches.give(DTensor, name, lent.reads(getattr(torch.Tensor, name)))
    patches.give(DTensor, "numpy", lent.numpy)
    patches.around(DTensor, "__repr__", lent.shown)
    patches.give(DTensor, "__deepcopy__", _copied)
    around, files = patches.around, Files(whole=whole)
    if whole:
        around(torch.optim.Optimizer, "state_dict", whole_optimizer_state)
        around(nn.Module, "state_dict", lent.state)
        around(nn.Module, "load_state_dict", lent.before)
        around(nn.Module, "named_parameters", lent.before)
        patches.hook(register_optimizer_step_pre_hook(lent.step))
    around(torch.optim.Optimizer, "load_state_dict", taken_optimizer_state)
    around(nn.Module, "load_state_dict", taken_state)
    around(nn.Module, "zero_grad", cleared_gradients)
    around(torch, "save", files.save)
    around(torch, "load", files.load)


_OURS = 2
"""References to the memory of a tensor that nobody else has."""


class Lent:
    """Full tensors that ``state_dict`` and ``numpy`` returned. On one device they share the weights' memory.

    Values that a cell writes to them are copied to the shards before these are used: in the next forward, step or read.
    Until the next forward or step, more values may be written to those that the cell still has.
    A state dict that a cell keeps for longer is only a copy, unlike on one device; the user is told.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lent: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Each full tensor with its parameter, and the values of this rank's part when it was lent."""
        self._given: list[tuple[weakref.ref[torch.Tensor], nn.Module]] | None = []
        """The first tensor of each state dict that a cell may have kept; None after the user was told."""

    def state(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """``Module.state_dict`` in full tensors. All ranks must call it when the model is sharded."""
        nested = bool(args) or "destination" in kwargs  # a submodule of the one that user code calls
        if nested:
            return original(module, *args, **kwargs)
        self.keep(for_now=True)
        state = original(module, *args, **kwargs)
        if not _as_they_are:
            own, prefix = _parameters(module), kwargs.get("prefix", "")
            known: dict[torch.Tensor, torch.Tensor] = {}  # tied weights share one tensor
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue  # extra state of a module
                parameter = own.get(name.removeprefix(prefix), value)
                if parameter not in known and (isinstance(value, DTensor) or _is_copy(value, parameter)):
                    known[parameter] = self._lend(parameter, whole(value))
                if parameter in known:
                    state[name] = known[parameter].detach()
            first = next((value for value in state.values() if isinstance(value, torch.Tensor)), None)
            if self._given is not None and first is not None:
                self._given.append((weakref.ref(first), module))
        return state

    def _lend(self, parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        if not parameter.is_meta:
            self._lent.append((full, parameter, dtensors.local(parameter).detach().clone()))
        return full

    def reads(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A method of sharded tensors that reads numbers of the full tensor. All ranks must call it."""

        def read(tensor: DTensor, *args: Any) -> Any:
            self.keep(for_now=True)
            return own(whole(tensor), *args)

        return read

    def shown(self, original: Callable[..., str], tensor: DTensor, **kwargs: Any) -> str:
        """``repr`` of a sharded tensor: the full tensor for user code, on all ranks; else (in errors) the shard."""
        if kwargs or not is_users(sys._getframe(2).f_code.co_filename):
            return original(tensor, **kwargs)
        self.keep(for_now=True)
        full = whole(tensor)
        return repr(nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full)

    @property
    def numpy(self) -> Callable[..., Any]:
        """``Tensor.numpy`` of sharded tensors. On one device the array shares their memory, so it is lent."""

        def numpy(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
            return self._lend(tensor, whole(tensor)).numpy(*args, **kwargs)

        return numpy

    def before(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of functions that read or load parameters."""
        self.keep(for_now=True)
        return original(*args, **kwargs)

    def step(self, *_: object) -> None:
        """An optimizer is about to change the weights."""
        self.keep()
        for first, module in self._given or ():
            if (
                (kept := first()) is not None
                and not isinstance(kept, Alias)
                and any(map(_is_elsewhere, _parameters(module).values()))
            ):
                name = own_class(module).__name__
                self._say(
                    f"{name}.state_dict() returns a copy of the sharded weights: the copy that the cell keeps here "
                    "does not follow the training, and writing to it does not change the model; call it again instead"
                )
                self._given = None
                return
        if self._given:
            self._given.clear()

    def keep(self, *, for_now: bool = False) -> None:
        """Copy values written to lent tensors into the shards, without communication. ``for_now``: the weights stay as
        they are, and tensors that the cell still has remain lent."""
        lent, self._lent = self._lent, []
        for full, parameter, was in lent:
            now = self._keep(full, parameter, was)
            if for_now and storage_references(full) > _OURS and not isinstance(parameter, WritableView):
                self._lent.append((full, parameter, now))

    @torch.no_grad()
    def _keep(self, full: torch.Tensor, parameter: torch.Tensor, was: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``full``, which is copied to the parameter if it is not as it was."""
        part = dtensors.divided_as(full, parameter) if isinstance(parameter, DTensor) else full
        now = dtensors.local(part)
        same = torch.equal(now, was)
        if isinstance(parameter, WritableView) or not same:  # a view needs all ranks
            parameter.copy_(part)
        return was if same else now.clone()


def _copied(tensor: DTensor, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a sharded tensor, because PyTorch does not know its storage."""
    if not tensor.is_leaf:
        return torch.Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call]  # raises the reason
    if id(tensor) not in memo:
        values = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        copied: torch.Tensor = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
        copied.grad = None if tensor.grad is None else tensor.grad.detach().clone()
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def _is_copy(value: Any, parameter: Any) -> bool:
    """Whether a value of a state dict does not share the parameter's memory, as with pipeline stages on other ranks."""
    if type(value) is not torch.Tensor or not isinstance(parameter, nn.Parameter) or value.shape != parameter.shape:
        return False
    return parameter.is_meta or value.data_ptr() != parameter.data_ptr()


_as_they_are: list[bool] = []


@contextmanager
def as_they_are() -> Iterator[None]:
    """In this context ``Module.state_dict`` returns shards, as a checkpoint needs them."""
    _as_they_are.append(True)
    try:
        yield
    finally:
        _as_they_are.pop()


def taken_state(
    original: Callable[..., Any], module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """``Module.load_state_dict`` that loads full tensors into a sharded model."""
    own = {name: value for name, value in _named(module) if isinstance(value, DTensor)}
    placed = {
        name: dtensors.divided_as(value, own[name])
        if name in own and isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        else value
        for name, value in state_dict.items()
    }
    changed = _State(placed)
    if hasattr(state_dict, "_metadata"):  # versions of the modules' formats
        changed._metadata = state_dict._metadata
    return original(module, changed, *args, **kwargs)


def whole_optimizer_state(original: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
    """``Optimizer.state_dict`` in full tensors. All ranks must call it when parameters are sharded."""
    return map_tensors(original(optimizer), whole)


def taken_optimizer_state(original: Callable[..., Any], optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """``Optimizer.load_state_dict`` that loads full tensors for sharded parameters."""
    original(optimizer, state_dict)
    for parameter, values in optimizer.state.items():
        if isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor):
            for name, value in values.items():
                values[name] = placed_like(value, parameter, parameter)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank. All ranks must call it when the tensor is sharded."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return dtensors.whole(tensor).detach()


def whole_attributes(model: nn.Module, originals: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """As ``whole_values``, for attributes of modules other than parameters, buffers and hooks."""
    for part in model.modules():
        kept = {name: one for name, one in vars(part).items() if not name.startswith("_")}
        whole_values(kept, originals)
        vars(part).update(kept)


def whole_values(names: dict[str, Any], originals: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace sharded tensors that user code kept by full ones, in place in containers and its own objects.

    Parameters are replaced by the ones of ``originals``, which get their values later, also as keys and in sets.
    """
    seen: set[int] = set()

    def made(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter) and isinstance(value, DTensor) and value not in originals:
                return nn.Parameter(whole(value), value.requires_grad)  # a copy of a parameter
            return originals.get(value, value) if isinstance(value, nn.Parameter) else whole(value)
        holds_others = isinstance(value, (list, deque, dict, tuple, set, frozenset))
        if id(value) in seen or not (holds_others or is_users_own(value)):
            return value
        seen.add(id(value))
        if isinstance(value, (list, deque)):
            for place, one in enumerate(list(value)):
                value[place] = made(one)
        elif isinstance(value, dict):
            for key, one in list(value.items()):
                value[key] = made(one)
            keys = {key: made(key) for key in value if isinstance(key, (nn.Parameter, tuple))}
            if any(key is not new for key, new in keys.items()):
                entries = {keys.get(key, key): one for key, one in value.items()}
                value.clear()
                value.update(entries)
        elif not holds_others:
            made(vars(value))
        elif isinstance(value, (set, frozenset)):  # ranks have other orders of a set: nothing may communicate
            members = {originals.get(one, one) if isinstance(one, nn.Parameter) else one for one in value}
            if isinstance(value, frozenset):
                return type(value)(members)
            value.clear()
            value.update(members)
        elif any(isinstance(one, (torch.Tensor, list, deque, dict, tuple, set, frozenset)) for one in value):
            parts = [made(one) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    for name, value in list(names.items()):
        if not name.startswith("__"):
            names[name] = made(value)


NUMBERS = ("item", "tolist", "__float__", "__int__", "__bool__", "__format__")
"""Methods of a DTensor that read numbers. They read the full tensor here, and the rank's shard in PyTorch."""


def cleared_gradients(original: Callable[..., Any], module: nn.Module, set_to_none: bool = True) -> None:
    """``Module.zero_grad`` for shards too: between forward and backward a sharded model has gathered parameters."""
    original(module, set_to_none)
    parts = set(module.modules())
    for group in groups_of(units_in([module])):
        for sharded in group.fsdp_params:
            gradient = sharded.sharded_param.grad
            if sharded._module_info.module in parts and gradient is not None:
                if set_to_none:
                    sharded.sharded_param.grad = None
                else:
                    gradient.zero_()


class _State(dict[str, Any]):
    """A state dict that may have attributes."""

    _metadata: Any


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
