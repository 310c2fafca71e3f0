"""Views of a sharded tensor in the cell: ``weight[0].zero_()``, ``p.grad[:4] *= 2``, ``chunk``, ``diagonal``.

Along a sharded dimension DTensor gathers, so its "view" is a copy, and values written to it are lost silently. Here
such a copy is a ``WritableView``: writes to it are copied to its tensor, and it is updated when its tensor has changed.
All ranks do this at the same time, because all of them run the cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard

from ...torch_private.autograd import in_backward
from ...torch_private.dtensors import aten_operations, dtensor_dispatches_subclasses
from ...torch_private.places import StridedShard
from ..core.dtensors import Handler, as_ever, fill, in_full, whole, write_in_full
from ..core.scatter import map_tensors, tensors_in

_VIEWS = (
    *("select.int", "slice.Tensor", "split.Tensor", "split_with_sizes", "unbind.int", "view", "_unsafe_view", "t"),
    *("transpose.int", "permute", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "expand", "diagonal"),
    *("unfold", "as_strided"),
)
_WRITES = (
    *("fill_.Tensor", "index_put_", "_index_put_impl_", "index_fill_.int_Scalar", "index_fill_.int_Tensor"),
    *("index_copy_", "index_add_", "index_reduce_", "scatter_.src", "scatter_.value", "scatter_add_"),
    *("scatter_reduce_.two", "masked_scatter_", "put_", "tril_", "triu_", "renorm_", "fill_diagonal_"),
)
"""Writes that DTensor does not support in all dimensions or with plain tensors, or applies to each local shard."""
_READS = (
    *("index.Tensor", "index_select", "gather", "take", "stack", "cat", "mm", "mv", "bmm", "dot", "addmm", "addmv"),
    *("sort", "sort.stable", "topk", "kthvalue", "median", "median.dim", "mode", "histc", "bucketize.Tensor"),
    *("unique_dim", "_unique2", "unique_consecutive", "tril", "triu", "renorm", "_linalg_svd", "_linalg_eigh"),
    *("linalg_qr", "_linalg_det", "cumsum", "flip", "roll", "isin.Tensor_Tensor", "_cdist_forward"),
    *("_pdist_forward", "_foreach_norm.Scalar", "nonzero", "masked_select", "bincount", "allclose", "equal"),
    *("searchsorted.Tensor", "scatter.value", "scatter.src", "index_add"),
)
"""Operations with which cells inspect weights, and which DTensor does not support in all cases."""
_OF_SOME = (
    *("max", "max.dim", "min", "min.dim", "amax", "amin", "aminmax", "argmax", "argmin", "linalg_vector_norm"),
    *("norm.Scalar", "norm.ScalarOpt_dim"),
)
"""Reductions that fail on an empty tensor; a rank's shard of a small tensor may be empty."""


def handlers() -> dict[Any, Handler]:
    """The handlers that run in place of DTensor's dispatch, by operation."""
    ours = (_VIEWS, _view), (_WRITES, write_in_full), (_READS, _read), (_OF_SOME, _reduce)
    return {operation: handler for names, handler in ours for operation in _named(names)}


def _named(names: Sequence[str]) -> Iterator[Any]:
    for name in names:
        packet, _, overload = name.partition(".")
        yield getattr(getattr(torch.ops.aten, packet), overload or "default")


class WritableView(DTensor):
    """A gathered part of ``torchdist_source.tensor``: reads see its current values, and writes go to it."""

    torchdist_source: ViewedStorage

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {id(one): one for one in tensors_in((args, kwargs or {})) if isinstance(one, WritableView)}
        for piece in given.values():
            piece.torchdist_source.look()
        shells = {key: _shell(piece) for key, piece in given.items()}
        args, kwargs = map_tensors((args, kwargs or {}), lambda one: shells.get(id(one), one))
        made = operation(*args, **kwargs)
        pieces = [(shell, given[key]) for key, shell in shells.items()]
        for written in _written(operation, args, kwargs):
            for piece in (piece for shell, piece in pieces if shell is written):
                piece.torchdist_source.write()
        return map_tensors(made, lambda one: _followed(one, pieces))

    def full_tensor(self, **kwargs: Any) -> Tensor:
        self.torchdist_source.look()
        return super().full_tensor(**kwargs)


def following(handlers: dict[Any, Handler]) -> dict[Any, Handler]:
    """``handlers``; if DTensor does not dispatch to subclasses, every operation also dispatches to ``WritableView``."""
    if dtensor_dispatches_subclasses():
        return handlers
    return {operation: partial(_follow, handlers.get(operation)) for operation in aten_operations()}


