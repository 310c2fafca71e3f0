"""Which gradients travel together: flat buckets, in an order that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LAST_BYTES = 2**20
"""The last bucket, for which nothing is left to overlap with, is no larger: as DDP's first one."""


class Bucket:
    """Gradients of one type and device, laid end to end in ``flat`` while they are sent, divided by ``divisor``.

    ``tail`` numbers of the last bucket follow them. ``sent`` is the work in flight. ``flat`` is another one in each
    backward: the gradients of the last, which the cell may have kept, lie in theirs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], divisor: int, tail: int = 0) -> None:
        self.parameters = tuple(parameters)
        self.tail = tail
        self.is_last = False
        self.index = 0
        self.dtype = _type_of(parameters[0])
        self.elements = sum(parameter.numel() for parameter in parameters) + tail
        self.flat: Tensor | None = None
        self.sent: Any = None
        self.pieces: list[Tensor] = []
        """Of ``flat``, each in its parameter's shape; the tail is not among them."""
        self._divisor = divisor
        self._laid: set[int] = set()

    @property
    def is_sent(self) -> bool:
        return self.sent is not None

    def lay(self, number: int) -> None:
        """Copy a gradient that has just come, while it is in the processor's cache."""
        grad = self.parameters[number].grad
        assert grad is not None
        if not grad.is_sparse and grad.dtype == self.dtype:
            if self.flat is None:
                self._start()
            torch.div(grad, self._divisor, out=self.pieces[number])
            self._laid.add(number)

    def fill(self, tail: Tensor | None, *, in_place: bool) -> None:
        """``flat`` holds all of this rank's gradients: zeros where it has none.

        ``in_place``: where they lie in one storage already, as they were left by ``take``, nothing is copied.
        """
        if in_place and self.flat is None and (shared := self._shared()) is not None:
            self._start(shared)
            shared[: self.elements - self.tail] /= self._divisor
        else:
            self._lay_the_rest()
        if tail is not None:
            assert self.flat is not None
            torch.div(tail, self._divisor, out=self.flat[self.elements - self.tail :])

    def _lay_the_rest(self) -> None:
        if self.flat is None:
            self._start()
        pieces, grads = [], []
        for number, (parameter, piece) in enumerate(zip(self.parameters, self.pieces, strict=True)):
            if number in self._laid:
                continue
            if parameter.grad is None:
                piece.zero_()
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            pieces.append(piece)
            grads.append(parameter.grad)
        if pieces:
            torch._foreach_copy_(pieces, grads)
            torch._foreach_div_(pieces, self._divisor)

    def _start(self, flat: Tensor | None = None) -> None:
        """``flat``: with the gradients in it; None for a new one."""
        self.flat = (
            torch.empty(self.elements, dtype=self.dtype, device=self.parameters[0].device) if flat is None else flat
        )
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = self.flat.split_with_sizes([*sizes, self.tail])
        self.pieces = [part.view(one.shape) for part, one in zip(parts, self.parameters, strict=False)]

    def _shared(self) -> Tensor | None:
        """The storage in which gradients lie one after the other, with room for the tail, and nothing else."""
        first = self.parameters[0].grad
        if first is None or first.is_sparse or first.dtype != self.dtype or first.storage_offset():
            return None
        if first.untyped_storage().nbytes() != self.elements * first.element_size():
            return None
        address = first.data_ptr()
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is None or grad.is_sparse or grad.data_ptr() != address or not grad.is_contiguous():
                return None
            address += grad.numel() * grad.element_size()
        return first.as_strided((self.elements,), (1,))

    def wait(self) -> None:
        self.sent.wait()

    def take(self, used: Sequence[bool] | None, views: Sequence[bool]) -> None:
        """The gradients become the means; those of which ``used`` says that no rank had one stay None.

        Where ``views`` says so, they are those in ``flat``, and nothing is copied.
        """
        given, means = [], []
        for number, (parameter, mean) in enumerate(zip(self.parameters, self.pieces, strict=True)):
            grad = parameter.grad
            if grad is None and used is not None and not used[number]:
                continue
            if views[number] and parameter.is_contiguous() and (grad is None or grad.dtype == mean.dtype):
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
        self.pieces = []
        self._laid.clear()


class Layout:
    """Buckets of up to ``bucket_bytes``, those of the last parameters first: a backward begins with them.

    ``counted``: the last one ends with a number for each parameter (whether this rank had its gradient), and one more,
    the alarm.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bucket_bytes: int,
        divisor_of: Callable[[torch.dtype], int],
        *,
        counted: bool,
    ) -> None:
        groups = list(reversed(_grouped(parameters, bucket_bytes)))
        tails = [*[0] * (len(groups) - 1), len(parameters) + 1 if counted else 0]
        self.counted = counted
        self.buckets = [
            Bucket(group, divisor_of(_type_of(group[0])), tail) for group, tail in zip(groups, tails, strict=True)
        ]
        last = self.buckets[-1]
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

    def take(self, used: Sequence[bool] | None, views: Sequence[bool]) -> None:
        """See ``Bucket.take``; ``used`` and ``views`` in the order of ``parameters``."""
        start = 0
        for bucket in self.buckets:
            end = start + len(bucket.parameters)
            bucket.take(None if used is None else used[start:end], views[start:end])
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
