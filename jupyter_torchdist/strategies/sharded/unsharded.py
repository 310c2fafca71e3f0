"""When the parameters of models that fsdp has sharded are gathered: for double backward, and for user code.

A gradient with ``create_graph`` leaves a graph that still needs the gathered parameters, but FSDP frees them when a
backward through the model ends. So they stay gathered from such a gradient to the end of the next backward without
``create_graph``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...protocol.errors import StrategyError
from ...torch_private.autograd import in_backward
from ...torch_private.fully_shard import (
    fsdp_groups,
    fsdp_is,
    fsdp_is_root,
    fsdp_place,
    fsdp_recover,
    fsdp_shown,
    fsdp_state,
)
from ...torch_private.places import DisableTorchFunctionSubclass, FSDPParam, FSDPParamGroup, chunk_with_empty
from ..core.dtensors import whole
from ..core.ownership import own_class
from ..core.scatter import map_tensors, tensors_in
from ..core.side_effects import joined


class Shown(nn.Parameter):
    """A gathered parameter that the cell may hold: it has the full values, and the gradient of its shard.

    A gathered parameter has no gradient between two backwards, and the optimizer uses the gradient of the shard, so
    ``grad`` is the shard's. When its memory is freed, operations of the cell on it run on the shard instead. ``data``
    and ``detach()``, which the cell may keep for longer, are the shard's at once.
    """

    torchdist_shard: nn.Parameter

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            if function is not Tensor.untyped_storage:  # it needs the gathered memory itself
                args, kwargs = map_tensors((args, kwargs or {}), _shard_of_what_is_gone)
            return function(*args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:
        return self.torchdist_shard.data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.torchdist_shard.data = value

    def detach(self) -> Tensor:
        return self.torchdist_shard.detach()

    @property
    def grad(self) -> Tensor | None:
        return self.torchdist_shard.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.torchdist_shard.grad = value

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))
        return copied


def _shard_of_what_is_gone(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Shown) and not tensor.untyped_storage().size():
        return tensor.torchdist_shard
    return tensor


def shards_of(parameters: Any) -> Any:
    """The parameters for an optimizer, with gathered parameters replaced by their shards."""
    if isinstance(parameters, Tensor):
        return parameters.torchdist_shard if isinstance(parameters, Shown) else parameters
    if isinstance(parameters, list):
        return [shards_of(one) for one in parameters]
    if isinstance(parameters, tuple):  # a name and its parameter
        return tuple(map(shards_of, parameters))
    return parameters


def shards_by_whole(models: Iterable[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
    """Shards by gathered parameters, which a cell may have kept (``list(model.parameters())``)."""
    return fsdp_shown(groups_of(units_in(models)))


def units_in(models: Iterable[nn.Module]) -> list[FSDPModule]:
    """The FSDP units of models that may be sharded."""
    return [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]


def groups_of(units: Iterable[FSDPModule]) -> Iterator[FSDPParamGroup]:
    """The groups of parameters that are gathered together, of each unit that has parameters."""
    for unit in units:
        yield from fsdp_groups(fsdp_state(unit))


class Unsharded:
    """``models``: the models of the job, to which more may be added. All ranks make the same calls."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._needed = False
        self._shown: dict[Any, nn.Parameter] = {}
        """Gathered parameters that the cell may have kept, with their shards."""
        self._versions: dict[FSDPParam, int] = {}
        """The versions of the shards when the current gathered parameters were gathered."""
        self._known: list[nn.Module] = []
        self._found: tuple[list[FSDPModule], list[FSDPParamGroup]] = [], []
        self._places: list[tuple[FSDPParam, nn.Module, str]] = []

    def before(self, *, create_graph: bool) -> None:
        """A backward or a gradient is about to be computed."""
        self.hide()
        self._needed = self._needed or create_graph
        if self._needed:
            for unit in self._units():
                unit.set_reshard_after_backward(False, recurse=False)
                unit.unshard()

    def after_backward(self, *, create_graph: bool) -> None:
        """``backward()`` is over, and all gradients are in place."""
        if self._needed and not create_graph:
            self._needed = False
            for unit in self._units():
                unit.set_reshard_after_backward(True, recurse=False)
                unit.reshard()
        self.show_again()

    @contextmanager
    def whole(self, part: nn.Module) -> Iterator[None]:
        """In this context a part of a model that is called alone has gathered parameters. All ranks must enter it.

        A part that is an FSDP unit gathers its parameters itself when it is called.
        """
        shards = {one for one in part.parameters() if isinstance(one, DTensor)}
        if not shards:
            yield
            return
        inner = {id(one) for one in part.modules()}
        units = [unit for unit in self._units() if id(unit) not in inner and _has_one_of(unit, shards)]
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()

    def begin_forward(self) -> None:
        """A model is about to be called, and will gather parameters from the current shards."""
        self.keep_writes()
        for one, module, name in self._places:
            if not fsdp_is(one, module._parameters.get(name)):
                raise self._is_another(module, name)
        self._versions = {one: _version(one) for group in self._groups() for one in group.fsdp_params}

    def _is_another(self, module: nn.Module, name: str) -> StrategyError:
        """What to say of a parameter that FSDP would put back in its place."""
        inside = ((model, path) for model in self._models for path, part in model.named_modules() if part is module)
        model, path = next(inside, (module, ""))
        return StrategyError(
            f"{joined(path, name)} of {own_class(model).__name__} was replaced, tied, pruned or removed after it had "
            "been sharded",
            "do this before the first training step or in the next cell (between cells a model is whole), or use "
            "--strategy ddp",
        )

    def show(self) -> None:
        """User code reads parameters and may compute a penalty with them, whose graph the next backward needs."""
        for group in self._whole():
            for one in group.fsdp_params:
                if type(one.unsharded_param) in (nn.Parameter, Shown):
                    self._shown[one.unsharded_param] = one.sharded_param
        self.show_again()

    def show_again(self) -> None:
        """FSDP has finished with gathered parameters; the cell may use those that it was shown."""
        for shown, shard in self._shown.items():
            shown.torchdist_shard, shown.__class__ = shard, Shown

    def hide(self) -> None:
        """FSDP is about to use gathered parameters."""
        for shown in self._shown:
            shown.__class__ = nn.Parameter

    def end(self) -> None:
        """The cell has ended: parameters that it was shown are plain again, without a reference to their shards."""
        self.hide()
        for shown in self._shown:
            del shown.torchdist_shard
        self._shown.clear()

    def let_go(self) -> None:
        """User code is about to change parameters: free gathered ones, so that it changes the shards.

        If a backward follows, it gathers them again.
        """
        if not self._needed:
            self.keep_writes()
            for unit in self._units():
                unit.reshard()
            self.show_again()

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Copy values written to gathered parameters (attributes of modules after a forward) into the shards.

        FSDP would lose them. After a backward no parameters are gathered, so this costs nothing in a training step.
        """
        self.hide()
        if not self._needed:
            for group in self._whole():
                for one in group.fsdp_params:
                    keep(one)

    def _whole(self) -> Iterator[FSDPParamGroup]:
        """The groups that are gathered now. A group whose shards were written after it was gathered is resharded."""
        for group in self._groups():
            if not group.is_unsharded:
                continue
            if any(self._versions.get(one) != _version(one) for one in group.fsdp_params) and not self._needed:
                group.reshard()
            else:
                yield group

    def _units(self) -> list[FSDPModule]:
        return self._look()[0]

    def _groups(self) -> list[FSDPParamGroup]:
        return self._look()[1]

    def _look(self) -> tuple[list[FSDPModule], list[FSDPParamGroup]]:
        if len(self._known) != len(self._models):
            self._known = list(self._models)
            units = units_in(self._known)
            self._found = units, list(groups_of(units))
            each = (one for group in self._found[1] for one in group.fsdp_params)
            self._places = [(one, *place) for one in each for place in fsdp_place(one)]
        return self._found


def _has_one_of(unit: FSDPModule, shards: Collection[nn.Parameter]) -> bool:
    return any(one.sharded_param in shards for group in groups_of([unit]) for one in group.fsdp_params)


def _version(one: FSDPParam) -> int:
    """The version of the shard. It grows with every optimizer step and every write of the cell."""
    return one.sharded_param._version


def keep(one: FSDPParam) -> None:
    """Copy values that differ from the shard into it. It is empty on a rank without rows, and may be more precise."""
    whole, shard = one.unsharded_param, one.sharded_param.to_local()  # type: ignore[attr-defined]
    values = whole.to_local() if isinstance(whole, DTensor) else whole
    mesh = one.mesh_info
    ranks, rank = getattr(mesh, "shard_mesh_size", 1), getattr(mesh, "shard_mesh_rank", 0)  # ``replicate`` has neither
    mine = chunk_with_empty(values, ranks, dim=one.fsdp_placement.dim)[rank]
    if mine.numel() and not torch.equal(mine, as_gathered := shard.to(mine)):
        shard.copy_(torch.where(mine == as_gathered, shard.to(mine.device), mine.to(shard.dtype)))


def recover(model: nn.Module) -> None:
    """After a forward that raised an error: reshard the parameters, so that the next forward can begin."""
    for unit in units_in([model]):
        if fsdp_is_root(unit):
            fsdp_recover(unit)


def in_full(module: nn.Module, given: Any) -> Any:
    """Gather inputs that a cell made from shards, such as ``weight.new_zeros(layers, batch, width)``.

    A module without parameters, such as a loss, takes DTensors as they are; so does a block recomputed in a backward.
    """
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors_in(given))
    if not sharded or next(module.parameters(), None) is None or in_backward():
        return given
    return map_tensors(given, lambda one: one if isinstance(one, nn.Parameter) else whole(one))
