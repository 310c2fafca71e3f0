"""Options of a strategy together: implied options, contradictions, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..protocol.errors import OptionError
from ..protocol.spec import Options

Values = Mapping[str, Any]
"""Converted options by name, without defaults."""

REPLICATED, HYBRID = "NO_SHARD", ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
RESHARDED = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False}
"""FSDP1's name of a sharding strategy → whether parameters are freed between forward and backward."""


def check(name: str, values: Values, degrees: Mapping[str, int], *, checkpoint: bool) -> None:
    """Raises ``OptionError`` for options that cannot be combined on this mesh."""
    _check_sharding(name, values, degrees)
    _check_units(values)
    _check_pipeline(values, degrees)
    if values.get("trust_loss") and values.get("loss") == "sum":
        raise OptionError(
            "-O trust_loss says that the loss is a mean, and -O loss=sum that it is a sum",
            "leave -O trust_loss out, as -O loss=sum is enough",
        )
    periodic = [option for option in values if option.startswith("checkpoint_")]
    if periodic and not checkpoint:
        raise OptionError(f"-O {periodic[0]} needs a directory for checkpoints", "add --checkpoint DIR")


def check_verified(options: Options, name: str, values: Values) -> None:
    """Raises ``OptionError`` for what one device cannot run or does not compute: ``--verify`` would compare with it."""
    parts, hook = name.split("+"), values.get("comm_hook", "none")
    asked = {
        "--strategy pp": "pp" in parts and "no rank has the whole model's gradients",
        "--strategy deepspeed": name == "deepspeed" and "DeepSpeed changes the steps of the optimizer itself",
        f"--precision {options.precision}": options.precision != "fp32" and "one device would compute in fp32",
        f"-O comm_hook={hook}": hook != "none" and "gradients are rounded on their way",
        "--resume": options.resume and "one device would begin at the first step",
    }
    for what, why in asked.items():
        if why:
            raise OptionError(f"--verify and {what}: {why}", "leave one of the two out")


def _check_sharding(name: str, values: Values, degrees: Mapping[str, int]) -> None:
    sharding, reshard = values.get("sharding_strategy"), values.get("reshard_after_forward")
    if "hsdp" in name.split("+") and sharding not in (None, *HYBRID):
        raise OptionError(
            f"--strategy {name} and -O sharding_strategy={sharding} contradict each other",
            f"write -O sharding_strategy={HYBRID[0]}",
        )
    if sharding in RESHARDED and reshard is not None and bool(reshard) != RESHARDED[sharding]:
        raise OptionError(
            f"-O sharding_strategy={sharding} and -O reshard_after_forward={int(reshard)} contradict each other",
            "keep one of the two",
        )
    # ``type``, because True is an int, too: an int is the size of a group. torch silently accepts the mesh's size.
    shards = degrees.get("dp_shard", 1)
    if type(reshard) is int and (reshard >= shards or shards % reshard):
        raise OptionError(
            f"-O reshard_after_forward={reshard}: groups of {reshard} do not divide the {shards} ranks of a copy",
            f"give a divisor of {shards} that is less than {shards}, or 1 or 0",
        )
    if values.get("cpu_ram_efficient_loading") and values.get("sync_module_states") is False:
        raise OptionError(
            "-O cpu_ram_efficient_loading needs -O sync_module_states=1: other ranks get their weights from rank 0",
            "leave -O sync_module_states=0 out",
        )


def _check_units(values: Values) -> None:
    policy = values.get("auto_wrap_policy")
    owners = {"transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP", "min_num_params": "SIZE_BASED_WRAP"}
    given = [option for option in owners if option in values]
    for option in given:
        if policy not in (None, owners[option]):
            raise OptionError(
                f"-O {option} and -O auto_wrap_policy={policy} contradict each other",
                f"write -O auto_wrap_policy={owners[option]}, or leave -O {option} out",
            )
    if policy is None and len(given) > 1:
        raise OptionError(f"-O {given[0]} and -O {given[1]} contradict each other", "keep one of the two")


def _check_pipeline(values: Values, degrees: Mapping[str, int]) -> None:
    ranks = degrees.get("pp", 1)
    if ranks == 1:
        return
    schedule, balance = values.get("schedule", "gpipe"), values.get("balance")
    count = values.get("microbatches") or ranks
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    if count < least:
        raise OptionError(
            f"{schedule} needs at least as many microbatches as stages: {least}, not {count}",
            f"write -O microbatches={least}, or -O schedule=gpipe",
        )
    rounds = max(1, count // ranks)
    if schedule.startswith("interleaved") and count % rounds:
        raise OptionError(
            f"{schedule} takes microbatches in rounds of about {ranks}, "
            f"and {count} cannot be divided into {rounds} equal rounds",
            f"write -O microbatches={rounds * ranks}, or -O schedule=gpipe",
        )
    _check_balance(schedule, balance, ranks)


def _check_balance(schedule: str, balance: Any, ranks: int) -> None:
    parts = len(balance) if isinstance(balance, tuple) else ranks
    if schedule in ("gpipe", "1f1b"):
        fits, wanted = (
            parts == ranks,
            f"give {ranks} numbers, or more with schedule=looped_bfs or interleaved_1f1b",
        )
    elif schedule in ("zbv", "dualpipev"):
        fits, wanted = parts == 2 * ranks, f"give {2 * ranks} numbers: two stages a rank"
    else:
        fits, wanted = parts % ranks == 0, f"give a multiple of {ranks} numbers"
    if isinstance(balance, tuple) and not fits:
        written = ",".join(map(str, balance))
        raise OptionError(f"-O balance={written} has {parts} parts for {ranks} ranks along pp ({schedule})", wanted)


def implied(values: Values, degrees: Mapping[str, int]) -> dict[str, Any]:
    """``values`` with the options that follow from them and from the mesh."""
    whole = dict(values)
    if "transformer_layer_cls_to_wrap" in values:
        whole["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    elif "min_num_params" in values:
        whole["auto_wrap_policy"] = "SIZE_BASED_WRAP"
    sharding = values.get("sharding_strategy")
    if sharding in RESHARDED:
        whole.setdefault("reshard_after_forward", RESHARDED[sharding])
    if sharding in HYBRID and degrees.get("dp_replicate", 1) == 1:  # with one copy the sharding is not hybrid
        whole["sharding_strategy"] = "FULL_SHARD" if RESHARDED[sharding] else "SHARD_GRAD_OP"
    return whole


def notes(values: Values) -> Iterator[str]:
    """Notes on options that run differently than their names say, with the same result."""
    if values.get("version") == 1:
        yield "version 1: run as FSDP2, which shards each parameter by itself; losses and weights are the same"
    if values.get("use_orig_params") is False:
        yield "use_orig_params=0: FSDP2 has no flat parameters, names stay as they are"
    if values.get("uneven_inputs"):
        yield "uneven_inputs: batches that the ranks do not divide are always taken, each sample once: changes nothing"
    if values.get("find_unused_parameters"):
        yield "find_unused_parameters: a cell needs none, only td.prepare does; static_graph=1 looks for them once"
    if values.get("backward_prefetch") == "NO_PREFETCH":
        yield "backward_prefetch=NO_PREFETCH: less memory, more waiting"
