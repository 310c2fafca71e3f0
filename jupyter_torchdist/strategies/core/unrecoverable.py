"""Objects of which a rank holds only a part: they are returned only if all ranks end together; else explained."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Apart:
    """Called with an object, returns the reason why it cannot be returned; None if it can.

    ``things`` are incomplete modules, parameters and optimizers that do not look sharded: trained by a stage on another
    rank, or replaced by shards. ``strategy``: as the user wrote it. ``saving``: how the user can still keep the
    training result.
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
