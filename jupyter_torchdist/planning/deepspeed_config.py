"""DeepSpeed's JSON together with our options: settings and contradictions. DeepSpeed itself checks the rest."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..protocol.errors import OptionError
from ..protocol.spec import Options


@dataclass(frozen=True)
class Settled:
    """The settings that follow from a configuration and the options."""

    precision: str
    grad_accumulation: int
    notes: tuple[str, ...]


def settle(config: Mapping[str, Any], options: Options, world_size: int) -> Settled:
    """Combine both. Raises ``OptionError`` for an invalid ZeRO stage, an unsupported section or a contradiction."""
    stage = _table(config, "zero_optimization").get("stage", 0)
    if stage not in (0, 1, 2, 3, "auto"):
        raise OptionError(f"DeepSpeed's zero_optimization.stage must be 0, 1, 2 or 3, not {stage!r}", "correct it")
    _check_served(config)
    precision = _precision(config, options)
    if stage in (0, "auto") and precision != "fp32":
        raise OptionError(f"DeepSpeed's stage 0 in {precision} is not supported", "use stage 1, or --precision fp32")
    accumulation = _accumulation(config, options)
    _check_batch(config, world_size, accumulation)
    auto = sorted(_autos(config))
    notes = [f"ZeRO stage {stage}"]
    if auto:
        notes.append(f"DeepSpeed's {', '.join(auto)}: filled in from the model, the optimizer and the options")
    return Settled(precision, accumulation, tuple(notes))


_UNSERVED = {
    "amp": "enable bf16 or fp16 instead of Apex",
    "torch_autocast": "enable bf16 or fp16",
    "tensor_parallel": "use --strategy tp",
    "pipeline": "use --strategy pp",
    "sequence_parallel_size": "use --strategy cp",
    "hybrid_engine": "it generates text between training steps",
    "zenflow": "it updates parameters with gradients of earlier batches, which one device does not",
    "curriculum_learning": "it changes the batches of the cell",
    "data_efficiency": "it changes the batches of the cell",
    "progressive_layer_drop": "it passes arguments to the model that the cell does not pass",
    "compression_training": "it changes the model's layers",
    "elasticity": "the number of ranks comes from --gpus or --ranks",
    "autotuning": "it would run the cell many times",
    "compile": "use --compile with --strategy fsdp",
}
"""Sections that would change what the cell trains, or that an unmodified cell cannot use."""


def _check_served(config: Mapping[str, Any]) -> None:
    for name, why in _UNSERVED.items():
        for value in (config.get(name), _table(config, "zero_optimization").get(name)):
            said = value.get("enabled", value.get("deepcompile", True)) if isinstance(value, Mapping) else value
            if value and said not in (False, 0, 1 if name == "sequence_parallel_size" else 0):
                raise OptionError(f"DeepSpeed's {name} is not supported: {why}", f"leave {name} out")
    if config.get("gradient_allreduce_op", "mean") not in ("mean", "auto"):
        raise OptionError(
            "DeepSpeed's gradient_allreduce_op adds gradients over ranks, but one device takes their mean",
            'write "mean"',
        )
    if config.get("managed_gradient_accumulation") is False:
        raise OptionError(
            "DeepSpeed's managed_gradient_accumulation: false is not supported",
            "leave it out: each optimizer.step() of the cell is then one step",
        )


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name, {})
    return value if isinstance(value, Mapping) else {}


def _precision(config: Mapping[str, Any], options: Options) -> str:
    enabled = [name for name in ("bf16", "fp16") if _table(config, name).get("enabled") is True]
    if len(enabled) > 1:
        raise OptionError("DeepSpeed's fp16 and bf16 are both enabled", "enable one of them")
    chosen = enabled[0] if enabled else "fp32"
    if options.precision not in ("fp32", chosen) and (enabled or _is_off(config, options.precision)):
        raise OptionError(
            f"--precision {options.precision} and the DeepSpeed configuration ({chosen}) contradict each other",
            f'write "{options.precision}": {{"enabled": "auto"}} there, or leave --precision out',
        )
    return chosen if enabled else options.precision


def _is_off(config: Mapping[str, Any], name: str) -> bool:
    return _table(config, name).get("enabled") is False


def _accumulation(config: Mapping[str, Any], options: Options) -> int:
    steps = config.get("gradient_accumulation_steps", "auto")
    if steps == "auto" or steps == options.grad_accumulation:
        return options.grad_accumulation
    if not isinstance(steps, int) or steps < 1:
        raise OptionError(
            f"DeepSpeed's gradient_accumulation_steps cannot be {steps!r}", 'write a whole number, or "auto"'
        )
    if options.grad_accumulation != 1:
        raise OptionError(
            f"--grad-accumulation {options.grad_accumulation} and DeepSpeed's gradient_accumulation_steps {steps} "
            "contradict each other",
            'write "auto" there, or leave --grad-accumulation out',
        )
    return steps


def _check_batch(config: Mapping[str, Any], world_size: int, accumulation: int) -> None:
    """DeepSpeed's rule: the global batch is micro-batch x accumulation x ranks."""
    whole, part = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(whole, int) and isinstance(part, int) and whole != part * accumulation * world_size:
        raise OptionError(
            f"DeepSpeed's train_batch_size is {whole}, but {part} a micro-batch x {accumulation} accumulated "
            f"x {world_size} ranks is {part * accumulation * world_size}",
            'write "auto" for train_batch_size',
        )
    if isinstance(whole, int) and whole % (accumulation * world_size):
        raise OptionError(
            f"DeepSpeed's train_batch_size {whole} does not divide by {accumulation} accumulated x {world_size} ranks",
            'write "auto" for train_batch_size',
        )


