"""Private names of torch that are the same in all supported releases, each with its module.

Each name is imported at its first use, because importing some of them takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
    from torch.distributed._composable.contract import REGISTRY_KEY as REGISTRY_KEY
    from torch.distributed._composable.contract import STATE_KEY as STATE_KEY
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
    from torch.distributed.pipelining._backward import stage_backward_input as stage_backward_input
    from torch.distributed.pipelining._backward import stage_backward_weight as stage_backward_weight
    from torch.distributed.tensor import placement_types
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from torch.nn.modules import _functions, batchnorm, dropout
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only

    BatchNorm = batchnorm._BatchNorm
    DropoutNd = dropout._DropoutNd
    NormBase = batchnorm._NormBase
    StridedShard = placement_types._StridedShard
    SyncBatchNormFunction = _functions.SyncBatchNorm
    checkpoint_in_place: Callable[[nn.Module], Any]
    chunk_with_empty: Callable[..., list[Tensor]]
    current_function_mode: Callable[[], Any]
    default_store: Callable[[], Any]
    disable_current_modes: Callable[[], AbstractContextManager[Any]]
    enable_custom_loss_ops: Callable[[], None]
    function_modes: Callable[[], list[Any]]
    pop_function_mode: Callable[[], Any]
    push_function_mode: Callable[[Any], None]
    replicate_in_place: Callable[..., Any]
    unflatten_dense_tensors: Callable[..., Any]


_FAKE = "torch._subclasses.fake_tensor"
_FSDP = "torch.distributed.fsdp._fully_shard"
_COMPOSABLE = "torch.distributed._composable"

_PLACES: dict[str, tuple[str, str]] = {
    "AsyncCollectiveTensor": ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    "BatchNorm": ("torch.nn.modules.batchnorm", "_BatchNorm"),
    "DataDependentOutputException": (_FAKE, "DataDependentOutputException"),
    "DisableTorchFunctionSubclass": ("torch._C", "DisableTorchFunctionSubclass"),
    "DropoutNd": ("torch.nn.modules.dropout", "_DropoutNd"),
    "DynamicOutputShapeException": (_FAKE, "DynamicOutputShapeException"),
    "FSDPParam": (f"{_FSDP}._fsdp_param", "FSDPParam"),
    "FSDPParamGroup": (f"{_FSDP}._fsdp_param_group", "FSDPParamGroup"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    "FakeTensor": (_FAKE, "FakeTensor"),
    "FakeTensorMode": (_FAKE, "FakeTensorMode"),
    "NormBase": ("torch.nn.modules.batchnorm", "_NormBase"),
    "REGISTRY_KEY": (f"{_COMPOSABLE}.contract", "REGISTRY_KEY"),
    "STATE_KEY": (f"{_COMPOSABLE}.contract", "STATE_KEY"),
    "StridedShard": ("torch.distributed.tensor.placement_types", "_StridedShard"),
    "SyncBatchNormFunction": ("torch.nn.modules._functions", "SyncBatchNorm"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "UnsupportedFakeTensorException": (_FAKE, "UnsupportedFakeTensorException"),
    "checkpoint_in_place": (f"{_COMPOSABLE}.checkpoint_activation", "checkpoint"),
    "chunk_with_empty": (f"{_FSDP}._fsdp_common", "_chunk_with_empty"),
    "compute_local_shape_and_global_offset": (
        "torch.distributed.tensor._utils",
        "compute_local_shape_and_global_offset",
    ),
    "current_function_mode": ("torch.overrides", "_get_current_function_mode"),
    "default_store": ("torch.distributed.distributed_c10d", "_get_default_store"),
    "disable_current_modes": ("torch.utils._python_dispatch", "_disable_current_modes"),
    "enable_custom_loss_ops": ("torch.distributed.tensor.parallel.loss", "_enable_custom_loss_ops"),
    "function_modes": ("torch.overrides", "_get_current_function_mode_stack"),
    "pop_function_mode": ("torch.overrides", "_pop_mode"),
    "push_function_mode": ("torch.overrides", "_push_mode"),
    "replicate_in_place": (f"{_COMPOSABLE}.replicate", "replicate"),
    "stage_backward_input": ("torch.distributed.pipelining._backward", "stage_backward_input"),
    "stage_backward_weight": ("torch.distributed.pipelining._backward", "stage_backward_weight"),
    "tree_leaves": ("torch.utils._pytree", "tree_leaves"),
    "tree_map_only": ("torch.utils._pytree", "tree_map_only"),
    "unflatten_dense_tensors": ("torch._utils", "_unflatten_dense_tensors"),
}
"""Name here → (module of torch, name there), the same in all supported releases."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    found = globals()[name] = getattr(import_module(module), attribute)
    return found
