"""The part of the state that a rank writes, and its copies, so that the training goes on during the write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate


class Piece:
    """This rank's part of one tensor: its offsets in the full tensor, and its values (original or CPU copy)."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            self.items: list[WriteItem] = tensor.__create_write_items__(name, tensor)
            self.tensor = tensor.to_local()
        else:
            self.items, self.tensor = [_whole(name, tensor)], tensor

    def __create_write_items__(self, name: str, piece: object) -> list[WriteItem]:
        """torch.distributed.checkpoint calls this on objects that are not tensors."""
        return self.items


def _whole(name: str, tensor: torch.Tensor) -> WriteItem:
    start = torch.Size([0] * tensor.dim())
    chunk = ChunkStorageMetadata(start, tensor.size())
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
    return WriteItem(MetadataIndex(name, start), WriteItemType.TENSOR, tensor_data=data)


FLAT = "state"
"""The only key in the dictionary for torch.distributed.checkpoint, which spends 0.1 ms per key."""


class Planner(DefaultSavePlanner):
    """Plans over a flat dictionary of pieces and pickled objects, below ``FLAT``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[FLAT], storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.tensor if isinstance(value, Piece) else value


class Buffers:
    """Memory for the copies, reused by the next save: allocating it costs several times more than copying."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def copy(self, pieces: Mapping[str, Piece]) -> None:
        """Replace the tensor of each piece by a copy on the CPU. After the return, the originals may change."""
        self._held = {name: buffer for name, buffer in self._held.items() if name in pieces}
        on_device = False
        for name, piece in pieces.items():
            source = piece.tensor
            on_device = on_device or source.is_cuda
            piece.tensor = self._buffer(name, source).copy_(source, non_blocking=source.is_cuda)
        if on_device:
            torch.cuda.current_stream().synchronize()

    def _buffer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        held = self._held.get(name)
        if held is None or held.size() != source.size() or held.dtype != source.dtype:
            held = torch.empty(source.size(), dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
            self._held[name] = held
        return held


def size_of(tensor: torch.Tensor) -> int:
    """Bytes that this rank's part adds to the checkpoint."""
    if isinstance(tensor, DTensor):
        shape, placements = tensor.device_mesh.shape, tensor.placements
        copies = [size for size, how in zip(shape, placements, strict=True) if isinstance(how, Replicate)]
        return tensor.to_local().nbytes // math.prod(copies)
    return tensor.numel() * tensor.element_size()


def divided(held: list[dict[str, tuple[int, bool]]]) -> list[set[str]]:
    """For each rank, the full tensors that it writes. ``held``, per rank: (size, whether equal on all ranks) by name.

    A tensor that is surely equal on all ranks goes to the rank with the least to write. Any other tensor, for example
    a buffer that may differ between ranks, goes to the lowest rank that has it.
    """
    load = [0] * len(held)
    chosen: list[set[str]] = [set() for _ in held]
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(held):
        for name in names:
            holders.setdefault(name, []).append(rank)
    largest_first = sorted(holders, key=lambda name: (-held[holders[name][0]][name][0], name))
    for name in largest_first:
        size, shared = held[holders[name][0]][name]
        rank = min(holders[name], key=lambda number: load[number]) if shared else holders[name][0]
        load[rank] += size
        chosen[rank].add(name)
    return chosen


def not_finite(pieces: Mapping[str, Any]) -> list[str]:
    """Names of the pieces that contain NaN or infinity."""
    return [name for name, piece in pieces.items() if isinstance(piece, Piece) and _has_odd_values(piece.tensor)]


def _has_odd_values(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):  # one pass, no memory; the sum may overflow
        return False
    return not bool(torch.isfinite(tensor).all())