def _follow(ours: Handler | None, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(one, WritableView) for one in tensors_in((args, kwargs))):
        return WritableView.__torch_dispatch__(operation, (), args, kwargs)
    if ours is None:
        return as_ever(operation, args, kwargs, partial(_follow, None))
    return ours(operation, args, kwargs)


@dataclass
class ViewedStorage:
    """``piece`` is ``operation(tensor, *args, **kwargs)``, or its element ``place``."""

    tensor: DTensor
    operation: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    place: int | None
    piece: DTensor
    """A plain DTensor around the memory that all views of each other share."""
    version: int

    def look(self) -> None:
        """Update the piece if the tensor was written to."""
        if isinstance(self.tensor, WritableView):
            self.tensor.torchdist_source.look()
        if self.version != self.tensor._version:
            self.version = self.tensor._version
            fill(self.piece, self._of(whole(self.tensor)))

    def write(self) -> None:
        """Copy the values of the piece to the tensor."""
        with torch.no_grad():
            full = whole(self.tensor)
            self._of(full).copy_(whole(self.piece))
            fill(self.tensor, full)
        increment_version(self.tensor)
        self.version = self.tensor._version
        if isinstance(self.tensor, WritableView):
            self.tensor.torchdist_source.write()

    def _of(self, full: Tensor) -> Tensor:
        made = self.operation(full.detach(), *self.args, **self.kwargs)
        view: Tensor = made if self.place is None else made[self.place]
        return view


def _view(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of DTensor's dispatch, for an operation that returns views of its first argument."""
    tensor = args[0]
    try:
        made = as_ever(operation, args, kwargs, _view)
    except (RuntimeError, NotImplementedError):  # uneven shards, or an operation without a rule
        made = in_full(operation, args, kwargs)
    if not in_backward():  # in a backward the cell holds no views
        several = isinstance(made, (list, tuple))
        for place, one in enumerate(made if several else [made]):
            if not _share_memory(one, tensor):
                at = place if several else None
                _become_piece(one, ViewedStorage(tensor, operation, args[1:], kwargs, at, _shell(one), tensor._version))
    return made


def _read(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of DTensor's dispatch, for an operation that returns a new tensor: if it fails, with full tensors."""
    try:
        return as_ever(operation, args, kwargs, _read)
    except (RuntimeError, NotImplementedError):
        if in_backward():
            raise
        made = in_full(operation, args, kwargs)
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in((args, kwargs)))
        if learns and any(one.is_floating_point() for one in tensors_in(made)):  # it would have no gradient
            raise
        return made


def _reduce(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of DTensor's dispatch, for a reduction for which some rank may have an empty shard."""
    if _leaves_ranks_empty(args[0]):
        return in_full(operation, args, kwargs)
    try:
        return as_ever(operation, args, kwargs, _reduce)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, NotImplementedError) or _NO_DIMENSION in str(error):
            return in_full(operation, args, kwargs)  # divided by fsdp and by tp
        raise


_NO_DIMENSION = "invalid size of output tensor"
"""Gloo's error before torch 2.12 when a 0-dim tensor is gathered, such as the index of the maximum (``argmax``)."""


def _leaves_ranks_empty(tensor: DTensor) -> bool:
    """Whether a rank has no row. The first ranks get full chunks, so later ranks may be empty even with enough rows."""
    ranks = [1] * tensor.ndim
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            ranks[placement.dim] *= size
    return any(
        many > 1 and -(-rows // many) * (many - 1) >= rows for rows, many in zip(tensor.shape, ranks, strict=True)
    )


def _followed(made: Tensor, pieces: Sequence[tuple[DTensor, WritableView]]) -> Tensor:
    """Convert a result of an operation on shells: it is one of the pieces, a view of a piece, or a new tensor."""
    for shell, piece in pieces:
        if made is shell:
            return piece
        if isinstance(made, WritableView):
            if made.torchdist_source.tensor is shell:
                made.torchdist_source.tensor = piece
        elif isinstance(made, DTensor) and _share_memory(made, piece):
            _become_piece(made, piece.torchdist_source)
    return made


def _become_piece(tensor: DTensor, source: ViewedStorage) -> None:
    tensor.__class__ = WritableView
    tensor.torchdist_source = source  # type: ignore[attr-defined]


def _shell(tensor: DTensor) -> DTensor:
    """A plain DTensor with the same memory, without the behaviour of ``WritableView``."""
    return DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)


def _share_memory(one: DTensor, other: DTensor) -> bool:
    storages = [each._local_tensor.untyped_storage().data_ptr() for each in (one, other)]
    return storages[0] == storages[1]


def _written(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to, by its schema."""
    given = {**dict(zip((one.name for one in operation._schema.arguments), args, strict=False)), **kwargs}
    written = (
        one.name for one in operation._schema.arguments if one.alias_info is not None and one.alias_info.is_write
    )
    return tensors_in([given.get(name) for name in written])
