"""The memory of a program's tensors, real or fake, after each operation.

Measured at the dispatcher: it does not see workspaces inside kernels, nor what an allocator rounds up or caches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..torch_private.places import TorchDispatchMode, tree_leaves
from ..torch_private.tensors import ITEM

Scalar = Callable[[torch.Tensor], Any]
"""Returns the number that is read from a tensor."""

Weight = Callable[[int], float]
"""Maps the number of a storage to the weight with which it counts."""


class Allocations(TorchDispatchMode):
    """A log of every storage that operations create, resize or free.

    ``scalar`` replaces ``item()`` and similar functions.
    """

    def __init__(self, scalar: Scalar | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[tuple[int, int]] = []
        """(number of a storage, change in bytes), in order of time."""
        self._scalar = scalar
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Allocations:
        original = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._note(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._scalar is not None and func is ITEM:
            return self._scalar(args[0])
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storages, if they are not counted yet."""
        for storage in storages(tensor):
            self._note(storage)

    def number(self, tensor: torch.Tensor) -> list[int]:
        """Numbers of the tensor's storages in ``log``."""
        return [self._numbers[storage] for storage in storages(tensor) if storage in self._numbers]

    @property
    def position(self) -> int:
        """The current length of ``log``."""
        return len(self.log)

    @property
    def next_number(self) -> int:
        """Number of the next new storage."""
        return len(self._refs)

    def live(self, until: int | None = None) -> int:
        """Bytes in use at a position of ``log`` (default: now)."""
        return sum(change for _, change in self.log[:until])

    def sum(self, start: int, stop: int, weight: Weight) -> int:
        """Change in bytes from position ``start`` to position ``stop``."""
        return round(sum(change * weight(number) for number, change in self.log[start:stop]))

    def most(self, start: int, stop: int, weight: Weight = lambda number: 1.0) -> int:
        """Peak in bytes between two positions, relative to ``start``."""
        now = most = 0.0
        for number, change in self.log[start:stop]:
            now += change * weight(number)
            most = max(most, now)
        return round(most)

    def _note(self, storage: torch.UntypedStorage) -> None:
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self._refs)
            self._refs[number] = weakref.ref(storage, partial(self._freed, number))
        size = storage.nbytes()
        if (change := size - self._sizes.get(number, 0)) != 0:
            self._sizes[number] = size
            self.log.append((number, change))

    def _freed(self, number: int, _ref: Any) -> None:
        if size := self._sizes.pop(number, 0):
            self.log.append((number, -size))


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor; for a sharded or sparse tensor, the storages of its parts."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return storages(local)
    if tensor.layout != torch.strided:
        parts = [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else []
        return [storage for part in parts for storage in storages(part)]
    return [tensor.untyped_storage()]
