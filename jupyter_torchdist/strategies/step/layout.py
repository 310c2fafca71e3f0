"""Which gradients travel together: flat buckets, in an order that all ranks share."""

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
"""Numbers behind those that tell which gradients a rank had; the second ones are for whoever calls."""
LAST_BYTES = 2**21
"""The last bucket, for which nothing is left to overlap with, is no larger. Twice DDP's first one: what is sent early
takes processor time from the backward, and of a small model one bucket is the faster way."""

Memory = tuple[Tensor, list[Tensor]]
"""A flat tensor, and a view of it for each gradient."""

_OURS_ALONE = 2
"""Users of a storage, beside such views, that no other tensor has: the flat one, and who asks."""


class Bucket:
    """Gradients of one type and device, laid end to end in ``flat`` while they are sent.

    ``tail`` numbers of the last bucket follow them. ``sent`` is the work in flight. ``flat`` is another one in each
    backward while the gradients of the last, which the cell may have kept, lie in theirs.
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
        """Of ``flat``, each as its parameter lies in memory; the tail is not among them."""
        self.came: list[bool] = []
        """Which gradients this rank had, when that was looked at last."""
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
        """A backward begins in which all gradients are new: autograd adds them to zeros, where they are sent from."""
        self._memory, self._is_empty = self._free(), False
        self._memory[0].zero_()
        self._place(*self._memory)
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            parameter.grad = piece

    def look(self) -> bool:
        """Whether this rank has all gradients. In an open bucket a place is written to when one comes."""
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
        """Whether nothing has come to a place of an open bucket."""
        piece = self.pieces[number]
        return self.parameters[number].grad is piece and piece._version == 0

    def fill(self, tail: Tensor | None, *, summed: bool) -> None:
        """``flat`` holds all of this rank's gradients, after a ``look``: zeros where it has none.

        ``summed``: they are not divided.
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
        # Views of the storage, but not of a tensor: detach_() works. New ones in each backward, as gradients are.
        self.pieces = [part.data for part in parts]

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Of ``flat``, a view for each parameter."""
        parts = list(unflatten_dense_tensors(flat, self.parameters))
        for number, start in self._odd:
            one = self.parameters[number]
            parts[number] = flat.as_strided(one.shape, self._strides[number] or one.stride(), start)
        return parts

    def _new(self) -> Memory:
        flat = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        return flat, self._parts(flat)

    def _free(self) -> Memory:
        """Memory of no gradient: that of the last backward, where none is left; new memory costs a fault a page."""
        last, self._last = self._last, None
        if last is not None:
            flat, parts = last
            ours = len(parts) + _OURS_ALONE
            if storage_references(flat) == ours:
                return last
        return self._new()

    def _shared(self) -> Tensor | None:
        """The storage in which gradients lie one after the other, with room for the tail, and nothing else."""
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
        """No gradient of an open bucket lies in ``flat`` any more: one that comes from now on is a further one."""
        if self._is_open and not self._is_empty:
            self._is_empty = True
            for parameter in self.parameters:
                parameter.grad = None

    def means(self, used: Sequence[bool] | None) -> list[tuple[nn.Parameter, Tensor]]:
        """What came of an open bucket; ``used``: which gradients some rank had, None for all."""
        pairs = zip(self.parameters, self.pieces, strict=True)
        return [pair for number, pair in enumerate(pairs) if used is None or used[number]]

    def wait(self) -> None:
        """Nobody else writes to ``flat`` any more: a later backward may have it. CUDA keeps memory itself."""
        self.sent.wait()
        if self.device.type == "cpu":
            self._last = self._memory

    def take(self, used: Sequence[bool] | None, *, views: bool) -> None:
        """The gradients become the means; those of which ``used`` says that no rank had one stay None.

        ``views``: they are those in ``flat``, and nothing is copied.
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
        """As before it was filled."""
        self.flat = self.sent = self._memory = None
        self._is_filled = False
        self.pieces, self.came = [], []


class BucketLayout:
    """Buckets of up to ``bucket_bytes``, those of the last parameters first: a backward begins with them.

    ``counted``: the last one ends with a number for each parameter (whether this rank had its gradient), ``ALARMS``
    more, and ``CARGO``.
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
        """Whether it is known of which type each gradient will be."""

    def tail(self, numbers: Sequence[float]) -> Tensor | None:
        """What is copied to the end of the last bucket: ``numbers``, filled up with zeros."""
        if not self.counted:
            return None
        last = self.buckets[-1]
        values = array("d", [*numbers, *[0.0] * (last.tail - len(numbers))])
        return torch.frombuffer(values, dtype=torch.float64)

    def told(self, *, whole: bool) -> list[float]:
        """The sums (means, where gradients were averaged) of the ranks' tails; not ``whole``: of alarms and cargo."""
        last = self.buckets[-1]
        assert last.flat is not None
        numbers: list[float] = last.flat[last.elements - (last.tail if whole else ALARMS + CARGO) :].real.tolist()
        return numbers

    def look(self) -> bool:
        """Whether this rank has all gradients, of buckets that are not sent."""
        for bucket in self.buckets:
            if not bucket.is_sent:
                bucket.look()
        return all(self.came())

    def came(self) -> list[bool]:
        """Which gradients this rank had."""
        return [came for bucket in self.buckets for came in bucket.came]

    def take(self, used: Sequence[bool] | None, *, views: bool) -> None:
        """See ``Bucket.take``; ``used`` in the order of ``parameters``."""
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
        """No gradient lies in a bucket any more."""
        for bucket in self.buckets:
            bucket.let_go()
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


def _strides_in_memory(parameter: nn.Parameter) -> tuple[int, ...] | None:
    """Of its gradient in a bucket; None for one number after the other."""
    if parameter.is_contiguous() or not is_dense(parameter):
        return None
    return parameter.stride()


def _type_of(parameter: nn.Parameter) -> torch.dtype:
    """Of its gradients."""
    kind: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return kind or parameter.dtype
