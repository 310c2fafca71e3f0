"""Where gradients that are not finite come from: the line of the loss, the samples, and the rank, noted in a backward.

Gradients are averaged in the backward, and then every rank has the NaN of any rank. So a rank notes two things before
that: whether the gradient of one small layer near the input is finite, because a NaN goes on to the layers before it;
and for which samples the model's outputs, or their gradients, are not finite.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...torch_private.autograd import in_backward
from ...torch_private.fully_shard import fsdp_shown
from ...torch_private.places import DisableTorchFunctionSubclass
from ...usercode.frames import users_frame
from ..core.dtensors import local
from ..core.patches import Patches
from ..core.scatter import BatchShard, tensors_in
from ..sharded.unsharded import groups_of, units_in

_SMALL = 2**16
"""Elements of a layer near the input whose gradient is looked at in each backward."""
_MOST = 64
"""How many outputs are noted in one step."""

OUTPUTS, GRADIENTS = "the model's outputs", "the gradients of the model's outputs"


@dataclass(frozen=True)
class Rows:
    """Which samples of a batch a rank's flags belong to: the first one's number, and how many it has of ``total``.

    ``joined``: the outputs are the ones of all ranks. ``total`` 0: each rank has the whole batch.
    """

    first: int
    mine: int
    total: int
    joined: bool

    @staticmethod
    def of(share: BatchShard | None, *, joined: bool) -> Rows:
        """``share`` None: every rank has computed the whole batch."""
        if share is None:
            return Rows(0, 0, 0, joined=False)
        return Rows(share.mine.start, share.mine.stop - share.mine.start, share.total, joined)

    def odd(self, tensor: Tensor) -> Tensor | None:
        """For each sample of this rank whether ``tensor`` is not finite there; None if it has no samples in front."""
        if not tensor.dim() or not tensor.size(0):
            return None
        count = (self.total if self.joined else self.mine) or tensor.size(0)
        if tensor.size(0) % count:
            return None
        flags = ~torch.isfinite(tensor.detach()).reshape(count, -1).all(1)
        return flags[self.first : self.first + self.mine] if self.joined else flags


@dataclass(frozen=True)
class Origin:
    """What a rank has noted of one step. ``samples``: their numbers in the batch; ``what`` of them is not finite."""

    near: bool = False
    samples: tuple[int, ...] = ()
    what: str = ""


class Origins:
    """Notes ``Origin``. On a GPU nothing is read before ``now``."""

    def __init__(self, device: torch.device) -> None:
        self._at_once = device.type == "cpu"
        self._near: list[Tensor] = []
        self._odd: list[tuple[str, int, Tensor]] = []
        self._handles: list[Any] = []
        self.line = ""
        """Where the cell has called ``backward()`` last: ``Cell In[3], line 8``."""

    def install(self, patches: Patches) -> None:
        patches.around(torch.autograd, "backward", self._backward)

    def end(self) -> None:
        """Remove all hooks from parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def look_at(self, models: Iterable[nn.Module], trained: Iterable[nn.Parameter]) -> None:
        """Look at the gradient of a small one of the ``trained`` parameters, the first in the order of the model."""
        self.end()
        gathered = {shard: whole for whole, shard in fsdp_shown(groups_of(units_in(models))).items()}
        whole = [gathered.get(one, one) for one in trained]
        most = max(_SMALL, min((one.numel() for one in whole if one.numel()), default=0))
        for one in whole:
            if one.requires_grad and not one.is_meta and 0 < one.numel() <= most:
                with DisableTorchFunctionSubclass():  # not the shard of a gathered one
                    self._handles.append(one.register_post_accumulate_grad_hook(self._arrived))
                return

    def watch(self, outputs: Any, rows: Rows) -> None:
        """Look at the gradients of a model's ``outputs`` when they come."""
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None and not isinstance(tensor, DTensor):
                came = partial(self._came, weakref.ref(tensor), tensor.output_nr, rows)
                tensor.grad_fn.register_prehook(came)

    def now(self) -> Callable[[], Origin]:
        """What was noted since the last call, as a function that reads it. On a GPU it waits for the values."""
        near, odd, self._near, self._odd = self._near, self._odd, [], []
        return lambda: _read(near, odd)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not in_backward():
            frame = users_frame(sys._getframe(1))
            if frame is not None:
                self.line = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        return original(*args, **kwargs)

    def _arrived(self, parameter: Tensor) -> None:
        if parameter.grad is not None and len(self._near) < _MOST:
            self._near.append(_sum(parameter.grad))

    def _came(self, output: weakref.ref[Tensor], number: int, rows: Rows, grads: Sequence[Tensor | None]) -> None:
        grad = grads[number]
        if grad is None or isinstance(grad, DTensor) or len(self._odd) >= _MOST:
            return
        if self._at_once and bool(torch.isfinite(_sum(grad))):
            return
        whole = output()
        for what, tensor in ((OUTPUTS, whole), (GRADIENTS, grad)):
            flags = None if tensor is None else rows.odd(tensor)
            if flags is not None:
                self._odd.append((what, rows.first, flags))


def _read(near: Sequence[Tensor], odd: Sequence[tuple[str, int, Tensor]]) -> Origin:
    is_near = any(not bool(torch.isfinite(one)) for one in near)
    for what in (OUTPUTS, GRADIENTS):
        found = [(first, flags.nonzero().flatten().tolist()) for kind, first, flags in odd if kind == what]
        samples = sorted({first + number for first, numbers in found for number in numbers})
        if samples:
            return Origin(is_near, tuple(samples), what)
    return Origin(is_near)


@torch.no_grad()
def _sum(gradient: Tensor) -> Tensor:
    """Not finite if ``gradient`` is not: one pass, no memory."""
    values = local(gradient)
    values = values.coalesce().values() if values.is_sparse else values
    return values.sum(dtype=WIDE.get(values.dtype))


WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype for sums, so that they do not overflow."""
