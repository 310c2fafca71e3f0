"""Sends a bucket of gradients uncompressed, in half precision, or as low-rank factors (PyTorch's hooks).

The hooks were written for DDP's reducer, but need only a bucket (``torch.distributed.algorithms.ddp_comm_hooks``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ...torch_private.collectives import power_sgd_compresses
from .layout import Bucket

POWERSGD_START = 1000
"""Steps before PowerSGD begins to compress: early gradients change too much (torch's own default)."""

_SHORTER: dict[str, Any] = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
_LONG = (torch.float32, torch.float64)


class Compression:
    """Sends buckets. ``kind``: ``none``, ``fp16``, ``bf16``, ``powersgd``.

    PowerSGD (Vogels et al. 2019, https://arxiv.org/abs/1905.13727) keeps the error of a bucket and adds it the next
    time, so several backwards per step are correct, too. ``early``: several buckets may be in flight at once.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup) -> None:
        self._kind, self._group = kind, group
        self._state: Any = powersgd_state(group) if kind == "powersgd" else None
        self.sums = kind == "none"
        """Whether gradients may be divided in advance; not with PyTorch's hooks, which divide them."""
        self.early = self._state is None  # PowerSGD's second and third all-reduce come when the first has ended

    def divisor(self, dtype: torch.dtype) -> int:
        """The divisor of gradients before they are sent; PyTorch's hooks divide by themselves.

        The division comes before the sum, as in DDP: half precision would overflow.
        """
        return self._group.size() if self._is_whole(dtype) else 1

    def _is_whole(self, dtype: torch.dtype) -> bool:
        return dtype not in _LONG or self._kind == "none"

    def send(self, bucket: Bucket) -> None:
        """Start to replace ``bucket.flat`` by its mean over the group; ``bucket.sent.wait()`` completes it."""
        flat = bucket.flat
        assert flat is not None
        if self._is_whole(flat.dtype):
            bucket.sent = dist.all_reduce(flat, group=self._group, async_op=True)
        elif self._state is None:
            bucket.sent = _SHORTER[self._kind](self._group, Seen(bucket))
        else:
            self._send_factors(bucket)

    def _send_factors(self, bucket: Bucket) -> None:
        """A layer with a zero gradient leaves a zero factor, and the next steps would start from it forever.

        In that case all factors of the bucket are reset to random numbers.
        """
        seen: Any = Seen(bucket)
        bucket.sent = powerSGD_hook.powerSGD_hook(self._state, seen)
        bucket.sent.wait()
        factors = self._state.q_memory_dict.get(bucket.index)
        if factors is not None and any(not one.any() for one in factors.split(self._widths(seen.gradients()))):
            self._state.p_memory_dict.pop(bucket.index)
            self._state.q_memory_dict.pop(bucket.index)

    def _widths(self, gradients: list[Tensor]) -> list[int]:
        """Number of elements in the second factor of each compressed gradient, in the hook's order: by shape."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for gradient in gradients:
            rows, columns = gradient.reshape(gradient.shape[0], -1).shape
            rank = min(rows, columns, self._state.matrix_approximation_rank)
            if power_sgd_compresses(rows, columns, rank, self._state.min_compression_rate):
                shapes.setdefault((rows, columns), []).append(columns * rank)
        return [width for widths in shapes.values() for width in widths]

    def forget(self) -> None:
        """The buckets have changed: discard the errors of the old ones."""
        if self._state is not None:
            for kept in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
                kept.clear()


class Seen:
    """The interface of ``torch.distributed.GradBucket``, which cannot be constructed in Python."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        return self._bucket.index

    def is_last(self) -> bool:
        return self._bucket.is_last

    def buffer(self) -> Tensor:
        assert self._bucket.flat is not None
        return self._bucket.flat

    def gradients(self) -> list[Tensor]:
        """Matrices and vectors; the tail is a vector, which PowerSGD sends uncompressed."""
        pieces = [piece.view(1) if piece.dim() == 0 else piece for piece in self._bucket.pieces]
        end = self.buffer()[self._bucket.elements - self._bucket.tail :]
        return [*pieces, end] if self._bucket.tail else pieces


def powersgd_state(group: dist.ProcessGroup) -> powerSGD_hook.PowerSGDState:
    """The state of PowerSGD between steps: factors of rank 1, and errors.

    The epsilon prevents a division by zero for a layer with a zero gradient.
    """
    return powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=POWERSGD_START, orthogonalization_epsilon=1e-12)
