"""Fake tensors, with which stages run operations of other stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_private.places import FakeTensor, FakeTensorMode
from ..core import loading
from ..core.scatter import map_tensors
from .units import Call


class Fakes:
    """Fake tensors in place of tensors that a rank does not have."""

    def __init__(self, device: torch.device) -> None:
        self.mode, self._device = FakeTensorMode(allow_non_fake_inputs=True), device
        self._known: dict[Tensor, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The fake of a parameter or of a tensor without values."""
        if isinstance(tensor, FakeTensor) or not (tensor.is_meta or isinstance(tensor, nn.Parameter)):
            return tensor
        if tensor not in self._known:
            device = self._device if tensor.is_meta else tensor.device
            with self.mode:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            self._known[tensor] = fake.requires_grad_(tensor.requires_grad)
        return self._known[tensor]

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """In this context a module has fake parameters, and all results are fake."""
        places = loading.slots(module)
        try:
            for parameter, slots in places.items():
                loading.put(slots, self.of(parameter))  # type: ignore[arg-type]
            with self.mode:
                yield
        finally:
            for parameter, slots in places.items():
                loading.put(slots, parameter)

    def run(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function on fakes."""
        args, kwargs = map_tensors((args, kwargs), self.of)
        with self.mode:
            return function(*args, **kwargs)
