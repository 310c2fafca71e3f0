"""When models that fsdp has sharded are gathered: for gradients of gradients, and not for the eyes of user code.

A gradient with ``create_graph`` leaves a graph that still needs the gathered parameters, and FSDP frees them as soon as
a backward through the model is over. So they stay gathered from such a gradient to the end of the next backward that
leaves no graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...torch_private.fully_shard import fsdp_groups, fsdp_is_root, fsdp_recover, fsdp_shown, fsdp_state
from ...torch_private.places import DisableTorchFunctionSubclass, FSDPParam, FSDPParamGroup, chunk_with_empty
from ..core.scatter import map_tensors


class Shown(nn.Parameter):
    """A gathered parameter in the cell's hands: values to compute with, and the gradient of its shard.

    A parameter is one for as long as the cell may have it: what is gathered has no gradient of its own between two
    backwards, and what is looked up in a shard's is what the optimizer will use. When its memory is let go, whatever
    the cell does with it is done with the shard.
    """

    torchdist_shard: nn.Parameter

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            if function is not Tensor.untyped_storage:  # whose memory is meant
                args, kwargs = map_tensors((args, kwargs or {}), _shard_of_what_is_gone)
            return function(*args, **(kwargs or {}))

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
    """What an optimizer is given, with shards for what is gathered."""
    if isinstance(parameters, Tensor):
        return parameters.torchdist_shard if isinstance(parameters, Shown) else parameters
    if isinstance(parameters, list):
        return [shards_of(one) for one in parameters]
    if isinstance(parameters, tuple):  # a name and its parameter
        return tuple(map(shards_of, parameters))
    return parameters


def shards_by_whole(models: Iterable[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
    """By parameters that were ever gathered: a cell may have kept them (``list(model.parameters())``)."""
    return fsdp_shown(groups_of(units_in(models)))


def units_in(models: Iterable[nn.Module]) -> list[FSDPModule]:
    """What is gathered at a time, of models that may be sharded."""
    return [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]


def groups_of(units: Iterable[FSDPModule]) -> Iterator[FSDPParamGroup]:
    """What is gathered together, of each unit that has parameters."""
    for unit in units:
        yield from fsdp_groups(fsdp_state(unit))


class Unsharded:
    """``models`` are those of the job; more may come. Every rank does the same at the same time."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._needed = False
        self._shown: dict[Any, nn.Parameter] = {}
        """What the cell may have kept, by shards."""
        self._versions: dict[FSDPParam, int] = {}
        """Of shards, when what is gathered now was gathered."""
        self._known: list[nn.Module] = []
        self._found: tuple[list[FSDPModule], list[FSDPParamGroup]] = [], []

    def before(self, *, create_graph: bool) -> None:
        """A backward or a gradient is about to be computed."""
        self.hide()
        self._needed = self._needed or create_graph
        if self._needed:
            for unit in self._units():
                unit.set_reshard_after_backward(False, recurse=False)
                unit.unshard()

    def after_backward(self, *, create_graph: bool) -> None:
        """``backward()`` is over, and all gradients are where they belong."""
        if self._needed and not create_graph:
            self._needed = False
            for unit in self._units():
                unit.set_reshard_after_backward(True, recurse=False)
                unit.reshard()
        self.show_again()

    @contextmanager
    def whole(self, part: nn.Module) -> Iterator[None]:
        """Within it a part of a model, which is called by itself, has whole parameters. All ranks call it.

        What is a unit of its own gathers itself when it is called.
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
        """A model is about to be called: it gathers what it needs of the shards as they are now."""
        self.keep_writes()
        self._versions = {one: _version(one) for group in self._groups() for one in group.fsdp_params}

    def show(self) -> None:
        """User code looks at parameters, and may compute a penalty with them, whose graph the next backward needs."""
        for group in self._whole():
            for one in group.fsdp_params:
                if type(one.unsharded_param) in (nn.Parameter, Shown):
                    self._shown[one.unsharded_param] = one.sharded_param
        self.show_again()

    def show_again(self) -> None:
        """FSDP has done with gathered parameters; the cell may go on with those that it was shown."""
        for shown, shard in self._shown.items():
            shown.torchdist_shard, shown.__class__ = shard, Shown

    def hide(self) -> None:
        """FSDP is about to use gathered parameters."""
        for shown in self._shown:
            shown.__class__ = nn.Parameter

    def end(self) -> None:
        """The cell has ended: what it was shown is plain, and holds no shard that would be brought back with it."""
        self.hide()
        for shown in self._shown:
            del shown.torchdist_shard
        self._shown.clear()

    def let_go(self) -> None:
        """User code changes parameters: those of shards, also after a forward without a backward.

        A backward that does follow gathers them again.
        """
        if not self._needed:
            self.keep_writes()
            for unit in self._units():
                unit.reshard()
            self.show_again()

    @torch.no_grad()
    def keep_writes(self) -> None:
        """What was written to gathered parameters, which attributes of modules are after a forward, is the shards' too.

        FSDP would forget it. Nothing is gathered after a backward, so a step of training finds nothing to look at.
        """
        self.hide()
        if not self._needed:
            for group in self._whole():
                for one in group.fsdp_params:
                    _keep(one)

    def _whole(self) -> Iterator[FSDPParamGroup]:
        """Those that are gathered now. What was gathered before its shards were written is old, and is let go."""
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
        return self._found


def _has_one_of(unit: FSDPModule, shards: Collection[nn.Parameter]) -> bool:
    return any(one.sharded_param in shards for group in groups_of([unit]) for one in group.fsdp_params)


def _version(one: FSDPParam) -> int:
    """Grows with every step of an optimizer, and with what a cell writes to the shard."""
    return one.sharded_param._version


def _keep(one: FSDPParam) -> None:
    """A rank without a row of it has an empty shard."""
    whole, shard = one.unsharded_param, one.sharded_param.to_local()  # type: ignore[attr-defined]
    values = whole.to_local() if isinstance(whole, DTensor) else whole
    ranks, rank = one.mesh_info.shard_mesh_size, one.mesh_info.shard_mesh_rank
    mine = chunk_with_empty(values, ranks, dim=one.fsdp_placement.dim)[rank]
    if mine.numel() and not torch.equal(mine, shard.to(mine)):
        shard.copy_(mine)


def recover(model: nn.Module) -> None:
    """After a forward that raised the parameters are shards, and the next one may begin."""
    for unit in units_in([model]):
        if fsdp_is_root(unit):
            fsdp_recover(unit)
