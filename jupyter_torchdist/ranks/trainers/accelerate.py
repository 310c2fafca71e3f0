"""Hugging Face accelerate in a rank: CPU ranks are found, FSDP also on CPUs, ``Accelerator.log`` draws curves.

Seen in accelerate 1.15: ``PartialState(cpu=…)`` finds CPU ranks only when it is told that there is no GPU; the states
share their attributes in ``_shared_state``; ``AcceleratorState(_from_accelerator=…)`` makes FSDP of GPUs only;
``Accelerator._models`` and ``_optimizers``.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch.distributed as dist

from ...protocol.options.strategy import chosen
from ...protocol.strategy import StrategyPlan
from .. import nested
from ..afterimport import Change
from .base import TrainerRank, made_alone, wrap

_NOT_CPU = ("0", "false", "no", "off", "n", "f")
_LAUNCHERS = ("notebook_launcher", "debug_launcher")


def changes(rank: TrainerRank) -> dict[str, Change]:
    return {
        "accelerate.state": functools.partial(_state, rank),
        "accelerate.accelerator": functools.partial(_accelerator, rank),
        "accelerate.launchers": _without_launchers,
        "accelerate": _without_launchers,
    }


def _state(rank: TrainerRank, state: ModuleType) -> None:
    if rank.on_cpu and rank.world_size > 1:
        _find_cpus(state)
    _stay_in_the_process(state)


def _find_cpus(state: ModuleType) -> None:
    def begin(original: Any, self: Any, cpu: bool = False, **kwargs: Any) -> None:
        original(self, cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() not in _NOT_CPU, **kwargs)

    def shard(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != state.DistributedType.MULTI_CPU:
            return
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin, self.distributed_type = plugin, state.DistributedType.FSDP
        state.PartialState._shared_state["distributed_type"] = self.distributed_type

    wrap(state.PartialState, "__init__", begin)
    wrap(state.AcceleratorState, "__init__", shard)


def _stay_in_the_process(state: ModuleType) -> None:
    """A state is one object a process: what leaves is the state of the process that it comes to."""
    state.PartialState.__reduce__ = lambda self: (state.PartialState, ())
    state.GradientState.__reduce__ = lambda self: (state.GradientState, ())
    state.AcceleratorState.__reduce__ = lambda self: (state_here, (self._mixed_precision, self.dynamo_plugin))


def state_here(mixed_precision: str, dynamo_plugin: Any, fsdp_plugin: Any = None) -> Any:
    """The ``AcceleratorState`` of this process. One that is there already keeps its settings."""
    kind = importlib.import_module("accelerate.state").AcceleratorState
    precision = None if kind._shared_state else mixed_precision
    return kind(precision, dynamo_plugin=dynamo_plugin, fsdp_plugin=fsdp_plugin, _from_accelerator=True)


def forget_settings() -> None:
    """Let the next Accelerator choose its precision: the one that is there came along from another process."""
    state = importlib.import_module("accelerate.state")
    if state.AcceleratorState._shared_state.get("distributed_type") != state.DistributedType.FSDP:  # begun here
        state.AcceleratorState._reset_state()


def _accelerator(rank: TrainerRank, module: ModuleType) -> None:
    prepared_alone: weakref.WeakSet[Any] = weakref.WeakSet()
    made: list[weakref.ref[Any]] = []

    def finish() -> None:
        for accelerator in [one() for one in made]:
            if accelerator is not None:
                _make_whole(accelerator)

    def end(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        finish()  # it destroys the process group
        original(self, *args, **kwargs)

    def begin(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        tell_strategy(rank)
        made.append(weakref.ref(self))
        original(self, *args, **kwargs)

    def arrive(self: Any, sent: dict[str, Any]) -> None:
        vars(self).update(sent)
        given = vars(sent["state"])
        self.state = state_here(given["_mixed_precision"], given["dynamo_plugin"], given.get("fsdp_plugin"))
        self.gradient_state = module.GradientState()
        vars(self.gradient_state).update(vars(sent["gradient_state"]))
        if sent["_models"]:
            prepared_alone.add(self)

    def log(original: Any, self: Any, values: Any, step: Any = None, *args: Any, **kwargs: Any) -> None:
        rank.draw(values, step)
        original(self, values, step, *args, **kwargs)

    def backward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in prepared_alone and rank.world_size > 1:
            raise made_alone("what the Accelerator prepared", rank)
        return original(self, *args, **kwargs)

    module.Accelerator.__setstate__ = arrive
    wrap(module.Accelerator, "__init__", begin)
    wrap(module.Accelerator, "log", log)
    wrap(module.Accelerator, "backward", backward)
    wrap(module.Accelerator, "end_training", end)
    rank.at_end.append(finish)


def _make_whole(accelerator: Any) -> None:
    """What FSDP2 has sharded, as a notebook can use it: whole and plain on rank 0. All ranks must call it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # its import takes most of a second
    if fsdp is None:
        return
    models = [model for model in accelerator._models if any(isinstance(m, fsdp.FSDPModule) for m in model.modules())]
    if not models or not dist.is_initialized():
        return
    from ...strategies.parallel.restore import restore, restore_optimizer

    plain = {}
    for model in models:
        sharded = dict(model.named_parameters())
        restore(model)
        plain.update({now: sharded[name] for name, now in model.named_parameters() if name in sharded})
    for optimizer in accelerator._optimizers:
        restore_optimizer(optimizer.optimizer, plain)
    accelerator._models.clear()
    accelerator._optimizers.clear()


