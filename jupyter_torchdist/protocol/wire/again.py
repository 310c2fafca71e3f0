"""The next attempt of a job: on which nodes, and whether it could gain anything. Driver and agents plan it alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import codec
from ..disk import open_plain
from ..plan import Died, NodePlan, Plan
from ..strategy import StrategyPlan
from ..typed import Record

_TAIL = 64 * 1024
"""Bytes of a rank's curves that are looked at, from the end."""


@dataclass(frozen=True)
class Again(Record):
    """An attempt that the nodes begin by themselves, because others were missed while no driver was connected."""

    attempt: int
    restarts: int
    """How often the ranks were started again, this time included."""
    without: tuple[str, ...]
    """The nodes that were missed."""
    since: float
    """As in ``StrategyPlan``, for a job that has not resumed a checkpoint yet."""
    died: Died
    rendezvous: tuple[str, int] | None = None
    """As in ``Assignment``."""


def left(nodes: Sequence[NodePlan], without: Collection[str]) -> tuple[NodePlan, ...]:
    """The nodes but those named, with ranks numbered anew.

    They find their addresses themselves; one alone needs none.
    """
    if not without:
        return tuple(nodes)
    found: list[NodePlan] = []
    for node in nodes:
        if node.name not in without:
            first = sum(len(one.ranks) for one in found)
            ranks = tuple(range(first, first + len(node.ranks)))
            found.append(replace(node, ranks=ranks, address="", interface=""))
    if len(found) == 1:
        return (replace(found[0], address=NodePlan.address, interface=NodePlan.interface),)
    return tuple(found)


def sizes(nodes: Sequence[NodePlan]) -> str:
    """How many ranks each of the nodes has: what a strategy is planned from."""
    return ",".join(str(len(node.ranks)) for node in nodes)


def continued(plan: Plan, nodes: tuple[NodePlan, ...], strategy: StrategyPlan, since: float, died: Died | None) -> Plan:
    """``plan`` on ``nodes``, with the checkpoints of this job resumed. ``strategy``: planned for them.

    ``since``: when the job's ranks first ran, in seconds since the epoch; an earlier checkpoint is of another job.
    """
    before = plan.strategy
    strategy = replace(strategy, resume=before.resume, since=before.since)
    if strategy.checkpoint and not strategy.resume:
        strategy = replace(strategy, resume=True, since=since)
    size = sum(len(node.ranks) for node in nodes)
    return replace(plan, nodes=nodes, world_size=size, strategy=strategy, died=died)


def last_step(started: Mapping[Path, float]) -> int | None:
    """The last step that ranks told of: of a strategy's training, else as ``td.log(step=…)`` got it; None: unknown.

    ``started``: the ranks' files of curves, and since when what they tell is of this attempt (seconds since the epoch).
    """
    over: list[int] = []
    logged: list[int] = []
    for path, since in started.items():
        mine = None
        for record in _records(path, since):
            if record.get("k") == "steps" and isinstance(record.get("n"), int):
                over.append(record["n"])
            elif record.get("k") == "log" and not record.get("auto") and isinstance(record.get("step"), int):
                mine = record["step"]
        logged += [] if mine is None else [mine]
    return max(over or logged, default=None)


def _records(path: Path, since: float) -> Iterator[dict[str, Any]]:
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            data = file.read(_TAIL)
    except OSError:
        return
    for line in data.split(b"\n"):
        try:
            record = codec.loads(line)
        except ValueError:  # the first is cut, the last may be
            continue
        if isinstance(record, dict) and isinstance(t := record.get("t"), (int, float)) and t >= since:
            yield record


def in_vain(plan: Plan, died: Died) -> str:
    """Why the ranks are not started again after ``died``: as the attempt before, no further; empty if they may be.

    Steps that include those of a checkpoint count on. Others may begin anew, so only the same number says something.
    """
    before = plan.died
    if before is None or died.step is None or before.step is None or died.fault != before.fault:
        return ""
    if died.step > before.step or (died.step < before.step and plan.strategy.checkpoint is None):
        return ""
    same = died.step == before.step
    where = f", as attempt {before.attempt} did" if same else f", and attempt {before.attempt} at step {before.step}"
    resume = ", with --resume" if plan.strategy.checkpoint else ""
    return (
        f"attempt {died.attempt} ended at step {died.step}{where}, by the same fault. Another one would gain nothing, "
        f"so the ranks were not started again: mend the cause, then run the cell again{resume}"
    )
