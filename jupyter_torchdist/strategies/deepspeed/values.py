"""Fills the ``auto`` values of DeepSpeed's configuration from the cell's model, optimizer and batch.

Transformers' Trainer fills the same values from its arguments
(https://huggingface.co/docs/transformers/deepspeed). Here they come from the cell's optimizer, its loader and its own
call of ``clip_grad_norm_``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...protocol.errors import StrategyError
from ...protocol.strategy import StrategyPlan

ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Elementwise optimizers: they give the same result on ZeRO's flat partitions of parameters."""

_WARMUP_STEPS = 1
"""Transformers' default is no warm-up, but DeepSpeed does not accept 0."""


@dataclass(frozen=True)
class Filled:
    """A configuration for ``deepspeed.initialize``, and messages about it for the user."""

    config: dict[str, Any]
    remarks: tuple[str, ...]

    @property
    def stage(self) -> int:
        return int(self.config["zero_optimization"]["stage"])

    @property
    def clipping(self) -> float:
        """The norm to which DeepSpeed clips; 0: the cell clips."""
        return float(self.config.get("gradient_clipping", 0.0))


def filled(
    plan: StrategyPlan, world_size: int, model: nn.Module, optimizer: torch.optim.Optimizer, samples: int | None
) -> Filled:
    """The configuration of ``plan``, without ``auto``. ``samples``: the size of a global batch, if known.

    Raises ``StrategyError`` for values that contradict the cell, and for an ``auto`` that cannot be filled.
    """
    config: dict[str, Any] = copy.deepcopy(dict(plan.options["config"]))
    zero = config.setdefault("zero_optimization", {})
    zero["stage"] = 0 if zero.get("stage", 0) == "auto" else zero.get("stage", 0)
    _batch(config, plan.grad_accumulation, world_size, samples)
    for name in ("fp16", "bf16"):
        if name in config or plan.precision == name:
            config[name] = {**config.get(name, {}), "enabled": plan.precision == name}
    if config.get("gradient_clipping", "auto") == "auto":
        config["gradient_clipping"] = 0.0
    _optimizer(config, optimizer)
    _scheduler(config, optimizer)
    _hidden(zero, model)
    remarks = _defaults(config)
    config.setdefault("zero_allow_untested_optimizer", isinstance(optimizer, ELEMENTWISE))
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    return Filled(config, remarks)


def _batch(config: dict[str, Any], accumulation: int, ranks: int, samples: int | None) -> None:
    """Set DeepSpeed's three batch sizes. The cell's loader gives the global batch."""
    part = config.get("train_micro_batch_size_per_gpu", "auto")
    whole = config.get("train_batch_size", "auto")
    if part == "auto" and whole != "auto":
        part = whole // (accumulation * ranks)
    if part != "auto" and samples is not None and part * ranks != samples:
        name = "train_micro_batch_size_per_gpu" if config.get("train_micro_batch_size_per_gpu") == part else ""
        raise StrategyError(
            f"DeepSpeed's {name or 'train_batch_size'} means {part} samples for each rank, {part * ranks} on "
            f"{ranks} ranks; the batches of this cell have {samples}",
            f'write "auto" there, or batch_size={part * ranks} for the DataLoader: it counts the samples of all ranks',
        )
    if part == "auto":
        part = max(1, -(-(samples or 1) // ranks))
    config["train_micro_batch_size_per_gpu"] = part
    config["gradient_accumulation_steps"] = accumulation
    config["train_batch_size"] = part * accumulation * ranks


_SAME: dict[str, tuple[type[torch.optim.Optimizer], ...]] = {
    "adam": (torch.optim.Adam, torch.optim.AdamW),
    "adamw": (torch.optim.AdamW,),
}


def _optimizer(config: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Check the configuration's optimizer: it must be equal to the cell's optimizer, which is used."""
    section = config.pop("optimizer", None)
    if section is None:
        return
    name, own = str(section.get("type")), type(optimizer).__name__
    if name.lower() != own.lower() and not isinstance(optimizer, _SAME.get(name.lower(), ())):
        raise StrategyError(
            f"DeepSpeed's optimizer.type is {name}, the cell's optimizer {own}",
            "leave one of them: without the section, the cell's optimizer is taken",
        )
    group = optimizer.param_groups[0]
    for key, value in section.get("params", {}).items():
        theirs = tuple(value) if isinstance(value, list) else value
        if theirs != "auto" and key in group and theirs != group[key]:
            raise StrategyError(
                f"DeepSpeed's optimizer.params.{key} is {value}, but the cell's {own} has {group[key]}",
                f'write "auto" for {key}: then the cell\'s value is used',
            )
    decoupled = name.lower() == "adamw" or bool(section.get("params", {}).get("adam_w_mode", True))
    if name.lower() in _SAME and group["weight_decay"] and decoupled != isinstance(optimizer, torch.optim.AdamW):
        raise StrategyError(
            f"DeepSpeed's {name} decays weights {'as AdamW' if decoupled else 'as Adam'}, the cell's {own} does not",
            'write "adam_w_mode": true or false there as the cell\'s optimizer is, or leave the section out',
        )


def _scheduler(config: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    params = config.get("scheduler", {}).get("params", {})
    fills = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": optimizer.param_groups[0]["lr"],
        "warmup_num_steps": _WARMUP_STEPS,
    }
    for key, value in params.items():
        if value == "auto":
            if key not in fills:
                raise StrategyError(
                    f"DeepSpeed's scheduler.params.{key} is auto, but the cell has no value for it",
                    f"write a number for {key}",
                )
            params[key] = fills[key]
    if params and has_scheduler(optimizer):
        raise StrategyError(
            "DeepSpeed's configuration and the cell both have a scheduler of the learning rate",
            "leave one of them out",
        )


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has a torch scheduler, which marks its ``step``."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _hidden(zero: dict[str, Any], model: nn.Module) -> None:
    """Fill the bucket sizes from the model's hidden size, as Transformers does."""
    width = _width(getattr(model, "config", None))
    if width is None:
        return  # DeepSpeed's own defaults
    fills = {"reduce_bucket_size": width * width}
    if zero["stage"] == 3:
        fills["stage3_prefetch_bucket_size"] = int(0.9 * width * width)
        fills["stage3_param_persistence_threshold"] = 10 * width
    for key, value in fills.items():
        if zero.get(key) == "auto":
            zero[key] = value


def _width(config: Any) -> int | None:
    place: Any
    for place in (config, getattr(config, "text_config", None)):
        if getattr(place, "hidden_size", None) is not None:
            return int(place.hidden_size)
        if getattr(place, "hidden_sizes", None):
            return int(max(place.hidden_sizes))
    return None


def _defaults(config: dict[str, Any]) -> tuple[str, ...]:
    """Remove values that are still ``auto``, so that DeepSpeed's defaults apply; returns a message about them."""
    left: list[str] = []

    def drop(table: dict[str, Any], path: str) -> None:
        for key, value in list(table.items()):
            if value == "auto":
                left.append(path + key)
                del table[key]
            elif isinstance(value, Mapping):
                table[key] = dict(value)
                drop(table[key], f"{path}{key}.")

    drop(config, "")
    return (f"DeepSpeed uses its own defaults for {', '.join(left)}",) if left else ()
