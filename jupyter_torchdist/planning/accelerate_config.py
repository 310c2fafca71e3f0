"""A configuration of Hugging Face accelerate as our options: each key is used, or refused with the reason.

Known keys are the keys of ``ClusterConfig`` and of ``accelerate config``'s questions in accelerate 1.15, their names in
older versions and in its documentation, and ``fsdp_*`` keys without their indentation.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..protocol.errors import OptionError
from . import deepspeed_config
from .accelerate_keys import DYNAMO, FSDP, REFUSED, TOP, Refused, Take, nothing, of_a_tpu, one_of, only, whole, yes


def read(path: Path) -> dict[str, Any]:
    """The values in a YAML file. Raises ``OptionError``, also for a key that is given twice."""
    import yaml

    Loader: Any = type("Loader", (yaml.SafeLoader,), {})

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if isinstance(key, Hashable) and keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} stands there {keys.count(key)} times")
        loader.flatten_mapping(node)
        made: dict[Any, Any] = yaml.SafeLoader.construct_mapping(loader, node, deep=True)
        return made

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise OptionError(f"{path} cannot be read: {error}", "correct the file, or its path") from error
    if not isinstance(value, dict):
        raise OptionError(f"{path} has no keys", "write lines such as distributed_type: FSDP")
    return {str(key): item for key, item in value.items()}


def words_of(path: Path, value: Mapping[str, Any]) -> tuple[list[str], tuple[str, ...]]:
    """The options in ``value`` as words, and remarks on them.

    Raises ``OptionError`` for a key that is unknown, refused, or contradicts another.
    """
    sections, top = _sections(path, value)
    _check_type(path, top, sections)
    if top.get("fp16") is True and str(top.get("mixed_precision", "fp16")) != "fp16":
        raise OptionError(f"{path}: fp16 and mixed_precision contradict each other", "keep mixed_precision alone")
    words: list[str] = []
    for key, item in top.items():
        words += _taken(path, key, item, TOP)
    for name, keys in (("fsdp_config", FSDP), ("dynamo_config", DYNAMO), ("mpirun_config", {}), ("fp8_config", {})):
        for key, item in sections[name].items():
            words += _taken(path, key, item, keys, name)
    words += _strategy(path, top, sections)
    words += _ranks(path, top)
    return words, tuple(_remarks(top, sections))


SECTIONS = (
    "fsdp_config",
    "deepspeed_config",
    "parallelism_config",
    "megatron_lm_config",
    "dynamo_config",
    "mpirun_config",
    "fp8_config",
)
_PREFIXES = {
    "fsdp_config": "fsdp_",
    "parallelism_config": "parallelism_config_",
    "megatron_lm_config": "megatron_lm_",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
}
_ALIASES = {
    "fsdp_wrap_policy": "fsdp_auto_wrap_policy",
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fsdp_min_num_param": "fsdp_min_num_params",
}
_FLAT = ("min_num_param", "min_num_params")
"""Keys of ``fsdp_config`` that the documentation writes without their prefix."""


def _sections(path: Path, value: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The nested tables, with prefixed keys, and the other keys; empty values are left out."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    top: dict[str, Any] = {}
    for key, item in value.items():
        if key in SECTIONS:
            if item is not None and not isinstance(item, Mapping):
                raise OptionError(f"{path}: {key}: {item!r} is not a table", f"indent the lines of {key} below it")
            for inner, found in (item or {}).items():
                _put(path, sections, key, str(inner), found)
        elif (section := _section_of(key)) is not None:
            _put(path, sections, section, key, item)
        elif item is not None:
            top[key] = item
    return sections, top


def _section_of(key: str) -> str | None:
    """The section of a key without its indentation."""
    if key.startswith("fsdp_") or key in _FLAT:
        return "fsdp_config"
    return "dynamo_config" if key == "dynamo_backend" else None


def _put(path: Path, sections: dict[str, dict[str, Any]], section: str, key: str, item: Any) -> None:
    prefix = _PREFIXES.get(section, "")
    name = key if key.startswith((prefix, "xla")) else prefix + key
    name = _ALIASES.get(name, name)
    if item is None:
        return
    before = sections[section].setdefault(name, item)
    if before != item:
        raise OptionError(f"{path}: {name} is set twice, to {before!r} and to {item!r}", "keep one of the two lines")


def _taken(path: Path, key: str, item: Any, keys: Mapping[str, Take], section: str = "") -> list[str]:
    """The words of one key."""
    where = f"{path}: {key}: {_shown(item)}"
    try:
        if key.startswith(("xla", "tpu")):
            return of_a_tpu(item)
        if section in REFUSED:
            raise REFUSED[section]
        if key not in keys:
            near = difflib.get_close_matches(key, [*keys, *SECTIONS], 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(sorted(keys))}"
            raise OptionError(f"{path}: accelerate's {section or 'configuration'} has no key {key!r}", hint)
        return list(keys[key](item))
    except Refused as refused:
        raise OptionError(f"{where}: {refused.reason}", refused.instead) from None
    except ValueError as error:
        raise OptionError(f"{where}: expected {error}", f"correct {key}, or leave it out") from None


def _shown(item: Any) -> str:
    return json.dumps(item) if isinstance(item, (bool, dict, list)) else str(item)


STRATEGIES = {"NO": "ddp", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
_OWNERS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}


def _check_type(path: Path, top: dict[str, Any], sections: dict[str, dict[str, Any]]) -> None:
    """Complete ``distributed_type``. Raises ``OptionError`` if it is missing, or if a table belongs to another type."""
    owners = {owner: name for name, owner in _OWNERS.items() if sections[name]}
    kind = str(top.get("distributed_type", "")).upper()
    kind = "NO" if kind == "FALSE" else kind  # YAML reads a bare NO as false
    if not kind:
        if len(owners) != 1:
            raise OptionError(f"{path}: distributed_type is missing", f"add it with one of {', '.join(STRATEGIES)}")
        kind = next(iter(owners))
    if strange := sorted(set(owners) - {kind}):
        name = owners[strange[0]]
        raise OptionError(
            f"{path}: distributed_type: {kind} and {name} contradict each other",
            f"write distributed_type: {strange[0]}, or leave {name} out",
        )
    top["distributed_type"] = kind


def _strategy(path: Path, top: dict[str, Any], sections: dict[str, dict[str, Any]]) -> list[str]:
    """``--strategy``, with the degrees of ``parallelism_config`` or DeepSpeed's own configuration."""
    kind = str(top["distributed_type"])
    if kind == "MEGATRON_LM":
        raise OptionError(f"{path}: distributed_type: MEGATRON_LM trains Megatron's own models", _as_megatron(sections))
    if kind in ("XLA", "TPU"):
        raise OptionError(
            f"{path}: distributed_type: {kind}: TPUs (PyTorch/XLA) are not supported",
            "write distributed_type: FSDP or MULTI_GPU, and use GPUs",
        )
    if kind not in STRATEGIES:
        raise OptionError(f"{path}: distributed_type: {kind} is not run here", f"one of {', '.join(STRATEGIES)}")
    name = STRATEGIES[kind]
    if name == "deepspeed":
        config = deepspeed_config.of_accelerate(path, sections["deepspeed_config"])
        return ["--strategy=deepspeed", f"--option=config={json.dumps(config)}"]
    if not sections["parallelism_config"]:
        return [f"--strategy={name}"]
    return _parallelism(path, name, sections["parallelism_config"])


