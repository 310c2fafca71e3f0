"""Tables of the receipt, the plan, its memory, and the machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..protocol.bundle import Captured
from ..protocol.memory import MemoryPlan
from ..protocol.plan import Inventory, NodePlan, Plan
from ..protocol.strategy import DIMENSIONS, StrategyPlan
from .wording import count, duration, indent, runs, size, table


def receipt_table(receipt: Sequence[Captured]) -> str:
    """The captured names: name, kind, description, size, and the line that needs it."""
    if not receipt:
        return "nothing: the cell uses no name of the notebook"
    rows = [(item.name, item.kind, item.what, size(item.size) if item.size else "", item.needed) for item in receipt]
    return table(("NAME", "KIND", "WHAT", "SIZE", "NEEDED BY"), rows)


def plan_table(plan: Plan) -> str:
    """The plan: what runs on which host and device."""
    rows = [
        (
            node.called,
            ", ".join(runs(node.ranks)),
            _address(node, plan),
            ", ".join(node.gpus) or "CPU",
            node.reach.python or ("searched there" if plan.request else "this one"),
        )
        for node in plan.nodes
    ]
    each = [str(node.threads) for node in plan.nodes]
    threads = each[0] if len(set(each)) == 1 else f"{', '.join(each)} (in the order of the hosts)"
    facts = [
        f"{count(plan.world_size, 'rank')}, backend {plan.backend}, OMP_NUM_THREADS={threads}",
        "start: new interpreters (--fresh)" if plan.fresh else "start: forked from a warm process",
        f"results: {'every rank' if plan.collect == 'all' else 'rank 0'}, names {', '.join(plan.out)}",
    ]
    if plan.numa_binding:
        facts.append(f"NUMA binding: {plan.numa_binding}")
    if plan.timeout:
        facts.append(f"timeout: {duration(plan.timeout)}")
    if plan.env_names:
        facts.append(f"environment: {', '.join(plan.env_names)}")
    facts[1:1] = strategy_lines(plan.strategy)
    where = f" over SSH by {plan.login}" if plan.login else ""
    request = ["", f"sent to the launcher{where}:", indent(plan.request)] if plan.request else []
    return "\n".join([*facts, table(("HOST", "RANKS", "ADDRESS", "DEVICES", "PYTHON"), rows), *request])


def _address(node: NodePlan, plan: Plan) -> str:
    """A host finds its own address by the route to the first one."""
    known = f"{node.address} ({node.interface})" if node.interface else node.address
    if known:
        return known
    return "its own" if node is plan.nodes[0] else f"towards {plan.nodes[0].called}"


def strategy_lines(strategy: StrategyPlan) -> list[str]:
    """Lines about a strategy: mesh, options, decisions. Without a strategy only the notes."""
    notes = [f"  note: {note}" for note in strategy.notes]
    if strategy.name == "none":
        return notes
    lines = [f"strategy: {strategy.name}, {mesh(strategy)}, {strategy.precision}"]
    if strategy.options:
        lines.append("  options: " + ", ".join(f"{name}={_value(item)}" for name, item in strategy.options.items()))
    done = [
        "each repeated block compiled" if strategy.compile else "",
        "activations computed again in backward()" if strategy.activation_checkpointing else "",
        _accumulation(strategy),
        f"the first {strategy.verify} optimizer steps are compared with one device" if strategy.verify else "",
        f"checkpoints in {strategy.checkpoint}" if strategy.checkpoint else "",
        "begins at the last of them" if strategy.resume else "",
    ]
    lines += [f"  {words}" for words in done if words]
    return lines + notes


def _accumulation(strategy: StrategyPlan) -> str:
    """With DeepSpeed one step uses several batches; with other strategies one batch is split into parts."""
    parts = strategy.grad_accumulation
    if parts == 1:
        return ""
    return f"an optimizer step every {parts} batches" if strategy.name == "deepspeed" else f"batches in {parts} parts"


def memory_table(memory: MemoryPlan) -> str:
    """The memory that the fullest rank needs, and whether it fits."""
    need = memory.need
    rows = [
        ("parameters", size(need.parameters)),
        ("gradients", size(need.gradients)),
        ("optimizer state", size(need.optimizer)),
        ("buffers", size(need.buffers)),
        ("activations", "not known" if need.activations is None else size(need.activations)),
        ("peak", f"at least {size(need.least)}" if need.peak is None else size(need.peak)),
    ]
    notes = [f"  note: {note}" for note in memory.notes]
    return "\n".join([f"memory: {memory.verdict}", *notes, table(("A RANK'S", "SIZE"), rows)])


def mesh(strategy: StrategyPlan) -> str:
    """``dp_shard=4 × tp=2``, the outermost dimension first."""
    degrees = [f"{name}={strategy.degree(name)}" for name in DIMENSIONS if strategy.degree(name) > 1]
    return " × ".join(degrees) or "one rank"


def _value(value: Any) -> str:
    """The value as written in the option line; of a configuration only the keys."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):  # tp_plan, or a configuration (only its keys are shown)
        flat = all(isinstance(item, str) for item in value.values())
        return ",".join(f"{key}:{item}" for key, item in value.items()) if flat else f"{{{', '.join(value)}}}"
    return str(value)


def inventory_table(inventories: Sequence[Inventory]) -> str:
    """The resources of each node, with one line for every GPU."""
    lines = []
    for node in inventories:
        versions = {"python": node.python, "torch": node.torch}
        known = [size(node.memory)] if node.memory else []
        known += [f"{name} {version}" for name, version in versions.items() if version]
        lines.append(", ".join([f"{node.host}: {count(node.cores, 'core')}", *known]))
        lines += [
            f"  GPU {gpu.index}  {gpu.name}  {size(gpu.memory_used)} of {size(gpu.memory)} in use  {gpu.uuid}"
            + (f"  by {', '.join(map(str, gpu.pids))}" if gpu.pids else "")
            + (f"  of job {gpu.job}" if gpu.job else "")
            for gpu in node.gpus
        ]
        if not node.gpus:
            lines.append("  no GPU that this process can use")
    return "\n".join(lines)
