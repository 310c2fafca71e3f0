"""Which gradients travel together: flat buckets, in an order that all ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

LAST_BYTES = 2**20
"""The last bucket, for which nothing is left to overlap with, is no larger: as DDP's first one."""


class Bucket:
    """Gradients of one type and device, laid end to end in ``flat`` when it is filled.

    ``tail`` numbers of the last bucket follow them. ``sent`` is the work in flight.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tail: int = 0) -> None:
        self.parameters = tuple(parameters)
        self.tail = tail
        self.is_last = False
        self.index = 0
        self.dtype = _type_of(parameters[0])
        self.elements = sum(parameter.numel() for parameter in parameters) + tail
        self.flat: Tensor | None = None
        self.sent: Any = None

    @property
    def is_sent(self) -> bool:
        return self.sent is not None

    def fill(self, tail: Tensor | None, *, in_place: bool) -> None:
        """``flat`` holds this rank's gradients: zeros where it has none.

        ``in_place``: where they lie in one storage already, as they were left by ``take``, nothing is copied.
        """
        grads = [parameter.grad for parameter in self.parameters]
        if in_place and (flat := self._shared(grads)) is not None:
            self.flat = flat
            if tail is not None:
                flat[self.elements - self.tail :].copy_(tail)
            return
        dense = [self._dense(one, grad) for one, grad in zip(self.parameters, grads, strict=True)]
        if tail is not None:
            dense.append(tail)
        flat = _flatten_dense_tensors(dense)
        self.flat = flat.clone() if len(dense) == 1 else flat  # one alone is not copied

    def _dense(self, parameter: nn.Parameter, grad: Tensor | None) -> Tensor:
        if grad is None:
            return torch.zeros_like(parameter, dtype=self.dtype, memory_format=torch.contiguous_format)
        if grad.is_sparse:
            grad = parameter.grad = grad.to_dense()
        return grad if grad.dtype == self.dtype else grad.to(self.dtype)

    def _shared(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The storage in which gradients lie one after the other, with room for the tail, and nothing else."""
        first = grads[0]
        if first is None or first.is_sparse or first.dtype != self.dtype or first.storage_offset():
            return None
        if first.untyped_storage().nbytes() != self.elements * first.element_size():
            return None
        address = first.data_ptr()
        for grad in grads:
            if grad is None or grad.is_sparse or grad.data_ptr() != address or not grad.is_contiguous():
                return None
            address += grad.numel() * grad.element_size()
        return first.as_strided((self.elements,), (1,))

    def wait(self) -> None:
        self.sent.wait()

    def pieces(self) -> tuple[Tensor, ...]:
        """Of ``flat``, each in its parameter's shape; the tail is not among them."""
        assert self.flat is not None
        pieces: tuple[Tensor, ...] = _unflatten_dense_tensors(self.flat, self.parameters)
        return pieces

    def take(self, used: Sequence[bool] | None, *, views: bool) -> None:
        """The gradients become the means; those of which ``used`` says that no rank had one stay None."""
        given, means = [], []
        for number, (parameter, mean) in enumerate(zip(self.parameters, self.pieces(), strict=True)):
            grad = parameter.grad
            if grad is None and used is not None and not used[number]:
                continue
            if views and parameter.is_contiguous() and (grad is None or grad.dtype == mean.dtype):
                parameter.grad = mean.data  # a view of the storage, but not of a tensor: detach_() works
            elif grad is None:
                parameter.grad = mean.clone()
            else:
                given.append(grad)
                means.append(mean)
        if given:
            torch._foreach_copy_(given, means)

    def clear(self) -> None:
        """As before it was filled."""
        self.flat = self.sent = None


class Layout:
    """Buckets of up to ``bucket_bytes``, those of the last parameters first: a backward begins with them.

    ``counted``: the last one ends with a number for each parameter (whether this rank had its gradient), and one more,
    the alarm.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_bytes: int, *, counted: bool) -> None:
        tail = len(parameters) + 1 if counted else 0
        self.counted = counted
        self.buckets = [Bucket(group) for group in reversed(_grouped(parameters, bucket_bytes))]
        last = self.buckets[-1] = Bucket(self.buckets[-1].parameters, tail)
        last.is_last = True
        for index, bucket in enumerate(self.buckets):
            bucket.index = index
        self.parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        self._had_all = self.tail([True] * len(parameters), alarm=False)

    def tail(self, had: Sequence[bool] | None, *, alarm: bool) -> Tensor | None:
        """The numbers that follow the last bucket. ``had`` None: all."""
        if not self.counted:
            return None
        if had is None and not alarm:
            return self._had_all
        values = [float(one) for one in (had or [True] * len(self.parameters))]
        last = self.buckets[-1]
        return torch.tensor([*values, float(alarm)], dtype=last.dtype, device=last.parameters[0].device)

    def counts(self) -> list[float]:
        """For each parameter the share of ranks that had its gradient, and of those that raised the alarm."""
        last = self.buckets[-1]
        assert last.flat is not None
        counts: list[float] = last.flat[last.elements - last.tail :].real.tolist()
        return counts

    def take(self, used: Sequence[bool] | None, *, views: bool) -> None:
        """See ``Bucket.take``; ``used`` in the order of ``parameters``."""
        start = 0
        for bucket in self.buckets:
            end = start + len(bucket.parameters)
            bucket.take(None if used is None else used[start:end], views=views)
            start = end
        self.clear()

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.clear()


def _grouped(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters of one type and device, in order; the first group, which is sent last, is a small one."""
    groups: list[list[nn.Parameter]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        key = (_type_of(parameter), parameter.device)
        size = parameter.numel() * key[0].itemsize
        if key not in open_ or room[key] < size:
            room[key] = bucket_bytes if groups else min(bucket_bytes, LAST_BYTES)
            open_[key] = []
            groups.append(open_[key])
        open_[key].append(parameter)
        room[key] -= size
    return groups


def _type_of(parameter: nn.Parameter) -> torch.dtype:
    """Of its gradients."""
    kind: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return kind or parameter.dtype
