"""What a rank has only a part of. It comes back whole when all ranks end together; else it stays behind, in words."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Apart:
    """Called with an object, says why it cannot come back; None where it can.

    ``things`` are modules, parameters and optimizers that are in parts though it does not show: what a stage on another
    rank trains, what shards have taken the place of. ``strategy`` as the user wrote it; ``saving``: what keeps a
    training all the same.
    """

    def __init__(self, strategy: str, saving: str, things: Iterable[object]) -> None:
        self._strategy, self._saving = strategy, saving
        self._things = {id(one): one for one in things}

    def __call__(self, value: object) -> str | None:
        if id(value) not in self._things and not _is_sharded(value):
            return None
        return (
            f"--strategy {self._strategy} keeps it in parts on several ranks, so it comes back only when all ranks end "
            f"together ({self._saving})"
        )


def _is_sharded(value: object) -> bool:
    if isinstance(value, nn.Module):
        return isinstance(value, FSDPModule) or any(isinstance(one, DTensor) for one in value.parameters())
    return isinstance(value, DTensor)
