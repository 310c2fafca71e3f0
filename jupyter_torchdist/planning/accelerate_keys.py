"""The meaning of each key of accelerate's configuration: our options as words, nothing, or a refusal with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..protocol.options.strategy import BY_NAME, SHARDINGS

Take = Callable[[Any], Iterable[str]]
"""Converts a key's value to words. Raises ``Refused``, or ``ValueError`` with what was expected."""


class Refused(Exception):
    """A key that is not supported: the reason, and what to do instead."""

    def __init__(self, reason: str, instead: str) -> None:
        super().__init__(reason)
        self.reason, self.instead = reason, instead


def of_a_tpu(item: Any) -> list[str]:
    if item in (False, "no", "No", "NO", [], {}, ""):
        return []
    raise Refused(
        "TPUs (PyTorch/XLA) are not supported: torch_xla has no release for this PyTorch",
        "leave it out: fsdp shards on GPUs, with fsdp_activation_checkpointing for xla_fsdp_grad_ckpt",
    )


def yes(item: Any) -> bool:
    """A YAML boolean, or a text for one."""
    if isinstance(item, bool):
        return item
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(item).lower() not in words:
        raise ValueError("true or false")
    return words[str(item).lower()]


def _only_if_not(reason: str, instead: str) -> Take:
    """A key that has no effect unless it is true."""

    def take(item: Any) -> list[str]:
        if item not in ([], {}, "") and (isinstance(item, (list, dict)) or yes(item)):
            raise Refused(reason, instead)
        return []

    return take


def nothing(item: Any) -> list[str]:
    """A key for accelerate's launcher that is not needed on one machine."""
    return []


def one_of(*values: str) -> Take:
    """A key whose allowed values all give the same results."""

    def take(item: Any) -> list[str]:
        if str(item) not in values:
            raise ValueError(" or ".join(values))
        return []

    return take


def only(values: tuple[str, ...], reason: str, instead: str) -> Take:
    def take(item: Any) -> list[str]:
        if str(item).lower() not in values:
            raise Refused(reason, instead)
        return []

    return take


def _truth(item: Any) -> list[str]:
    """A boolean that other code reads, or that only needs a remark."""
    yes(item)
    return []


def _flag(flag: str) -> Take:
    return lambda item: [flag] if yes(item) else []


def _precision(item: Any) -> list[str]:
    name = "no" if item is False else str(item).lower()
    if name == "fp8":
        raise Refused("there is no fp8 here", "use bf16")
    if name not in ("no", "fp16", "bf16"):
        raise ValueError("no, fp16 or bf16")
    return [f"--precision={'fp32' if name == 'no' else name}"]


def _gpu_ids(item: Any) -> list[str]:
    ids = "".join(str(item).split())
    if ids == "all":
        return []
    if not all(part.isdecimal() for part in ids.split(",")):
        raise ValueError("all, or numbers such as 0,1")
    return [f"--env=CUDA_VISIBLE_DEVICES={ids}"]


def _one_machine(item: Any) -> list[str]:
    if str(item) != "1":
        raise Refused("this version runs on one machine", "num_machines: 1")
    return []


def _remote(item: Any) -> list[str]:
    """Commands for the machines of a TPU pod: a file name, a text or a list."""
    if item not in ([], "", False):
        raise Refused("this version runs on one machine", "leave it out, and run the cell where its GPUs are")
    return []


TOP: dict[str, Take] = {
    "compute_environment": only(
        ("local_machine",), "only this machine is run on", "compute_environment: LOCAL_MACHINE, where the GPUs are"
    ),
    "distributed_type": nothing,  # read by _strategy
    "num_processes": nothing,  # read by _ranks, like use_cpu
    "use_cpu": _truth,
    "mixed_precision": _precision,
    "fp16": lambda item: ["--precision=fp16"] if yes(item) else [],
    "num_machines": _one_machine,
    "machine_rank": only(("0",), "one machine has number 0 alone", "machine_rank: 0"),
    "gpu_ids": _gpu_ids,
    "enable_cpu_affinity": lambda item: ["--numa-binding=node"] if yes(item) else [],
    "debug": _only_if_not("the check of accelerate's own collectives", "--env TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    "downcast_bf16": _only_if_not("it is of TPUs", "mixed_precision: bf16"),
    "main_process_ip": nothing,
    "main_process_port": nothing,
    "main_training_function": nothing,
    "rdzv_backend": only(("static", "c10d"), "ranks meet at a store of ours", "leave it out"),
    "same_network": nothing,
    "command_file": _remote,
    "commands": _remote,
    "gradient_accumulation_steps": lambda item: [f"--grad-accumulation={whole(item)}"],
}


def whole(item: Any) -> int:
    if not str(item).isdecimal() or int(item) < 1:
        raise ValueError("a whole number, at least 1")
    return int(item)


def _setting(name: str) -> Take:
    """A key that is one of our strategy options; its value is checked here, so that the error names the file."""

    def take(item: Any) -> list[str]:
        text = ",".join(map(str, item)) if isinstance(item, list) else str(item)
        BY_NAME[name].convert(text)
        return [f"--option={name}={text}"]

    return take


def _min_num_params(item: Any) -> list[str]:
    return [] if str(item) == "0" else list(_setting("min_num_params")(item))  # older versions always write the key


def _state_dict(item: Any) -> list[str]:
    if str(item).upper() == "LOCAL_STATE_DICT":
        raise Refused("it holds FSDP1's flat shards, which FSDP2 has not", "SHARDED_STATE_DICT")
    return list(_setting("state_dict_type")(item))


def _reshard(item: Any) -> list[str]:
    """For FSDP1, accelerate writes the name of the sharding strategy here."""
    named = str(item).upper() in SHARDINGS
    return list(_setting("sharding_strategy" if named else "reshard_after_forward")(item))


FSDP: dict[str, Take] = {
    **{
        f"fsdp_{name}": _setting(name)
        for name in (
            "sharding_strategy",
            "auto_wrap_policy",
            "transformer_layer_cls_to_wrap",
            "forward_prefetch",
            "backward_prefetch",
            "cpu_ram_efficient_loading",
            "sync_module_states",
            "use_orig_params",
            "version",
        )
    },
    "fsdp_min_num_params": _min_num_params,
    "fsdp_offload_params": _setting("cpu_offload"),
    "fsdp_state_dict_type": _state_dict,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_activation_checkpointing": _flag("--activation-checkpointing"),
    "fsdp_activation_checkpointing_offload": _only_if_not(
        "activations are computed again or kept, not offloaded", "fsdp_activation_checkpointing: true alone"
    ),
}


def _backend(item: Any) -> list[str]:
    if str(item).lower() in ("no", "false"):
        return []
    if str(item).lower() != "inductor":
        raise Refused("blocks are compiled with Inductor", "INDUCTOR, or torch.compile in the cell")
    return ["--compile"]


_COMPILED = "blocks are compiled as torch.compile does by default"

DYNAMO: dict[str, Take] = {
    "dynamo_backend": _backend,
    "dynamo_mode": only(("default",), _COMPILED, "default, or torch.compile in the cell"),
    "dynamo_use_fullgraph": _only_if_not(_COMPILED, "false, or torch.compile in the cell"),
    "dynamo_use_dynamic": _only_if_not(_COMPILED, "false, or torch.compile in the cell"),
    "dynamo_use_regional_compilation": _truth,
}

REFUSED = {
    "mpirun_config": Refused("ranks are started by torchrun's engine, not by mpirun", "leave mpirun_config out"),
    "fp8_config": Refused("there is no fp8 here", "leave fp8_config out, mixed_precision: bf16"),
}