def _without_launchers(module: ModuleType) -> None:
    """The launchers would wait for ranks that nobody starts."""
    for name in vars(module).keys() & set(_LAUNCHERS):
        setattr(module, name, _refusing(name))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(function: Any = None, *_: Any, **__: Any) -> NoReturn:
        called = getattr(function, "__qualname__", "function")
        raise nested.refusal(f"{name}({called})", f"{called}(…)")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def why_alone() -> str | None:
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    kind = None if state is None else state._shared_state.get("distributed_type")
    if kind is None or kind.value != "NO":
        return None
    return (
        "accelerate took it for one process (DistributedType.NO), as ACCELERATE_USE_CPU says: "
        "Accelerator(cpu=True), or --env ACCELERATE_USE_CPU=1"
    )


def tell_strategy(rank: TrainerRank) -> None:
    """Hand the job's strategy to accelerate, as ``accelerate launch`` does, once. What the code says comes first."""
    plan = rank.strategy
    variables = {name: text for name, text in told(plan, on_cpu=rank.on_cpu).items() if name not in os.environ}
    if not variables:
        return
    os.environ.update(variables)
    words = ["FSDP2"] if plan.name == "fsdp" else ["DDP"]
    words += [precision] if (precision := variables.get("ACCELERATE_MIXED_PRECISION", "no")) != "no" else []
    rank.say(f"accelerate trains by itself; --strategy {plan.name} was handed to it: {', '.join(words)}")


def told(plan: StrategyPlan, *, on_cpu: bool) -> dict[str, str]:
    """A strategy as the environment variables that ``accelerate launch`` sets; empty if accelerate has none like it."""
    if plan.name not in ("ddp", "fsdp"):
        return {}
    variables = {
        "ACCELERATE_MIXED_PRECISION": "no" if plan.precision == "fp32" else plan.precision,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(plan.grad_accumulation),
    }
    if plan.compile:
        variables["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR"
    if plan.name == "ddp":
        return variables
    wrapped = chosen(plan, "transformer_layer_cls_to_wrap")
    policy = chosen(plan, "auto_wrap_policy")
    variables |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": _word(bool(chosen(plan, "reshard_after_forward"))),
        # The parameters of a CPU rank are in the memory of the host already.
        "FSDP_OFFLOAD_PARAMS": _word(chosen(plan, "cpu_offload") and not on_cpu),
        # accelerate finds the blocks of few models; without names the model is one unit.
        "FSDP_AUTO_WRAP_POLICY": "NO_WRAP" if policy == "AUTO" else policy,
        "FSDP_MIN_NUM_PARAMS": str(chosen(plan, "min_num_params")),
        "FSDP_CPU_RAM_EFFICIENT_LOADING": _word(chosen(plan, "cpu_ram_efficient_loading")),
        "FSDP_STATE_DICT_TYPE": chosen(plan, "state_dict_type"),
        "FSDP_ACTIVATION_CHECKPOINTING": _word(plan.activation_checkpointing),
    }
    if wrapped:
        variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(wrapped)
    return variables


def _word(truth: Any) -> str:
    return "true" if truth else "false"