_SIZES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "cp_size": "cp", "tp_size": "tp"}


def _parallelism(path: Path, name: str, section: Mapping[str, Any]) -> list[str]:
    """The product of strategies from the sizes in ``parallelism_config``."""
    degrees: dict[str, int] = {}

    def size(dimension: str) -> Take:
        def take(item: Any) -> list[str]:
            degrees[dimension] = whole(item)
            return []

        return take

    prefix = _PREFIXES["parallelism_config"]
    keys = {prefix + key: size(dimension) for key, dimension in _SIZES.items()}
    keys[prefix + "cp_comm_strategy"] = one_of("allgather", "alltoall")
    keys[prefix + "cp_backend"] = nothing
    sequence = only(("1",), "Ulysses of DeepSpeed is not run here", "cp_size, which splits the sequence too")
    keys[prefix + "sp_size"] = sequence
    for key in ("sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"):
        keys[prefix + key] = nothing  # no effect with sp_size: 1
    for key, item in section.items():
        _taken(path, key, item, keys, "parallelism_config")
    degrees = {dimension: degree for dimension, degree in degrees.items() if degree > 1}
    data = name
    if "dp_replicate" in degrees and (name == "fsdp" or "dp_shard" in degrees):
        data = "hsdp"
    elif "dp_shard" in degrees:
        data = "fsdp"
    parts = [data] if data != "ddp" or "dp_replicate" in degrees or not degrees else []
    parts += [dimension for dimension in ("cp", "tp") if dimension in degrees]
    return [
        f"--strategy={'+'.join(parts)}",
        *(f"--option={dimension}={degree}" for dimension, degree in degrees.items()),
    ]


