"""The names of torch that are private, or not in every supported release: nobody else touches them.

A private name may move or go with any release. Here each has one line that says where it is (``_PLACES``), or one
function that says what is done where it is missing. ``tests/unit/test_torch_private.py`` holds the rule and looks up
every name in the release that is installed; ``make test-torch V=2.11.0`` does so with another one.

Names of ``_PLACES`` are imported when they are first asked for: some of them take torch a second.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .protocol import releases

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

releases.check(torch.__version__)

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


# ------------------------------------------------------------------------------------------------- releases


def release() -> tuple[int, int]:
    """The installed release of torch: (2, 11)."""
    return releases.release_of(torch.__version__)


# ------------------------------------------------------------------------------------------ what torch is set to


def seed_for_gpus() -> Any:
    """The seed, as an object, that waits until this process begins to use a GPU; None where none waits."""
    return torch.cuda._lazy_seed_tracker.manual_seed_all_cb


def default_device() -> torch.device | None:
    """What ``set_default_device`` was given. ``get_default_device`` makes a tensor there, and begins to use a GPU."""
    device: torch.device | None = import_module("torch.utils._device").CURRENT_DEVICE
    return device


def operators() -> dict[str, Any]:
    """What ``torch.library.custom_op`` has made in this process, by ``namespace::name``."""
    return dict(import_module("torch._library.custom_ops").OPDEFS)


def operator_home(operator: Any) -> str:
    """The module whose code defines the operator."""
    return str(operator._init_fn.__module__)


def operator_maker(operator: Any) -> tuple[str, str, list[str | None], list[str]]:
    """What ``make_operator`` takes: name, schema, device types with a kernel (None: all others), names of tags."""
    tags = [tag.name for tag in operator._tags]
    return operator._qualname, operator._schema, list(operator._backend_fns), tags


def operator_functions(operator: Any) -> dict[str, Any]:
    """What ``set_operator_functions`` takes. Raises ``ValueError`` for what cannot be read from an operator."""
    if operator._torch_dispatch_fns:
        raise ValueError(f"{operator._qualname} has rules of register_torch_dispatch, as triton_op makes them")
    # Before 2.13 the dtypes of autocast stand in two attributes.
    early = {kind: getattr(operator, f"_autocast_{kind}_dtype", None) for kind in ("cpu", "cuda")}
    casts = getattr(operator, "_autocast_dtype", early)
    return {
        "function": operator._init_fn,
        "kernels": {kind: _kernel(chooser) for kind, chooser in operator._backend_fns.items()},
        "fake": operator._abstract_fn,
        "autograd": operator._backward_fn and (operator._backward_fn, operator._setup_context_fn),
        "vmap": operator._vmap_fn,
        "autocast": {kind: dtype for kind, dtype in casts.items() if dtype is not None},
    }


def _kernel(chooser: Any) -> Any:
    """The function that was registered: torch keeps one that calls it where the kernel is enabled."""
    return inspect.getclosurevars(inspect.unwrap(chooser)).nonlocals["fn"]


def make_operator(name: str, schema: str, kinds: list[str | None], tags: list[str]) -> Any:
    """Register an operator; until it has its functions it cannot be called."""

    def missing(*_args: Any, **_keywords: Any) -> Any:
        raise RuntimeError(f"{name} has no functions yet")

    parsed = torch._C.parse_schema(name.partition("::")[2] + schema)
    mutated = [one.name for one in parsed.arguments if one.alias_info is not None and one.alias_info.is_write]
    return torch.library.custom_op(
        name,
        missing,
        mutates_args=mutated,
        device_types=None if kinds == [None] else kinds,  # type: ignore[arg-type]
        schema=schema,
        tags=[getattr(torch.Tag, tag) for tag in tags],
    )


def set_operator_functions(operator: Any, functions: dict[str, Any]) -> None:
    """Register what ``operator_functions`` has read."""
    operator._init_fn = functions["function"]
    for kind, kernel in functions["kernels"].items():
        operator.register_kernel(kind)(kernel)
    if functions["fake"] is not None:
        operator.register_fake(functions["fake"])
    if functions["autograd"] is not None:
        backward, setup_context = functions["autograd"]
        operator.register_autograd(backward, setup_context=setup_context)
    if functions["vmap"] is not None:
        operator.register_vmap(functions["vmap"])
    for kind, dtype in functions["autocast"].items():
        operator.register_autocast(kind, dtype)


def print_options() -> Any:
    """What ``set_printoptions`` sets: precision, threshold, edgeitems, linewidth, sci_mode."""
    return import_module("torch._tensor_str").PRINT_OPTS


# ------------------------------------------------------------------------------------- autograd and functions

_current_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread computes gradients now."""
    return _current_graph_task() != -1


def in_functorch() -> bool:
    """Whether ``vmap`` or ``grad`` of ``torch.func`` is under way."""
    return torch._C._functorch.maybe_current_level() is not None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """``call`` when the backward that is under way has ended. Raises ``RuntimeError`` outside of one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def saved_tensors_hooks() -> Any:
    """The (pack, unpack) in force for tensors that are saved for a backward, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def number_of_function_modes() -> int:
    """How many ``TorchFunctionMode`` are in force."""
    return torch._C._len_torch_function_stack()


