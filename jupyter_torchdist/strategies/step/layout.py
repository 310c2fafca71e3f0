"""The assignment of gradients to flat buckets, in the same order on all ranks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_private.places import unflatten_dense_tensors
from ...torch_private.tensors import copy_all, is_dense, storage_references

ALARMS, CARGO = 2, 4
"""How many numbers follow the flags of the gradients in the last bucket: for alarms, and for the caller."""
LAST_BYTES = 2**21
"""Maximum size of the last bucket, which overlaps with nothing. Twice the first bucket of DDP: early sending takes CPU
time from the backward, and for a small model one bucket is faster."""

Memory = tuple[Tensor, list[Tensor]]
"""A flat tensor, and a view of it for each gradient."""

_OURS_ALONE = 2
"""References to an otherwise unused storage, beside the views: the flat tensor and the caller."""


class Bucket:
    """Gradients of one dtype and device, flattened into ``flat`` while they are sent.

    In the last bucket ``tail`` numbers follow them. ``sent`` is the work in flight. A backward gets a new ``flat``
    while gradients of the previous backward, which the cell may have kept, still use the old one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], divisor: int, tail: int = 0) -> None:
        self.parameters = tuple(parameters)
        self.tail = tail
        self.is_last = False
        self.index = 0
        self.dtype = _type_of(parameters[0])
        self.elements = sum(parameter.numel() for parameter in parameters) + tail
        self.device = parameters[0].device
        self.flat: Tensor | None = None
        self._memory: Memory | None = None
        self._last: Memory | None = None
        self.sent: Any = None
        self.pieces: list[Tensor] = []
        """Views of ``flat`` with the strides of the parameters; without the tail."""
        self.came: list[bool] = []
        """Which gradients this rank had at the last ``look``."""
        self._is_empty = False
        self._is_filled = False
        self._divisor = divisor
        self._strides = [_strides_in_memory(parameter) for parameter in parameters]
        starts = accumulate((parameter.numel() for parameter in parameters), initial=0)
        self._odd = [
            (number, start)
            for number, (start, parameter) in enumerate(zip(starts, parameters, strict=False))
            if self._strides[number] is not None or not parameter.numel()
        ]

    @property
    def is_sent(self) -> bool:
        return self.sent is not None

    @property
    def _is_open(self) -> bool:
        return self._memory is not None

    def open(self) -> None:
        """Start a backward without existing gradients: autograd accumulates into zeros in the bucket."""
        self._memory, self._is_empty = self._free(), False
        self._memory[0].zero_()
        self._place(*self._memory)
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            parameter.grad = piece

    def look(self) -> bool:
        """Whether this rank has all gradients. In an open bucket, a piece was written to if its gradient came."""
        if self._is_open:
            in_place = [
                parameter.grad is piece and piece._version > 0
                for parameter, piece in zip(self.parameters, self.pieces, strict=True)
            ]
            self._is_filled = all(in_place)
            if self._is_filled:
                self.came = in_place
                return True
        self.came = [
            parameter.grad is not None and not (self._is_open and self._is_zero(number))
            for number, parameter in enumerate(self.parameters)
        ]
        return all(self.came)

    def _is_zero(self, number: int) -> bool:
        """Whether no gradient has come to a piece of an open bucket."""
        piece = self.pieces[number]
        return self.parameters[number].grad is piece and piece._version == 0

    def fill(self, tail: Tensor | None, *, summed: bool) -> None:
        """Put all gradients of this rank into ``flat``, zeros for missing ones; call ``look`` before.

        ``summed``: gradients are not divided.
        """
        if self.flat is None:
            shared = self._shared()
            self._place(*(self._new() if shared is None else (shared, self._parts(shared))))
        if not self._is_filled:
            self._fill_up()
        flat = self.flat
        assert flat is not None
        if tail is not None:
            flat[self.elements - self.tail :].copy_(tail)
        if self._divisor != 1 and not summed:
            flat /= self._divisor

    def _fill_up(self) -> None:
        pieces, grads = [], []
        for parameter, piece, came in zip(self.parameters, self.pieces, self.came, strict=True):
            grad = parameter.grad
            if not came or grad is None:
                piece.zero_()
            elif grad is not piece and grad.data_ptr() != piece.data_ptr():
                if grad.is_sparse:
                    parameter.grad = grad = grad.to_dense()
                pieces.append(piece)
                grads.append(grad)
                if self._is_open:
                    parameter.grad = piece
        if pieces:
            copy_all(pieces, grads)

    def _place(self, flat: Tensor, parts: Sequence[Tensor]) -> None:
        self.flat = flat
        # ``data``: not views of a tensor, so detach_() works. New ones in each backward, as gradients are.
        self.pieces = [part.data for part in parts]

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, one for each parameter."""
        parts = list(unflatten_dense_tensors(flat, self.parameters))
        for number, start in self._odd:
            one = self.parameters[number]
            parts[number] = flat.as_strided(one.shape, self._strides[number] or one.stride(), start)
        return parts

    def _new(self) -> Memory:
        flat = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        return flat, self._parts(flat)

    def _free(self) -> Memory:
        """Unused memory: from the last backward if its gradients are gone. New memory costs page faults."""
        last, self._last = self._last, None
        if last is not None:
            flat, parts = last
            ours = len(parts) + _OURS_ALONE
            if storage_references(flat) == ours:
                return last
        return self._new()

    def _shared(self) -> Tensor | None:
        """The flat tensor of a storage that holds exactly these gradients and the tail, if there is one."""
        first = self.parameters[0].grad
        if first is None or first.is_sparse or first.dtype != self.dtype or first.storage_offset():
            return None
        if first.untyped_storage().nbytes() != self.elements * first.element_size():
            return None
        address = first.data_ptr()
        for parameter, stride in zip(self.parameters, self._strides, strict=True):
            grad = parameter.grad
            if grad is None or grad.is_sparse or grad.data_ptr() != address:
                return None
            if not grad.is_contiguous() if stride is None else grad.stride() != stride:
                return None
            address += grad.numel() * grad.element_size()
        return first.as_strided((self.elements,), (1,))

    def let_go(self) -> None:
        """Detach the gradients of an open bucket from ``flat``: a gradient that comes later is an additional one."""
        if self._is_open and not self._is_empty:
            self._is_empty = True
            for parameter in self.parameters:
                parameter.grad = None

    def means(self, used: Sequence[bool] | None) -> list[tuple[nn.Parameter, Tensor]]:
        """The means of an open bucket; ``used``: which gradients exist on some rank, None for all."""
        pairs = zip(self.parameters, self.pieces, strict=True)
        return [pair for number, pair in enumerate(pairs) if used is None or used[number]]

    def wait(self) -> None:
        """Wait for the collective. A later backward may then reuse ``flat``; for CUDA the allocator does that."""
        self.sent.wait()
        if self.device.type == "cpu":
            self._last = self._memory

    def take(self, used: Sequence[bool] | None, *, views: bool) -> None:
        """Set the gradients to the means; a gradient that exists on no rank (``used``) remains None.

        ``views``: the gradients become views of ``flat``, without a copy.
        """
        if self._is_open and not self._is_empty and used is None:
            return
        given, means = [], []
        for number, (parameter, mean) in enumerate(zip(self.parameters, self.pieces, strict=True)):
            grad = parameter.grad
            if used is not None and not used[number]:
                if self._is_open:
                    parameter.grad = None
            elif views and (grad is None or grad.dtype == mean.dtype):
                parameter.grad = mean
            elif grad is None:
                parameter.grad = mean.clone()
            else:
                given.append(grad)
                means.append(mean)
        if given:
            copy_all(given, means)

    def clear(self) -> None:
        """Reset to the state before ``fill``."""
        self.flat = self.sent = self._memory = None
        self._is_filled = False
        self.pieces, self.came = [], []


class BucketLayout:
    """Buckets of up to ``bucket_bytes``, starting with the last parameters, as a backward does.

    ``counted``: the last bucket ends with a flag for each parameter (whether this rank had its gradient), then
    ``ALARMS`` and ``CARGO`` more numbers.
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
        tails = [*[0] * (len(groups) - 1), len(parameters) + ALARMS + CARGO if counted else 0]
        self.counted = counted
        self.buckets = [
            Bucket(group, divisor_of(_type_of(group[0])), tail) for group, tail in zip(groups, tails, strict=True)
        ]
        last = self.buckets[-1]
        last.is_last = True
        for index, bucket in enumerate(self.buckets):
            bucket.index = index
        self.parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        self.has_places = all(getattr(parameter, "grad_dtype", parameter.dtype) for parameter in self.parameters)
        """Whether the dtype of every gradient is known in advance."""

    def tail(self, numbers: Sequence[float]) -> Tensor | None:
        """The tail of the last bucket: ``numbers``, padded with zeros."""
        if not self.counted:
            return None
        last = self.buckets[-1]
        values = array("d", [*numbers, *[0.0] * (last.tail - len(numbers))])
        return torch.frombuffer(values, dtype=torch.float64)

    def told(self, *, whole: bool) -> list[float]:
        """The sums (or means, as for gradients) of the ranks' tails; not ``whole``: only of alarms and cargo."""
        last = self.buckets[-1]
        assert last.flat is not None
        numbers: list[float] = last.flat[last.elements - (last.tail if whole else ALARMS + CARGO) :].real.tolist()
        return numbers

    def look(self) -> bool:
        """``look`` at the buckets that are not sent. Returns whether this rank has all gradients."""
        for bucket in self.buckets:
            if not bucket.is_sent:
                bucket.look()
        return all(self.came())

    def came(self) -> list[bool]:
        """Which gradients this rank had."""
        return [came for bucket in self.buckets for came in bucket.came]

    def take(self, used: Sequence[bool] | None, *, views: bool) -> None:
        """See ``Bucket.take``; ``used`` has the order of ``parameters``."""
        start = 0
        for bucket in self.buckets:
            end = start + len(bucket.parameters)
            bucket.take(None if used is None else used[start:end], views=views)
            start = end
        self.clear()

    def means(self, used: Sequence[bool] | None) -> list[tuple[nn.Parameter, Tensor]]:
        """See ``Bucket.means``."""
        start, found = 0, []
        for bucket in self.buckets:
            end = start + len(bucket.parameters)
            found += bucket.means(None if used is None else used[start:end])
            start = end
        return found

    def give_up(self) -> None:
        """Detach all gradients from the buckets."""
        for bucket in self.buckets:
            bucket.let_go()
        self.clear()

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.clear()


def _grouped(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Group parameters of one dtype and device, in order; the first group is small, because it is sent last."""
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


def _strides_in_memory(parameter: nn.Parameter) -> tuple[int, ...] | None:
    """The strides of its gradient in a bucket; None if contiguous."""
    if parameter.is_contiguous() or not is_dense(parameter):
        return None
    return parameter.stride()


def _type_of(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of its gradients."""
    kind: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return kind or parameter.dtype