def _as_megatron(sections: Mapping[str, Mapping[str, Any]]) -> str:
    section = sections["megatron_lm_config"]
    degrees = {name: section.get(f"megatron_lm_{name}_degree") for name in ("tp", "pp")}
    asked = {name: degree for name, degree in degrees.items() if degree not in (None, 1, "1")} or {"tp": 2}
    return f"--strategy {'+'.join(asked)} {' '.join(f'-O {name}={degree}' for name, degree in asked.items())}"


def _ranks(path: Path, top: Mapping[str, Any]) -> list[str]:
    """The number of ranks, on GPUs or CPUs."""
    kind, cpu = top["distributed_type"], top.get("use_cpu")
    on_cpu = yes(cpu) if cpu is not None else kind == "MULTI_CPU"
    if (kind == "MULTI_CPU" and not on_cpu) or (kind == "MULTI_GPU" and on_cpu):
        raise OptionError(
            f"{path}: distributed_type: {kind} and use_cpu: {_shown(cpu)} contradict each other", "change one of them"
        )
    count = top.get("num_processes", 1 if kind == "NO" else None)
    if kind == "NO" and str(count) != "1":
        raise OptionError(
            f"{path}: distributed_type: NO means one process, but num_processes is {count}",
            "write distributed_type: MULTI_GPU",
        )
    if count is None or str(count) == "-1":
        return []
    if not str(count).isdecimal() or int(count) < 1:
        raise OptionError(
            f"{path}: num_processes: {count}: expected a whole number, at least 1", "for example num_processes: 2"
        )
    return [f"--{'ranks' if on_cpu else 'gpus'}={count}"]


def _remarks(top: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    kind = top["distributed_type"]
    if kind == "NO":
        yield "distributed_type: NO is run as ddp on one rank"
    if kind == "FSDP" and top.get("use_cpu") not in (None, False, "no", "false"):
        yield "use_cpu: true: sharded on CPU ranks, over Gloo (accelerate would replicate there)"
    needless = [
        key for key in ("main_process_ip", "main_process_port", "main_training_function", "same_network") if key in top
    ]
    if needless:
        yield f"{', '.join(needless)}: needless here, ranks run the cell and find each other by themselves"
    if str(top.get("gradient_accumulation_steps", 1)) != "1":
        yield (
            "gradient_accumulation_steps: a batch of the cell is taken in so many parts, and stays the batch of one "
            "step (accelerate would make a step every so many batches)"
        )
    if "dynamo_use_regional_compilation" in sections["dynamo_config"]:
        yield "dynamo_use_regional_compilation: each repeated block is compiled, always"
    if "parallelism_config_cp_comm_strategy" in sections["parallelism_config"]:
        yield "parallelism_config_cp_comm_strategy: left to the attention that is found; results are the same"