def _autos(value: Any, name: str = "") -> list[str]:
    """The keys with the value ``auto``, as dotted paths."""
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _autos(item, f"{name}.{key}" if name else str(key))]
    return [name] if value == "auto" else []


_KEYS = (
    "deepspeed_config_file",
    "zero_stage",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "deepspeed_moe_layer_cls_names",
    "deepspeed_multinode_launcher",
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
)
_REFUSED = {
    "deepspeed_moe_layer_cls_names": "mixtures of experts with parameters on some ranks only are not supported",
    "deepspeed_hostfile": "this version runs on one machine",
    "deepspeed_exclusion_filter": "this version runs on one machine",
    "deepspeed_inclusion_filter": "this version runs on one machine",
}


def of_accelerate(path: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    """accelerate's ``deepspeed_config`` as a DeepSpeed configuration, from the file that it names or from its keys.

    Raises ``OptionError`` for a key that is unknown or refused, or that is given together with a file.
    """
    for key, value in section.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(_KEYS)}"
            raise OptionError(f"{path}: accelerate's deepspeed_config has no key {key!r}", hint)
        if key in _REFUSED and value not in (None, "", "none"):
            raise OptionError(f"{path}: {key}: {value}: {_REFUSED[key]}", f"leave {key} out")
    if "deepspeed_config_file" in section:
        return _file(path, section)
    return _from_keys(path, section)


def _file(path: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    beside = [key for key in section if key not in ("deepspeed_config_file", "zero3_init_flag", *_LAUNCHERS)]
    if beside:
        raise OptionError(
            f"{path}: {', '.join(beside)} and deepspeed_config_file contradict each other",
            "keep the setting in the JSON file alone",
        )
    file = path.parent / Path(str(section["deepspeed_config_file"])).expanduser()
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise OptionError(
            f"{path}: deepspeed_config_file: {file} cannot be read: {error}", "correct the file, or its path"
        ) from error
    if not isinstance(config, dict):
        raise OptionError(f"{file} has no JSON object", 'DeepSpeed\'s begins with {"zero_optimization": …}')
    return config


_LAUNCHERS = ("deepspeed_multinode_launcher",)
"""Keys for accelerate's launcher, which have no effect on one machine."""


def _from_keys(path: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": section.get("zero_stage", 2)}
    for part in ("optimizer", "param"):
        device = section.get(f"offload_{part}_device", "none")
        if device in ("cpu", "nvme"):
            zero[f"offload_{part}"] = {"device": device}
            if device == "nvme":
                zero[f"offload_{part}"]["nvme_path"] = section.get(f"offload_{part}_nvme_path", "auto")
        elif device not in (None, "none"):
            raise OptionError(
                f"{path}: offload_{part}_device: {device!r}: expected none, cpu or nvme", "write one of them"
            )
    if "zero3_save_16bit_model" in section:
        zero["stage3_gather_16bit_weights_on_model_save"] = section["zero3_save_16bit_model"]
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": section.get("gradient_accumulation_steps", "auto"),
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    if "gradient_clipping" in section:
        config["gradient_clipping"] = section["gradient_clipping"]
    return config