# ---------------------------------------------------------------------------------------------------- tensors

GROUPED_MM = torch.ops.aten._grouped_mm.default
ITEM = torch.ops.aten._local_scalar_dense.default
TENSOR_FILE: str = torch._tensor.__file__
VF = torch._VF
"""The names by which ``torch.nn`` calls its recurrent functions."""

copy_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""Copies each of the second list into its partner of the first."""
unscale_all: Callable[[list[Tensor], Tensor, Tensor], None] = torch._amp_foreach_non_finite_check_and_unscale_
"""(gradients, flag, factor): multiplies in place, and sets the flag where one is not finite."""
parse_to = torch._C._nn._parse_to
"""The arguments of ``Tensor.to`` as (device, dtype, non_blocking, memory_format)."""
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass


def storage_references(tensor: Tensor) -> int:
    """How many tensors and others refer to the memory of ``tensor``."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` fill its memory without gaps, in any order of dimensions."""
    prims: Any = torch._prims_common
    ask = getattr(prims, "is_non_overlapping_and_dense_or_false", None) or prims.is_non_overlapping_and_dense
    return bool(ask(tensor))


def has_own_dispatch(kind: type) -> bool:
    """Whether a subclass of ``Tensor`` computes in Python (a wrapper without memory of its own)."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def is_functional(tensor: Tensor) -> bool:
    """Whether ``torch.func.functionalize`` made it."""
    return torch._is_functional_tensor(tensor)


def restore_parametrized_class(module: nn.Module) -> None:
    """A parametrized module's own class, whose properties compute its tensors; pickling loses it."""
    from torch.nn.utils import parametrize

    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


_UNTAGGED = frozenset({"celu", "elu", "hardsigmoid", "hardtanh", "leaky_relu", "selu"})
"""What computes element by element and is not tagged so before 2.12 (in place, and ``leaky_relu`` new, too)."""


def is_pointwise(operation: Any) -> bool:
    """Whether an operator computes element by element; some in-place forms lack the tag of their functional form."""
    name = operation._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    tagged = any(torch.Tag.pointwise in one.tags for one in (operation, *overloads))
    return operation.namespace == "aten" and (tagged or name in _UNTAGGED)


# ----------------------------------------------------------------------------------- collectives and recorder


def broadcast_all(group: Any, tensors: list[Tensor], bucket_bytes: int, source: int) -> None:
    """Broadcast from ``source``, a rank of ``group``, in buckets."""
    import torch.distributed as dist

    dist._broadcast_coalesced(group, tensors, bucket_bytes, source)  # type: ignore[attr-defined]


def power_sgd_compresses(rows: int, columns: int, rank: int, least: float) -> bool:
    """Whether PowerSGD sends a gradient of that size as factors of ``rank``."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    return bool(powerSGD_hook._should_compress(rows, columns, rank, least)[0])


def gathering() -> tuple[Any, str]:
    """(module, name) of the function by which DTensor gathers; it has another name before 2.13."""
    from torch.distributed import _functional_collectives as module

    return module, "all_gather_single" if hasattr(module, "all_gather_single") else "all_gather_tensor"


def checkpointing() -> tuple[Any, str]:
    """(module, name) of the function that runs what ``torch.utils.checkpoint`` is given, where it is not reentrant."""
    module = import_module("torch.utils.checkpoint")
    name = "_checkpoint_without_reentrant_generator"
    return module, f"{name}_impl" if hasattr(module, f"{name}_impl") else name  # since 2.15


def coordinates() -> tuple[Any, str]:
    """(class, name) of the method by which a device mesh finds out where this rank is."""
    return import_module("torch.distributed.device_mesh").DeviceMesh, "_compute_coordinate_on_dim"


UNSCALING = torch.amp.GradScaler, "_unscale_grads_"
SCALED_STEP = torch.amp.GradScaler, "_maybe_opt_step"
"""(class, name) of what a gradient scaler does to the gradients, and before the optimizer's step."""


def ranks_of_groups() -> list[tuple[Any, dict[int, int]]]:
    """(process group, {rank of the job: rank in the group}) of every group of this process."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_group_ranks.items())


def recorder_dump(name: str) -> Callable[..., bytes] | None:
    """A flight recorder's dump: ``_dump_nccl_trace`` only where torch was built with NCCL."""
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, name, None)


def forget_composable_state(module: nn.Module) -> None:
    """``module`` was never replicated, sharded or checkpointed in place."""
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)


# ---------------------------------------------------------------------------------------------------- DTensor


def dispatcher() -> Any:
    """Through which every operation on a DTensor goes; ``_custom_op_handlers`` are asked first."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher


def dtensor_dispatches_subclasses() -> bool:
    """Whether ``__torch_dispatch__`` of a subclass of DTensor is called: not in 2.10 and 2.11, whose C++ is faster."""
    return release() not in ((2, 10), (2, 11))


@functools.cache
def aten_operations() -> tuple[Any, ...]:
    """Every operator of torch's own."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if not name.startswith("__")]
    return tuple(getattr(one, kind) for one in packets if hasattr(one, "overloads") for kind in one.overloads())


