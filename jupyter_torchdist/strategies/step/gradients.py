"""Averages gradients in buckets after a backward, without a wrapper around the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...torch_private.autograd import at_end_of_backward
from ..core.agreement import of_every_rank
from ..core.dtensors import local
from ..core.outputs import opened
from ..core.scatter import tensors_in

BUCKET_BYTES = 25 * 2**20
"""The bucket size of DDP."""
ALONE_BYTES = 2**19
"""Gradients from this size on are averaged in place: two copies would cost more than a separate collective."""


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over ``group``; every rank gives the same parameters in the same order.

    A gradient that is None on some ranks counts as zeros there; if it is None on all ranks, it remains None.
    Gradients that are equal on all ranks do not change, so accumulated gradients may be averaged again.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or group.size() == 1:
        return
    used = used_somewhere(trained, group)
    dense: list[Tensor] = []
    with torch.no_grad():
        for parameter, state in zip(trained, used, strict=True):
            if state == UNUSED:
                continue
            if state == SPARSE:
                average_sparse(parameter, group)
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            dense.append(local(parameter.grad))
        for finish in [average_bucket(bucket, group) for bucket in buckets(dict.fromkeys(dense))]:
            finish()


UNUSED, SPARSE, DENSE = 0, 1, 2


def used_somewhere(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[int]:
    """``UNUSED``, ``SPARSE`` or ``DENSE`` for each gradient, over all ranks; dense if ranks differ.

    A rank on which all gradients are dense does not wait for the others.
    """
    device = local(parameters[0]).device
    states = [state_of(parameter) for parameter in parameters]
    agreed = torch.tensor(states, dtype=torch.int32, device=device)
    told = dist.all_reduce(agreed, dist.ReduceOp.MAX, group, async_op=True)
    if all(state == DENSE for state in states):
        return states
    told.wait()
    return agreed.tolist()


def state_of(parameter: nn.Parameter) -> int:
    """``UNUSED``, ``SPARSE`` or ``DENSE`` for this rank's gradient."""
    return UNUSED if parameter.grad is None else SPARSE if parameter.grad.is_sparse else DENSE


def average_sparse(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Average the sparse gradient of an embedding: rows and indices are sent, never the full table."""
    mine = parameter.grad
    if mine is None:
        none = parameter.new_empty((0, *parameter.shape[1:]))
        mine = _rows(torch.empty((1, 0), dtype=torch.int64, device=parameter.device), none, parameter)
    mine = mine.coalesce()
    parts = of_every_rank((mine.indices().cpu(), mine.values().cpu()), group)
    indices = torch.cat([part[0] for part in parts], 1).to(parameter.device)
    values = torch.cat([part[1] for part in parts]).to(parameter.device)
    parameter.grad = _rows(indices, values / group.size(), parameter).coalesce()


def _rows(indices: Tensor, values: Tensor, like: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


def buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one dtype and device up to the bucket size, in order; each large tensor alone."""
    buckets: list[list[Tensor]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        if size >= ALONE_BYTES:
            buckets.append([tensor])
            continue
        if key not in open_ or room[key] < size:
            open_[key], room[key] = [], BUCKET_BYTES
            buckets.append(open_[key])
        open_[key].append(tensor)
        room[key] -= size
    return buckets


def average_bucket(bucket: list[Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
    """Start to replace gradients of one dtype and device by their means; the returned function completes it."""
    in_place = len(bucket) == 1 and bucket[0].is_contiguous()
    flat = bucket[0] if in_place else torch.cat([tensor.reshape(-1) for tensor in bucket])
    flat /= group.size()  # before the sum, as DDP does: half precision would overflow
    sent = dist.all_reduce(flat, group=group, async_op=True)

    def finish() -> None:
        sent.wait()
        if in_place:
            return
        for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    return finish


def average_after_backward(model: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of ``parameters`` at the end of every backward through ``model``, on all ranks."""

    def average() -> None:
        average_gradients(parameters, group)

    at_end = AtEndOfBackward(average)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(at_end.ask)
    model.register_forward_hook(at_end.watch)


class AtEndOfBackward:
    """Calls ``do`` once at the end of each backward through the outputs or parameters of a model.

    The hooks on outputs also include a rank that used none of the parameters.
    """

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self.asked = False

    def watch(self, _model: nn.Module, _args: object, output: object) -> None:
        """Forward hook of the model."""
        self.asked = False  # an earlier backward that raised did not reset it
        for tensor in tensors_in(opened(output)):
            if tensor.requires_grad:
                tensor.register_hook(self.ask)

    def ask(self, _tensor: Tensor) -> None:
        """Tensor hook: schedules the call for the end of the backward."""
        if not self.asked:
            self.asked = True
            at_end_of_backward(self._end)

    def _end(self) -> None:
        self.asked = False
        self.do()
