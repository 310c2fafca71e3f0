"""When models that fsdp has sharded are gathered: for gradients of gradients, and not for the eyes of user code.

A gradient with ``create_graph`` leaves a graph that still needs the gathered parameters, and FSDP frees them as soon as
a backward through the model is over. So they stay gathered from such a gradient to the end of the next backward that
leaves no graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor


class Gathered:
    """``models`` are those of the job; more may come. Every rank does the same at the same time."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._needed = False
        self._known: list[nn.Module] = []
        self._found: list[FSDPModule] = []

    def before(self, *, create_graph: bool) -> None:
        """A backward or a gradient is about to be computed."""
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

    def let_go(self) -> None:
        """User code changes parameters or looks at gradients: those of shards, also after a forward without a backward.

        A backward that does follow gathers them again.
        """
        if not self._needed:
            self.keep_writes()
            for unit in self._units():
                unit.reshard()

    @torch.no_grad()
    def keep_writes(self) -> None:
        """What was written to gathered parameters, which attributes of modules are after a forward, is the shards' too.

        FSDP would forget it. Nothing is gathered after a backward, so a step of training finds nothing to look at.
        """
        if self._needed:
            return
        for unit in self._units():
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None and group.is_unsharded:
                for one in group.fsdp_params:
                    _keep(one)

    def _units(self) -> list[FSDPModule]:
        if len(self._known) != len(self._models):
            self._known = list(self._models)
            self._found = [part for model in self._known for part in model.modules() if isinstance(part, FSDPModule)]
        return self._found


def _keep(one: FSDPParam) -> None:
    """A rank without a row of it has an empty shard."""
    whole, shard = one.unsharded_param, one.sharded_param.to_local()  # type: ignore[attr-defined]
    values = whole.to_local() if isinstance(whole, DTensor) else whole
    ranks, rank = one.mesh_info.shard_mesh_size, one.mesh_info.shard_mesh_rank
    mine = _chunk_with_empty(values, ranks, dim=one.fsdp_placement.dim)[rank]
    if mine.numel() and not torch.equal(mine, shard.to(mine)):
        shard.copy_(mine)
