"""``state_dict``, ``load_state_dict``, ``zero_grad`` and ``torch.save`` of user code, as on one device.

The state of a sharded model is given whole (FULL_STATE_DICT), and a whole one is taken. Every rank calls
``torch.save``, as every rank runs the cell; the first one writes, aside and renamed, and the others wait for it when
they load what it saved.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...torch_private.places import AsyncCollectiveTensor
from ...usercode.frames import is_users
from ..core import dtensors
from ..core.optimizers import placed_like
from ..core.ownership import own_class
from ..core.patches import Patches
from ..core.scatter import map_tensors
from ..core.side_effects import is_users_own
from .dtensor_data import DATA
from .files import Files, _is_elsewhere, _parameters
from .unsharded import groups_of, units_in
from .writable_views import WritableView


def install(patches: Patches, lent: Lent, *, whole: bool = True) -> None:
    """For the time of user code, sharded parameters and states look as on one device.

    ``whole`` false: ``state_dict`` gives shards, as ``-O state_dict_type=SHARDED_STATE_DICT`` asks for.
    """
    patches.give(DTensor, "data", DATA)
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


class Lent:
    """Full tensors that ``state_dict`` and ``numpy`` gave. On one device they are the weights, and cells write there.

    What was written becomes the shards' before they are used: at the next forward, step, or look at them. A state dict
    that a cell keeps for longer is a copy, which is said: on one device it is the weights all along.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lent: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Each with what it is a copy of, and this rank's part of that, as it was."""
        self._given: list[tuple[weakref.ref[torch.Tensor], nn.Module]] | None = []
        """The first of each that a cell may have kept; None once it was said."""

    def state(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """``Module.state_dict`` in full tensors; all ranks call it when the model is sharded."""
        nested = bool(args) or "destination" in kwargs  # of a module within the one that user code asks
        if nested:
            return original(module, *args, **kwargs)
        self.keep()
        state = original(module, *args, **kwargs)
        if not _as_they_are:
            own, prefix = _parameters(module), kwargs.get("prefix", "")
            known: dict[torch.Tensor, torch.Tensor] = {}  # tied weights are one
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue  # of a module's own (extra state)
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
        """A method of sharded tensors that reads numbers: of the whole, as it is now; all ranks call it."""

        def read(tensor: DTensor, *args: Any) -> Any:
            self.keep()
            return own(whole(tensor), *args)

        return read

    def shown(self, original: Callable[..., str], tensor: DTensor, **kwargs: Any) -> str:
        """What the cell prints of a sharded tensor: the whole, on all ranks. Elsewhere, as in an error, a shard."""
        if kwargs or not is_users(sys._getframe(2).f_code.co_filename):
            return original(tensor, **kwargs)
        self.keep()
        full = whole(tensor)
        return repr(nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full)

    @property
    def numpy(self) -> Callable[..., Any]:
        """``Tensor.numpy`` of sharded tensors: on one device an array has their memory, so it is lent."""

        def numpy(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
            return self._lend(tensor, whole(tensor)).numpy(*args, **kwargs)

        return numpy

    def before(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of what looks at parameters, or loads them."""
        self.keep()
        return original(*args, **kwargs)

    def step(self, *_: object) -> None:
        """An optimizer is about to change the weights."""
        self.keep()
        for first, module in self._given or ():
            if first() is not None and any(map(_is_elsewhere, _parameters(module).values())):
                name = own_class(module).__name__
                self._say(
                    f"{name}.state_dict() returns a copy of the sharded weights: the copy that the cell keeps here "
                    "does not follow the training, and writing to it does not change the model; call it again instead"
                )
                self._given = None
                return
        if self._given:
            self._given.clear()

    def keep(self) -> None:
        """What was written to them is the shards'; nobody else is asked."""
        if self._lent:
            lent, self._lent = self._lent, []
            self._keep(lent)

    @torch.no_grad()
    def _keep(self, lent: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        for full, parameter, was in lent:
            part = full
            if isinstance(parameter, DTensor):
                part = dtensors.divided_as(full, parameter)
            if isinstance(parameter, WritableView) or not torch.equal(
                dtensors.local(part), was
            ):  # of a piece all ranks speak
                parameter.copy_(part)


def _copied(tensor: DTensor, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a sharded tensor, of whose storage PyTorch knows nothing."""
    if not tensor.is_leaf:
        return torch.Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call]  # which says why not
    if id(tensor) not in memo:
        values = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        copied: torch.Tensor = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
        copied.grad = None if tensor.grad is None else tensor.grad.detach().clone()
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def _is_copy(value: Any, parameter: Any) -> bool:
    """Whether a value of a state dict is not the memory of a parameter, as where stages are on several ranks."""
    if type(value) is not torch.Tensor or not isinstance(parameter, nn.Parameter) or value.shape != parameter.shape:
        return False
    return parameter.is_meta or value.data_ptr() != parameter.data_ptr()


_as_they_are: list[bool] = []


@contextmanager
def as_they_are() -> Iterator[None]:
    """Within it ``Module.state_dict`` gives shards, as a checkpoint wants them."""
    _as_they_are.append(True)
    try:
        yield
    finally:
        _as_they_are.pop()


def taken_state(
    original: Callable[..., Any], module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """``Module.load_state_dict`` of full tensors into a sharded model."""
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
    """``Optimizer.state_dict`` in full tensors; all ranks call it when parameters are sharded."""
    return map_tensors(original(optimizer), whole)


def taken_optimizer_state(original: Callable[..., Any], optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """``Optimizer.load_state_dict`` of full tensors for sharded parameters."""
    original(optimizer, state_dict)
    for parameter, values in optimizer.state.items():
        if isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor):
            for name, value in values.items():
                values[name] = placed_like(value, parameter, parameter)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in full on every rank; all ranks call it when it is sharded."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return dtensors.whole(tensor).detach()


def whole_attributes(model: nn.Module, originals: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """As ``whole_values``, of what modules keep beside parameters, buffers and hooks."""
    for part in model.modules():
        kept = {name: one for name, one in vars(part).items() if not name.startswith("_")}
        whole_values(kept, originals)
        vars(part).update(kept)


def whole_values(names: dict[str, Any], originals: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """What user code made of sharded parameters and kept, in full: in place in lists, dicts and its own objects.

    Parameters become those of ``originals``, which are filled later.
    """
    seen: set[int] = set()

    def made(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter) and isinstance(value, DTensor) and value not in originals:
                return nn.Parameter(whole(value), value.requires_grad)  # a copy of one
            return originals.get(value, value) if isinstance(value, nn.Parameter) else whole(value)
        holds_others = isinstance(value, (list, dict, tuple))
        if id(value) in seen or not (holds_others or is_users_own(value)):
            return value
        seen.add(id(value))
        if isinstance(value, list):
            value[:] = [made(one) for one in value]
        elif isinstance(value, dict):
            for key, one in list(value.items()):
                value[key] = made(one)
        elif not holds_others:
            made(vars(value))
        elif any(isinstance(one, (torch.Tensor, list, dict, tuple)) for one in value):
            parts = [made(one) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    for name, value in list(names.items()):
        if not name.startswith("__"):
            names[name] = made(value)


NUMBERS = ("item", "tolist", "__float__", "__int__", "__bool__", "__format__")
"""Methods of a DTensor that read numbers: those of the whole, where PyTorch reads the rank's shard."""


def cleared_gradients(original: Callable[..., Any], module: nn.Module, set_to_none: bool = True) -> None:
    """``Module.zero_grad``. Between forward and backward a sharded model shows whole parameters; shards are meant."""
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
    """A state dict may have attributes."""

    _metadata: Any


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
