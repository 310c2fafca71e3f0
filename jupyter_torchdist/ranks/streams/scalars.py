"""Reads one number from a value that the user logs, without waiting for a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Number = int | float


class NotAScalar(Exception):
    """The value is not a number; the message tells what it is."""


class Unread(Exception):
    """A device value has not arrived yet."""


class Lost(Exception):
    """A device value will never arrive, because of an error on the device."""


def read(value: Any) -> Number | Callable[[], Number]:
    """The number in ``value``; for a CUDA tensor, a function that returns the number once it has arrived.

    Accepts numbers, and tensors and arrays with one element. Raises ``NotAScalar`` for anything else. The function
    raises ``Unread`` until the device has copied the value, and ``Lost`` if it never will. Keeps no graph alive.
    """
    if isinstance(value, (bool, int, float)):
        return float(value) if isinstance(value, float) else int(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _read_tensor(value)
    if isinstance(value, (Decimal, Fraction)):
        return float(value)
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):  # numpy
        return _plain(value.item(), value)
    if isinstance(value, Real):
        return float(value)
    raise NotAScalar(f"a {type(value).__name__}")


def _plain(item: Any, value: Any) -> Number:
    if isinstance(item, (bool, int)):
        return int(item)
    if isinstance(item, float):
        return item
    raise NotAScalar(f"a {type(value).__name__} of {type(item).__name__}")


def _read_tensor(tensor: torch.Tensor) -> Number | Callable[[], Number]:
    if hasattr(type(tensor), "to_local"):  # a DTensor: this rank's part, without a collective
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if tensor.is_cuda and tensor.numel() == 1 and not tensor.is_complex():
        return _copy_from_device(tensor)
    try:
        return _plain(tensor.item(), tensor)
    except RuntimeError:  # several elements, or no data at all
        raise NotAScalar(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}") from None


def _copy_from_device(tensor: torch.Tensor) -> Callable[[], Number]:
    """Copy on the current stream into pinned memory. An event after the copy tells when it can be read."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise NotAScalar("being captured into a CUDA graph")
    host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach().reshape(()), non_blocking=True)
    event: Any = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))

    return _arrival(event, host)


def _arrival(event: Any, host: torch.Tensor) -> Callable[[], Number]:
    def arrived() -> Number:
        try:
            done = event.query()
        except RuntimeError:  # a failed assertion or an illegal address in a kernel
            raise Lost from None
        if not done:
            raise Unread
        return _plain(host.item(), host)

    return arrived
