"""Writes of a forward to parameters that fsdp has gathered for it: kept in the shards.

FSDP frees gathered parameters after a forward, and loses what was written to them. ``weight.data = …`` also takes the
parameter away from the memory into which FSDP gathers it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...protocol.errors import StrategyError
from ...torch_private.fully_shard import fsdp_around_forward, fsdp_gathered, fsdp_place
from ...torch_private.places import FSDPParam, FSDPParamGroup
from ..core.holders import carry_attributes
from .unsharded import groups_of, keep, units_in

REMEDY = "write into it instead (with torch.no_grad(): self.weight.copy_(…)), or use --strategy ddp"


def keep_after_forwards(model: nn.Module, names: Collection[str]) -> None:
    """From here on each unit of ``model`` keeps what its forward writes to parameters.

    ``names``: parameters that the forward is known to write. For the others, only what PyTorch counts as a write is
    seen (all but writes in place to ``weight.data``).
    """
    places = {(model.get_submodule(path), own) for path, _, own in (name.rpartition(".") for name in names)}
    for group in groups_of(units_in([model])):
        known = {one for one in group.fsdp_params if places & fsdp_place(one)}
        writes = _Writes(group, known)
        fsdp_around_forward(group, writes.begin, writes.end)


class _Writes:
    """The writes to the parameters of one group."""

    def __init__(self, group: FSDPParamGroup, known: Collection[FSDPParam]) -> None:
        self._group, self._known = group, known
        self._memory: dict[FSDPParam, Tensor] = {}
        self._versions: dict[FSDPParam, int] = {}

    def begin(self) -> None:
        """The parameters are gathered."""
        for one in self._group.fsdp_params:
            whole = fsdp_gathered(one)
            if one not in self._memory:
                self._memory[one] = whole if isinstance(whole, DTensor) else whole.data
                carry_attributes({one.sharded_param: whole})
            self._versions[one] = whole._version

    @torch.no_grad()
    def end(self) -> None:
        """The forward of the unit is over; the parameters are still gathered. Raises ``StrategyError``."""
        for one, version in self._versions.items():
            whole, places = fsdp_gathered(one), fsdp_place(one)
            if any(module._parameters.get(own) is one.sharded_param for module, own in places):
                continue  # freed by a call of a part, which has kept the writes
            for module, own in places:
                if module._parameters.get(own) is not whole:
                    raise bound_anew(type(module).__name__, own)
            moved = not isinstance(whole, DTensor) and whole.data_ptr() != self._memory[one].data_ptr()
            if moved:
                _put_back(whole, self._memory[one])
            if moved or one in self._known or whole._version != version:
                keep(one)


def bound_anew(model: str, name: str) -> StrategyError:
    """The error for a forward that binds a new parameter."""
    return StrategyError(
        f"the forward of {model} puts a new nn.Parameter in place of {name}, which the strategy has sharded: the new "
        "one would be lost",
        REMEDY,
    )


def _put_back(parameter: Any, memory: Tensor) -> None:
    """Copy the values of ``parameter`` to the memory that FSDP knows, and let it use this memory again."""
    if parameter.shape != memory.shape:
        raise StrategyError(
            f"a forward gives a sharded parameter of shape {list(memory.shape)} data of shape {list(parameter.shape)}",
            "give it its shape when the model is built, or use --strategy ddp",
        )
    memory.copy_(parameter.data)
    parameter.data = memory