def fill_in_dtensor(handlers: dict[Any, Any]) -> None:
    """Give ``handlers`` (``_custom_op_handlers``) what DTensor lacks: ``detach_`` before 2.13."""
    if release() < (2, 13):
        handlers[torch.ops.aten.detach_.default] = _detach_in_place


def _detach_in_place(operation: Any, args: Any, kwargs: Any) -> Any:
    return args[0]  # autograd has done it; there is nothing to compute


# ------------------------------------------------------------------------------------------------ fully_shard


def replicate_with_fsdp(*args: Any, **kwargs: Any) -> None:
    """FSDP2's own way to replicate a model, in place; not before 2.9 (``releases.check_plan``)."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(*args, **kwargs)


def fsdp_state(unit: Any) -> Any:
    """What ``fully_shard`` knows of a module that it wrapped, with its root's state made if need be."""
    return unit._get_fsdp_state()


def fsdp_states(root: Any) -> list[Any]:
    """The states of all units of ``root``, each once: before 2.12 one of several modules is listed for each of them."""
    return list(dict.fromkeys(root._get_fsdp_state()._state_ctx.all_states))


def fsdp_groups(state: Any) -> list[FSDPParamGroup]:
    """The parameters of a unit that are gathered together; several a unit from 2.12 on."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def fsdp_begin(root: Any) -> None:
    """Make ``root`` the root of its units now, and not at its first forward."""
    root._get_fsdp_state()._lazy_init()
    if release() < (2, 9):  # Gloo sums where it is asked for a mean
        for group in (group for state in fsdp_states(root) for group in fsdp_groups(state)):
            group.force_sum_reduction_for_comms = group.device.type == "cpu"


def fsdp_is_root(unit: Any) -> bool:
    return bool(unit._get_fsdp_state()._is_root)


def fsdp_output_dtype(unit: Any) -> torch.dtype | None:
    """To which a unit casts what its forward gives."""
    dtype: torch.dtype | None = unit._get_fsdp_state()._mp_policy.output_dtype
    return dtype


def fsdp_around_outputs(unit: Any, wrap: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """``wrap(original, outputs)`` in place of what lets a backward through ``outputs`` gather the unit."""
    state = unit._get_fsdp_state()
    state._register_pre_backward_hook = functools.partial(wrap, state._register_pre_backward_hook)


def fsdp_around_backward(
    state: Any,
    begin: Callable[[bool, Callable[[], None]], None],
    end: Callable[[Callable[[], None]], None],
) -> None:
    """``begin(is_first, original)`` when a backward reaches a unit; ``end(original)`` in place of its end at the root.

    ``is_first``: no unit of the model was reached before in this backward.
    """
    register, finish = state._register_root_post_backward_final_callback, state._root_post_backward_final_callback

    def registered() -> None:
        begin(not state._state_ctx.post_backward_final_callback_queued, register)

    state._register_root_post_backward_final_callback = registered
    state._root_post_backward_final_callback = functools.partial(end, finish)


def fsdp_has_gradient(parameter: FSDPParam) -> bool:
    """Whether a backward on this rank left a gradient of a gathered parameter, which appears when its unit runs."""
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and (whole.grad is not None or parameter.unsharded_accumulated_grad is not None)


def fsdp_shown(groups: Iterable[FSDPParamGroup]) -> dict[nn.Parameter, nn.Parameter]:
    """{gathered parameter: its shard} of what was ever gathered."""
    known = [one for group in groups for one in group.fsdp_params]
    return {one._unsharded_param: one.sharded_param for one in known if hasattr(one, "_unsharded_param")}


def fsdp_reduce_unused(root: Any) -> bool:
    """Let ranks reduce zeros for what they left out of a backward, or else they would not meet.

    False before 2.13, which cannot: then ``fsdp_fill_unused`` is called before each reduction.
    """
    if not hasattr(root, "set_reduce_scatter_unused_params"):
        return False
    root.set_reduce_scatter_unused_params(True)
    return True


def fsdp_fill_unused(group: FSDPParamGroup) -> None:
    """Zeros as gradients of the gathered parameters of ``group`` that have none."""
    for one in group.fsdp_params:
        if hasattr(one, "_unsharded_param") and one.unsharded_param.requires_grad and not fsdp_has_gradient(one):
            one.unsharded_param.grad = torch.zeros_like(one.unsharded_param)


def fsdp_recover(root: Any) -> None:
    """After a forward that raised: parameters are shards, and the next forward may begin."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    state = root._get_fsdp_state()
    state._comm_ctx.all_gather_state = None
    state._comm_ctx.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
        for group in fsdp_groups(each):
            _recover_group(group)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _recover_group(group: Any) -> None:
    gathered, group._all_gather_result = group._all_gather_result, None
    if getattr(gathered, "all_gather_work", None) is not None:
        gathered.all_gather_work.wait()
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()
