"""Plans the strategy and its mesh: degrees whose product is the number of ranks, and compatible options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..protocol.errors import OptionError
from ..protocol.options.launcher import without_launcher
from ..protocol.options.strategy import BY_NAME, REFUSED, convert
from ..protocol.plan import Gpu, NodePlan
from ..protocol.spec import Options
from ..protocol.strategy import DIMENSIONS, StrategyPlan
from . import deepspeed_config, strategy_checks

DATA = ("ddp", "fsdp", "hsdp")
"""Strategies that divide the batch; a product contains at most one of them."""

OWN_DIMENSIONS = {
    "ddp": ("dp_replicate",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
}


@dataclass(frozen=True)
class _Choice:
    """The choice of ``auto``."""

    name: str
    why: str


def plan_strategy(
    options: Options,
    world_size: int,
    nodes: Sequence[NodePlan],
    gpus: Sequence[Gpu] = (),
    *,
    fits: bool | None = None,
) -> StrategyPlan:
    """The strategy that ``options`` choose on ``world_size`` ranks of ``nodes``.

    ``fits``: whether one rank's device has memory for the complete training (parameters, gradients, optimizer state
    and activations); None if unknown. Only ``auto`` uses it. Raises ``OptionError`` for options that contradict each
    other or the number of ranks.
    """
    name = options.strategy or "none"
    known = set(BY_NAME) | set(REFUSED)
    options = replace(options, option=without_launcher(options, known))
    if name == "none":
        return _none(options)
    if options.resume and not options.checkpoint:
        raise OptionError("--resume needs a directory with checkpoints", "add --checkpoint DIR")
    values = convert(options.option, name)
    notes = list(options.remarks)
    if name == "auto":
        choice = _choose(values, world_size, nodes, gpus, fits)
        name = choice.name
        notes.append(f"auto chose {name}: {choice.why}")
        values = convert(options.option, name)
    if options.verify:
        strategy_checks.check_verified(options, name, values)
    if name == "deepspeed":
        return _deepspeed(options, values, world_size, notes)
    _check_size(name, world_size)
    degrees = _degrees(name, values, world_size, nodes, notes)
    values = {key: value for key, value in values.items() if key not in DIMENSIONS}
    strategy_checks.check(name, values, degrees, checkpoint=options.checkpoint is not None)
    notes += strategy_checks.notes(values)
    if world_size == 1:
        notes.append("the job has one rank, so nothing is divided")
    return _plan(options, name, degrees, strategy_checks.implied(values, degrees), notes)


def _plan(
    options: Options, name: str, degrees: dict[str, int], values: dict[str, Any], notes: Sequence[str]
) -> StrategyPlan:
    return StrategyPlan(
        name=name,
        degrees={dimension: degree for dimension, degree in degrees.items() if degree > 1},
        options=values,
        precision=options.precision,
        compile=options.compile,
        activation_checkpointing=options.activation_checkpointing,
        grad_accumulation=options.grad_accumulation,
        verify=options.verify,
        checkpoint=options.checkpoint,
        resume=options.resume,
        notes=tuple(notes),
    )


def _deepspeed(options: Options, values: dict[str, Any], world_size: int, notes: Sequence[str]) -> StrategyPlan:
    """The plan for DeepSpeed. Its configuration is kept completely, and sets precision and accumulation."""
    if "config" not in values:
        raise OptionError("--strategy deepspeed needs a configuration", "add --config ds.json")
    settled = deepspeed_config.settle(values["config"], options, world_size)
    plan = _plan(options, "deepspeed", {"dp_replicate": world_size}, values, (*notes, *settled.notes))
    return replace(plan, precision=settled.precision, grad_accumulation=settled.grad_accumulation)


def _none(options: Options) -> StrategyPlan:
    """The plan without a strategy. Raises ``OptionError`` for options that need a strategy."""
    asked = {
        "-O": bool(options.option),
        "--precision": options.precision != "fp32",
        "--compile": options.compile,
        "--activation-checkpointing": options.activation_checkpointing,
        "--grad-accumulation": options.grad_accumulation != 1,
        "--verify": options.verify > 0,
        "--checkpoint": options.checkpoint is not None,
        "--resume": options.resume,
    }
    if any(asked.values()):
        words = ", ".join(flag for flag, given in asked.items() if given)
        raise OptionError(
            f"{words} works only with a strategy",
            "add --strategy auto (or ddp, fsdp, …), or do it in the code of the cell",
        )
    return StrategyPlan(notes=options.remarks)


def _choose(
    values: dict[str, Any], world_size: int, nodes: Sequence[NodePlan], gpus: Sequence[Gpu], fits: bool | None
) -> _Choice:
    """A strategy for ``auto``: first by the options, then by memory, then by topology."""
    for part in ("pp", "tp", "cp"):
        if part in values:
            return _Choice(part, f"-O {part} is given")
    for name in DATA:
        of_it = [key for key in values if name in BY_NAME[key].strategies and "auto" not in BY_NAME[key].strategies]
        if of_it:
            return _Choice(name, f"-O {of_it[0]} is one of its options")
    if world_size == 1:
        return _Choice("ddp", "the job has one rank, so nothing is divided")
    if fits:
        return _Choice("ddp", "the model, its gradients and optimizer state fit on each rank")
    if fits is None and not gpus:
        return _Choice("ddp", "the ranks are on CPUs, whose memory is not checked")
    several = len(nodes) > 1 and world_size > len(nodes) and len({len(node.ranks) for node in nodes}) == 1
    large = (
        "the model, its gradients and optimizer state do not fit on one rank"
        if fits is False
        else "it trains models that do not fit on one rank"
    )
    if several:
        return _Choice("hsdp", f"{large}, and links between nodes are slower than links within a node")
    return _Choice("fsdp", large)


def _degrees(
    name: str, values: dict[str, Any], world_size: int, nodes: Sequence[NodePlan], notes: list[str]
) -> dict[str, int]:
    """The ranks along each dimension of the mesh, from the given degrees, the number of ranks and the topology."""
    parts = name.split("+")
    data = [part for part in parts if part in DATA]
    if len(data) > 1:
        raise OptionError(
            f"{name}: {' and '.join(data)} both divide the batch",
            "use one of them; hsdp shards within a node and replicates across nodes",
        )
    sharding = values.get("sharding_strategy") if "fsdp" in parts else None
    own = {**OWN_DIMENSIONS, "fsdp": _of_sharding(sharding)}
    dimensions = [dimension for part in parts for dimension in own[part]]
    if strange := [dimension for dimension in DIMENSIONS if dimension in values and dimension not in dimensions]:
        shards = f"-O sharding_strategy={sharding}" if sharding else "fsdp, which shards over all ranks,"
        raise OptionError(
            f"{shards} and -O {strange[0]} contradict each other",
            "use --strategy hsdp, which both shards and replicates",
        )
    degrees = {dimension: values[dimension] for dimension in dimensions if dimension in values}
    if "hsdp" in parts and not {"dp_replicate", "dp_shard"} & degrees.keys():
        if len(nodes) == 1:
            raise OptionError(
                "hsdp shards within a node and replicates across nodes, but this job has one node",
                f"-O dp_shard=N makes groups of N ranks ({_combination(name, dimensions, world_size)}), "
                f"or use --strategy {name.replace('hsdp', 'fsdp')}",
            )
        degrees["dp_shard"] = _within_a_node(degrees, nodes)
    if sharding in strategy_checks.HYBRID and not {"dp_replicate", "dp_shard"} & degrees.keys():
        if len(nodes) > 1:
            degrees["dp_shard"] = _within_a_node(degrees, nodes)
        else:  # as in FSDP1, the ranks of one node share one copy
            degrees["dp_replicate"] = 1
            notes.append(f"{sharding} on one node keeps one copy, sharded over its ranks; -O dp_shard=k makes several")
    free = [dimension for dimension in dimensions if dimension not in degrees]
    given = math.prod(degrees.values())
    if len(free) > 1:
        raise OptionError(
            f"{name} on {world_size} ranks: the number of ranks along {' and '.join(free[1:])} is missing",
            _combination(name, dimensions, world_size),
        )
    if world_size % given or (not free and given != world_size):
        product = " × ".join(f"{dimension}={degree}" for dimension, degree in degrees.items())
        result = f" = {given}" if len(degrees) > 1 else ""
        verb = "does not divide" if free else "is not"
        raise OptionError(
            f"{name}: {product}{result} {verb} the {world_size} ranks", _combination(name, dimensions, world_size)
        )
    for dimension in free:
        degrees[dimension] = world_size // given
    return degrees


def _of_sharding(sharding: str | None) -> tuple[str, ...]:
    """The dimensions of fsdp for a ``sharding_strategy`` of FSDP1."""
    if sharding == strategy_checks.REPLICATED:
        return ("dp_replicate",)
    return ("dp_replicate", "dp_shard") if sharding in strategy_checks.HYBRID else ("dp_shard",)


def _within_a_node(degrees: dict[str, int], nodes: Sequence[NodePlan]) -> int:
    """The degree of ``dp_shard`` for hsdp: the ranks of one node, divided by the inner dimensions."""
    sizes = {len(node.ranks) for node in nodes}
    inner = degrees.get("cp", 1) * degrees.get("tp", 1)
    if len(sizes) > 1 or min(sizes) % inner:
        words = ", ".join(f"{node.name} has {len(node.ranks)}" for node in nodes)
        raise OptionError(
            f"hsdp needs the same number of ranks on each node ({words})", "give -O dp_shard=N, or use --strategy fsdp"
        )
    return min(sizes) // inner


def _combination(name: str, dimensions: Sequence[str], world_size: int) -> str:
    """A hint with valid degrees: the smallest divisor for each dimension, the rest for the first dimension."""
    degrees = dict.fromkeys(dimensions, 1)
    rest = world_size
    for dimension in dimensions[1:]:
        degrees[dimension] = next((size for size in range(2, rest) if rest % size == 0), 1)
        rest //= degrees[dimension]
    degrees[dimensions[0]] = rest
    if 1 in degrees.values():
        least = 2 ** len(dimensions)
        return f"{name} needs at least 2 ranks along each of {', '.join(dimensions)}: for example {least} ranks"
    words = " ".join(f"-O {dimension}={degree}" for dimension, degree in list(degrees.items())[1:])
    first = f"{dimensions[0]} gets {degrees[dimensions[0]]}"
    return f"for example {words}: {first}" if words else f"leave -O {dimensions[0]} out: it gets {rest}"


def _check_size(name: str, world_size: int) -> None:
    """Raises ``OptionError`` for one rank, unless the strategy only divides a batch or a model's state."""
    if world_size > 1 or name in ("ddp", "fsdp", "deepspeed"):
        return
    raise OptionError(
        f"{name} divides the work of a step among ranks, but this job has one rank",
        f"ask for more (--ranks {2 ** len(name.split('+'))}), or use --strategy ddp or fsdp",
    )
