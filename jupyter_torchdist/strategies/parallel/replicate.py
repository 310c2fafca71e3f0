"""Data parallelism with a copy on every rank: PyTorch's DDP, in place.

``torch.distributed._composable.replicate`` runs DDP's reducer by hooks: no ``.module``, no ``module.`` in names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ...protocol.errors import StrategyError
from ...protocol.options.strategy import chosen
from ...torch_private.places import replicate_in_place
from ..core import loading
from ..core.agreement import check_untouched
from ..core.context import ParallelContext
from ..core.ownership import own_class
from ..step.compression import powersgd_state
from . import fsdp


def check(model: nn.Module, context: ParallelContext) -> None:
    """Raise ``StrategyError`` if DDP cannot replicate ``model`` here."""
    check_untouched(model)
    if chosen(context.plan, "comm_hook") == "bf16" and dist.get_backend(context.data_group) == "gloo":
        raise StrategyError(
            "comm_hook=bf16: DDP's own reducer takes it with NCCL alone, and these ranks talk through Gloo",
            "use -O comm_hook=fp16, or run on GPUs",
        )


def apply(model: nn.Module, context: ParallelContext) -> None:
    """Replicate ``model`` in place. All ranks must call it. Parameters stay the same objects.

    They start with rank 0's values. A model without trained parameters needs no reducer. With tensor parallelism,
    whose parameters are DTensors, FSDP2's ``replicate`` is used (it replaces parameters, as fsdp does).
    """
    if context.plan.degree("tp") > 1:
        fsdp.apply(model, beside_tp(context))
        return
    loading.move(model, context.device)
    loading.broadcast_states(model, context.data_group, context.device)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    replicate_in_place(
        model,
        process_group=context.data_group,
        device_id=context.device,
        init_sync=False,  # done above, without writing equal values
        static_graph=chosen(context.plan, "static_graph"),
        find_unused_parameters=chosen(context.plan, "find_unused_parameters"),
        bucket_cap_mb=chosen(context.plan, "bucket_cap_mb"),
        gradient_as_bucket_view=chosen(context.plan, "gradient_as_bucket_view"),
    )
    type(model).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]  # torch created this class
    _compress(model, context)


def beside_tp(context: ParallelContext) -> ParallelContext:
    """The context with the option for FSDP2's ``replicate``."""
    options = {**context.plan.options, "sharding_strategy": "NO_SHARD"}
    return replace(context, plan=replace(context.plan, options=options))


def _compress(model: Any, context: ParallelContext) -> None:
    kind, group = chosen(context.plan, "comm_hook"), context.data_group
    if kind == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif kind == "bf16":
        model.register_comm_hook(group, default_hooks.bf16_compress_hook)
    elif kind == "powersgd":
        model.register_comm_hook(powersgd_state(group), powerSGD_hook.powerSGD_hook)


def _refuse_copy(module: nn.Module, _memo: object) -> NoReturn:
    raise StrategyError(
        f"copy.deepcopy of {own_class(module).__name__}, which ddp replicates in place: a copy would share its reducer",
        "copy the model before its first training step",
    )
