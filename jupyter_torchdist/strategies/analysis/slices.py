"""Finds slices that take all rows on this rank but would take only a part on one device.

``x[:32, 0]`` on 16 rows is dropped before dispatch. So slices are observed at ``__torch_function__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .lattice import Rows
from .numerals import Origin


class Slices(TorchFunctionMode):
    """Calls ``limited`` with the result (or the written tensor) of such a slice of samples, and the reason.

    Also for ``x[:, :lengths.max()]``, where this rank's longest sequence fills ``x``: ``read`` recognises numbers that
    were read from the batch.
    """

    def __init__(
        self,
        rows: Callable[[torch.Tensor], Rows | None],
        origin: Callable[[float], Origin],
        limited: Callable[[torch.Tensor, str], None],
        read: Callable[[Any], bool],
    ) -> None:
        super().__init__()
        self._rows, self._origin, self._limited, self._read = rows, origin, limited, read

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.__getitem__ and func is not torch.Tensor.__setitem__:
            return func(*args, **(kwargs or {}))
        why = self._limits(args[0], args[1])
        result = func(*args, **(kwargs or {}))
        if why:
            self._limited(args[0] if result is None else result, why)
        return result

    def _limits(self, tensor: torch.Tensor, index: Any) -> str | None:
        if not isinstance(index, tuple) or (rows := self._rows(tensor)) is None:
            return None
        for dim, part in _slices(index, tensor.dim()):
            if dim != rows.dim:
                if self._read(part.stop):
                    return BY_NUMBER
            elif (
                part.step in (None, 1)
                and isinstance(part.stop, int)
                and part.stop >= tensor.size(dim)
                and self._origin(part.stop) is not Origin.SIZE
            ):
                return BY_POSITION
        return None


BY_POSITION = "takes samples by their position in the batch"
BY_NUMBER = "slices each sample by a number that was read from the batch"


def _slices(index: tuple[Any, ...], ndim: int) -> Iterator[tuple[int, slice]]:
    """Each slice of an index, with its dimension."""
    given = sum(_width(part) for part in index)
    dim = 0
    for part in index:
        if part is Ellipsis:
            dim += ndim - given
            continue
        if isinstance(part, slice):
            yield dim, part
        dim += _width(part)


def _width(part: Any) -> int:
    """How many dimensions a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1
