"""Communication of tensors between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.context import ParallelContext
from ..core.scatter import map_tensors

COPIED = 1 << 20
"""The maximum size in bytes of a tensor that is copied, so that its rank does not wait for the broadcast."""


AHEAD = 2


@dataclass(frozen=True)
class Arriving:
    """A tensor that is being received."""

    tensor: Tensor
    work: Any

    def arrived(self) -> Tensor:
        """Wait for the tensor."""
        self.work.wait()
        return self.tensor


class Wires:
    """Between any two ranks tensors arrive in the order in which they were sent; shapes are known on both sides.

    Each direction has its own group: NCCL runs the calls of one group in order, and two ranks that both send first
    would deadlock.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.group, self.device = context.mesh["pp"].get_group(), context.device
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self._down = _same_ranks(context)
        self._sent: dict[Any, Tensor] = {}
        """Send works, each with its tensor, whose memory must not change until the work is complete."""

    def send(self, tensor: Tensor, rank: int) -> Any:
        """Start to send; ``flush`` waits. Returns the work for ``has_arrived``."""
        self._sent = {work: kept for work, kept in self._sent.items() if not work.is_completed()}
        whole = tensor.detach().contiguous()
        group = self.group if rank > self.rank else self._down
        work = dist.isend(_bytes(whole), group=group, group_dst=rank)
        self._sent[work] = whole
        return work

    def has_arrived(self, work: Any) -> None:
        """Free a tensor that was sent. The caller knows that the other rank has it, so the wait returns at once.

        NCCL's works report this themselves. Gloo's works are complete only after ``wait``.
        """
        if work in self._sent:
            work.wait()
            del self._sent[work]

    @property
    def ahead(self) -> int:
        """How many receives from a rank are started before they are needed.

        Gloo starts to send when the receiver is ready. NCCL's calls run in order: a send after a receive that depends
        on it would never start.
        """
        return AHEAD if self.device.type == "cpu" else 0

    def begin_to_receive(self, shape: torch.Size, dtype: torch.dtype, rank: int) -> Arriving:
        """Start to receive the next tensor from a rank."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        group = self._down if rank > self.rank else self.group
        return Arriving(tensor, dist.irecv(_bytes(tensor), group=group, group_src=rank))

    def receive(self, shape: torch.Size, dtype: torch.dtype, rank: int) -> Tensor:
        """Receive a tensor and wait for it."""
        return self.begin_to_receive(shape, dtype, rank).arrived()

    def flush(self) -> None:
        """Wait until all sends are complete."""
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def from_rank(self, tensor: Tensor, rank: int) -> None:
        """Broadcast the values of one rank to all."""
        dist.broadcast(_bytes(tensor), group=self.group, group_src=rank)

    def hand_out(self, tensor: Tensor, rank: int) -> None:
        """As ``from_rank``, but the sender of a small tensor does not wait; ``flush`` waits."""
        if self.rank != rank or tensor.nbytes > COPIED:
            self.from_rank(tensor, rank)
            return
        copy = tensor.clone()  # user code may change the tensor
        work = dist.broadcast(_bytes(copy), group=self.group, group_src=rank, async_op=True)
        self._sent[work] = copy

    def of_holder(self, mine: Tensor, owner: int) -> Tensor:
        """A copy of the owner's tensor on all ranks."""
        if self.rank == owner:
            whole = mine.detach().clone()
        else:
            whole = torch.empty(mine.shape, dtype=mine.dtype, device=self.device)
        self.from_rank(whole, owner)
        return whole

    def of_owner(self, mine: Any, owner: int) -> Any:
        """The owner's object or tensors (on the CPU), on all ranks."""
        found = [_on_cpu(mine) if self.rank == owner else None]
        dist.broadcast_object_list(found, group=self.group, group_src=owner)
        return found[0]

    def to_first(self, mine: Any, owner: int) -> Any:
        """The owner's object or tensors (on the CPU) on the first rank; None elsewhere."""
        if owner == 0:
            return mine if self.rank == 0 else None
        if self.rank == owner:
            dist.send_object_list([_on_cpu(mine)], group=self.group, group_dst=0)
        if self.rank == 0:
            found = [None]
            dist.recv_object_list(found, group=self.group, group_src=owner)
            return found[0]
        return None

    def summed(self, mine: Tensor, holders: Sequence[int]) -> Tensor:
        """The sum of the holders' tensors, on each of them. The first holder computes it."""
        first = holders[0]
        if self.rank != first:
            self.send(mine, first)
            self.flush()
            return self.receive(mine.shape, mine.dtype, first)
        total = mine.clone()
        for other in holders[1:]:
            total += self.receive(mine.shape, mine.dtype, other)
        for other in holders[1:]:
            self.send(total, other)
        self.flush()
        return total

    def sum_over_all(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def begin_to_sum(self, tensor: Tensor) -> Any:
        """As ``sum_over_all``, but asynchronous; returns the work to wait for."""
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The maximum of each number over the ranks."""
        told = torch.tensor(numbers, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        found: list[int] = told.tolist()
        return found


def _same_ranks(context: ParallelContext) -> dist.ProcessGroup:
    """A second group of this pipeline's ranks. All ranks of the job must call it."""
    names = context.mesh.mesh_dim_names or ()
    along = context.mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, context.plan.degree("pp"))
    groups = [dist.new_group(ranks.tolist()) for ranks in along]
    mine = (along == dist.get_rank()).any(1).tolist().index(True)
    group: dist.ProcessGroup = groups[mine]
    return group


def _bytes(tensor: Tensor) -> Tensor:
    """A view of booleans and complex numbers in a dtype that every backend can send."""
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _on_cpu(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.detach().cpu())
