"""Whether a job's training fits into the memory of the planned devices. The numbers come from a rehearsal."""

from __future__ import annotations

from dataclasses import replace

from ..protocol.memory import MemoryPlan, Need, ParameterSize, Rehearsed, elements
from ..protocol.plan import Inventory, Plan, is_open
from ..protocol.strategy import StrategyPlan
from .topology import OVERSUBSCRIPTION_LIMIT

DIVIDES = ("ddp", "fsdp", "hsdp", "tp", "cp", "pp")
"""Strategies for which a rehearsal knows the memory of a rank."""


def need(found: Rehearsed, strategy: StrategyPlan) -> Need:
    """The memory that the fullest rank of ``strategy`` needs."""
    parameters = sum(_elements(one, strategy) * one.itemsize for one in found.parameters)
    trained = [one for one in found.parameters if one.trained]
    gradients = sum(_elements(one, strategy) * one.itemsize for one in trained)
    optimizer = _optimizer_state(trained, strategy)
    peak = None
    if found.working is not None:
        kept = 0 if found.offloaded else parameters + optimizer
        peak = kept + found.buffers + found.batch + found.working
    whole = sum(elements(one.shape) * one.split * one.itemsize for one in found.parameters)
    building = 0 if found.outlined else whole + found.elsewhere + found.buffers + found.trying
    return Need(parameters, gradients, optimizer, found.buffers, found.activations, peak, building, found.offloaded)


def with_checkpointing(strategy: StrategyPlan) -> StrategyPlan:
    """The same strategy with activation checkpointing."""
    return replace(strategy, activation_checkpointing=True)


def replicated(plan: Plan) -> Plan:
    """The same ranks with a complete copy each, which ``auto`` prefers."""
    degrees = {"dp_replicate": plan.world_size} if plan.world_size > 1 else {}
    return replace(plan, strategy=replace(plan.strategy, name="ddp", degrees=degrees))


def _elements(one: ParameterSize, strategy: StrategyPlan) -> int:
    return elements(one.shape, strategy.degree("dp_shard") if one.sharded else 1)


def _optimizer_state(trained: list[ParameterSize], strategy: StrategyPlan) -> int:
    sizes = [_elements(one, strategy) * one.state + one.state_whole for one in trained]
    ranks = strategy.degree("dp_replicate")
    if not strategy.options.get("zero1") or ranks == 1:
        return sum(sizes)
    loads, kept = [0] * ranks, [0] * ranks
    for one, size in zip(trained, sizes, strict=True):  # as in zero1: each parameter to the rank with the least
        rank = loads.index(min(loads))
        loads[rank] += elements(one.shape)
        kept[rank] += size
    return max(kept)


def judge(found: Rehearsed, plan: Plan, inventory: Inventory, checkpointed: Rehearsed | None = None) -> MemoryPlan:
    """Compare the memory that the job needs with the available memory.

    ``checkpointed`` is the same step with activation checkpointing; the verdict names it if the first does not fit.
    """
    wanted = need(found, plan.strategy)
    room, where = room_of(plan, inventory)
    notes = list(found.notes)
    if wanted.building and any(plan.strategy.degree(one) > 1 for one in ("dp_shard", "tp", "cp", "pp")):
        notes.append(f"before its first step a rank tries the whole model, undivided: {gigabytes(wanted.building)} GB")
    if found.reason:
        notes.append(f"not rehearsed: {found.reason}")
    others = [part for part in plan.strategy.name.split("+") if part not in DIVIDES]
    if others:
        notes.append(f"{' and '.join(others)} not counted: it divides what stands here further")
    if wanted.offloaded:
        waiting = gigabytes(wanted.parameters + wanted.gradients + wanted.optimizer)
        notes.append(f"cpu_offload: {waiting} GB a rank wait in host memory, not counted in the peak")
    fits, verdict = _verdict(wanted, room, where, bound="at most " if others else "")
    if fits is False and checkpointed is not None and checkpointed.working is not None:
        verdict += f"; with activation checkpointing {gigabytes(need(checkpointed, plan.strategy).least)}"
    return MemoryPlan(plan.world_size, wanted, room, where, fits, verdict, tuple(notes))


def _verdict(wanted: Need, room: int | None, where: str, bound: str) -> tuple[bool | None, str]:
    """``bound``: the words before a need that another dimension of the mesh reduces."""
    least, known = gigabytes(wanted.least), wanted.peak is not None
    bound = bound or ("" if known else "at least ")
    if not wanted.parameters:
        return None, "what it trains is not known"
    if room is None:
        return None, f"needs {bound}{least} GB a rank; {where}"
    beside = f"{least} of {gigabytes(room)} GB ({where})"
    if wanted.least > room and bound != "at most ":
        return False, f"does not fit: {bound}{beside}"
    if wanted.least <= room and known:
        return True, f"fits: {bound}{beside}"
    return None, f"whether it fits is not known: {bound}{beside}"


def room_of(plan: Plan, inventory: Inventory) -> tuple[int | None, str]:
    """Bytes that a rank may use, and a description of this memory."""
    chosen = {uuid for node in plan.nodes for uuid in node.gpus}
    if plan.request or any(map(is_open, chosen)):
        return None, "what the nodes have is not known before the launcher gives them"
    gpus = [gpu for gpu in inventory.gpus if gpu.uuid in chosen]
    if gpus:
        least = min(gpus, key=lambda gpu: gpu.memory)
        return least.memory, f"each {least.name}"
    if plan.world_size > inventory.cores * OVERSUBSCRIPTION_LIMIT:
        return None, f"so many ranks do not run on {inventory.host}"
    if not inventory.memory:
        return None, f"{inventory.host} does not say what it has"
    each = inventory.memory // max(1, plan.world_size)
    return each, f"a rank's part of {gigabytes(inventory.memory)} GB free on {inventory.host}"


def gigabytes(size: int) -> str:
    """``91``, ``3.1``, ``0.02``: powers of ten; two digits if the number is small."""
    value = size / 1e9
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
