"""Time-outs of collectives, compared over ranks: who is missing, who is ahead, who called something else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .elastic import Report
from .prefixes import Line
from .tracebacks import Traceback

WORK = re.compile(
    r"(?:atchdog c|C)aught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)(?:, TensorShape=\[[^\]]*\])?(?:, NumelIn=(?P<numel>\d+))?"
)
GLOO = re.compile(r"Timed out waiting (?P<ms>\d+)ms for (?:recv|send) operation")

_COLLECTIVES = (
    "all_reduce", "broadcast", "barrier", "reduce_scatter_tensor", "reduce_scatter", "all_gather_into_tensor",
    "all_gather_object", "all_gather", "all_to_all_single", "all_to_all", "reduce", "gather_object", "gather",
    "scatter_object_list", "scatter", "broadcast_object_list", "send", "recv", "monitored_barrier",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """``code`` of the catalogue, the culprit where one is known, and words for the groups of the kind's sentence.

    The word ``first`` is there where it is the first collective of its group.
    """

    code: str
    rank: int | None
    words: dict[str, str]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class _Work:
    rank: int
    seq: int
    op: str
    numel: str
    line: Line


def is_time_out(line: Line) -> bool:
    """Of NCCL or Gloo."""
    return bool(WORK.search(line.text) or GLOO.search(line.text))


def judge(lines: Iterable[Line], tracebacks: Sequence[Traceback], report: Report) -> Verdict | None:
    """Of the lines with time-outs; None where there is none."""
    lines = list(lines)
    works: dict[int, _Work] = {}
    for line in lines:
        found = WORK.search(line.text)
        if found and line.rank is not None and line.rank not in works:
            works[line.rank] = _Work(line.rank, int(found["seq"] or -1), found["op"], found["numel"] or "", line)
    if works:
        return _nccl(list(works.values()))
    gloo = [one for one in tracebacks if GLOO.search(one.message)]
    if gloo:
        return _gloo(gloo, report)
    return Verdict("watchdog-same-op", None, _timed_out("collective", ()), tuple(lines[:3])) if lines else None


def _nccl(works: list[_Work]) -> Verdict:
    works.sort(key=lambda work: work.rank)
    first = works[0]
    lines = tuple(work.line for work in works[:4])
    ranks = [work.rank for work in works]
    behind = min(works, key=lambda work: work.seq)
    ahead = max(works, key=lambda work: work.seq)
    if behind.seq != ahead.seq:
        reason = f"rank {behind.rank} at {behind.op} #{behind.seq}, rank {ahead.rank} at {ahead.op} #{ahead.seq}"
        return Verdict("desync", _alone(works), {"reason": reason}, lines)
    other = next((work for work in works if (work.op, work.numel) != (first.op, first.numel)), None)
    if other is not None:
        reason = f"rank {first.rank} {_call(first)}, rank {other.rank} {_call(other)}"
        return Verdict("collective-mismatch", None, {"reason": reason}, lines)
    missing = sorted(set(range(max(ranks) + 1)) - set(ranks))
    if missing == [0] and first.numel == "1":
        return Verdict("rank0-only-work", 0, {"operation": first.op}, lines)
    if len(missing) == 1 and len(ranks) > 1:
        return Verdict("rank-stuck", missing[0], {}, lines)
    started = {"first": "1"} if ahead.seq == 1 else {}
    return Verdict("watchdog-same-op", None, {**_timed_out(first.op, ranks), **started}, lines)


def _alone(works: Sequence[_Work]) -> int | None:
    """The rank that is behind all others, or else ahead of all others that are at one point."""
    places = sorted({work.seq for work in works})
    for place in places if len(places) == 2 else places[:1]:
        ranks = [work.rank for work in works if work.seq == place]
        if len(ranks) == 1:
            return ranks[0]
    return None


def _call(work: _Work) -> str:
    return f"calls {work.op}" + (f" of {work.numel} elements" if work.numel else "")


def _gloo(timeouts: list[Traceback], report: Report) -> Verdict:
    """Gloo's time-out names nothing: the stacks and the launcher's report tell who called what, and who did not."""
    lines = tuple(one.end for one in timeouts[:4])
    calls = {one.end.rank: (_operation(one), one) for one in timeouts}
    operations = {operation for operation, _ in calls.values()}
    ranks = sorted(rank for rank in calls if rank is not None)
    if len(operations) > 1:
        reason = ", ".join(
            f"rank {rank} calls {operation}" + (f" ({one.user})" if one.user else "")
            for rank, (operation, one) in sorted(calls.items(), key=lambda item: str(item[0]))
        )
        return Verdict("collective-mismatch", None, {"reason": reason}, lines)
    alive = [end.rank for end in report.ends if end.code == -15 and end.rank not in ranks]
    if alive:
        return Verdict("rank-stuck", alive[0], {}, lines)
    if report.present and not report.terminated and len(ranks) == 1:
        return Verdict("uneven-inputs", ranks[0], {}, lines)
    return Verdict("watchdog-same-op", None, _timed_out(next(iter(operations)), ranks), lines)


def _operation(one: Traceback) -> str:
    called = next((name for name in reversed(one.functions) if name in _COLLECTIVES), None)
    return called or "collective"


def _timed_out(operation: str, ranks: Sequence[int]) -> dict[str, str]:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    who = {0: "some ranks", 1: f"rank {shown}"}.get(len(ranks), f"ranks {shown}")
    return {"operation": operation, "ranks": who}
