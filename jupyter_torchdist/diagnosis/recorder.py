"""The dumps of all ranks compared: who is missing at a collective, and who called something else there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .dumps import DONE, FAILED, Call, Dump, Group
from .prefixes import Line
from .watchdog import Verdict

TOGETHER = 30.0
"""Seconds between the first and the last dump of one moment. An older dump tells of an earlier one."""

SHOWN = 8
"""Ranks that a sentence names."""

_EQUAL = (
    "all_reduce", "allreduce", "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "all_gather", "allgather",
    "_allgather_base", "_all_gather_base",
)  # fmt: skip
"""Operations whose input has the same type and as many elements on every rank."""


@dataclass(frozen=True)
class _Stuck:
    """A collective of a group that has not ended on some rank. ``calls``: of the ranks that have entered it."""

    group: Group
    calls: Mapping[int, Call]
    behind: tuple[int, ...]
    """Ranks that have not entered it."""
    silent: tuple[int, ...]
    """Ranks of the group of which there is no dump."""

    @property
    def waiting(self) -> list[int]:
        return [rank for rank, call in self.calls.items() if not call.ended]

    @property
    def first(self) -> Call:
        return self.calls[self.waiting[0]]

    @property
    def wait(self) -> str:
        return f"{in_words(self.waiting)} {'waits' if len(self.waiting) == 1 else 'wait'}"

    @property
    def where(self) -> str:
        return _called(self.first, self.group)

    @property
    def waits(self) -> str:
        """``ranks 0 and 2 wait in all_reduce #3 of 4 float32 (Cell In[3], line 6)``."""
        return f"{self.wait} in {self.where}"


def judge(dumps: Sequence[Dump], places: Mapping[int, str]) -> Verdict | None:
    """None where no rank waits. ``places``: where ranks were, as their stacks tell: ``Cell In[3], line 6``."""
    ranks = of_one_moment(dumps)
    stuck = sorted(_stuck(ranks), key=lambda one: one.first.created)
    return _mismatch(ranks) or _missing(stuck, ranks, places) or _still(stuck, ranks)


def of_one_moment(dumps: Sequence[Dump]) -> dict[int, Dump]:
    """By rank, the dumps that were written with the newest one. What a rank has done at its end stays true."""
    newest = max((dump.time for dump in dumps), default=0.0)
    ranks = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.rank)}
    return {
        rank: dump
        for rank, dump in ranks.items()
        if dump.end == DONE or not dump.time or newest - dump.time <= TOGETHER
    }


def in_words(ranks: Collection[int]) -> str:
    """``rank 3``, ``ranks 0, 2 and 3``, ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more``."""
    first = [str(rank) for rank in sorted(ranks)]
    if len(first) == 1:
        return f"rank {first[0]}"
    shown, last = (first[:-1], first[-1]) if len(first) <= SHOWN else (first[:SHOWN], f"{len(first) - SHOWN} more")
    return f"ranks {', '.join(shown)} and {last}"


def _called(call: Call, group: Group) -> str:
    of = f" of group {group.name}" if group.name else ""
    return f"{call}{of}" + (f" ({call.place})" if call.place else "")


def by_group(ranks: Mapping[int, Dump]) -> dict[str, dict[int, Group]]:
    """By name, then by rank."""
    names = sorted({name for dump in ranks.values() for name in dump.groups})
    return {name: {rank: dump.groups[name] for rank, dump in ranks.items() if name in dump.groups} for name in names}


def _line(dump: Dump, call: Call) -> Line:
    state = "ended" if call.ended else "not ended"
    text = f"rank {dump.rank}: {call}, {state}" + (f", {call.place}" if call.place else "")
    return Line(dump.file, call.index, text, text, dump.rank, dump.node)


# -- something else at the same point


def _mismatch(ranks: Mapping[int, Dump]) -> Verdict | None:
    """The first collective of a group that is not the same on all ranks."""
    for groups in by_group(ranks).values():
        for number in sorted({number for group in groups.values() for number in group.calls}):
            calls = {rank: group.calls[number] for rank, group in groups.items() if number in group.calls}
            if differs := _difference(list(calls.values())):
                return _of_different(differs, calls, groups, ranks)
    return None


def _difference(calls: Sequence[Call]) -> str:
    if len({call.operation for call in calls}) > 1:
        return "operations"
    if calls[0].operation not in _EQUAL:
        return ""
    if len({call.type for call in calls}) > 1:
        return "types"
    return "sizes" if len({call.sent for call in calls}) > 1 else ""


def _of_different(
    differs: str, calls: Mapping[int, Call], groups: Mapping[int, Group], ranks: Mapping[int, Dump]
) -> Verdict:
    parts: dict[str, list[int]] = {}
    for rank, call in calls.items():
        parts.setdefault(str(call), []).append(rank)
    alike = sorted(parts.values(), key=len, reverse=True)
    one, other = alike[0][0], alike[1][0]
    if _calls_later(groups[one], calls[other]) and _calls_later(groups[other], calls[one]):
        differs = "orders"
    said = [
        f"{in_words(alike_ranks)} {'calls' if len(alike_ranks) == 1 else 'call'} "
        f"{_called(calls[alike_ranks[0]], groups[alike_ranks[0]])}"
        for alike_ranks in alike[:SHOWN]
    ]
    culprit = alike[1][0] if len(alike) == 2 and len(alike[1]) == 1 < len(alike[0]) else None
    lines = tuple(_line(ranks[part[0]], calls[part[0]]) for part in alike)
    return Verdict("collective-mismatch", culprit, {"reason": f"{differs} differ: {', '.join(said)}"}, lines)


def _calls_later(group: Group, call: Call) -> bool:
    """Whether the rank calls what another rank has called already."""
    what = call.operation, call.sent, call.type
    later = (one for number, one in group.calls.items() if number > call.number)
    return any((one.operation, one.sent, one.type) == what for one in later)


# -- ranks that did not come


def _stuck(ranks: Mapping[int, Dump]) -> list[_Stuck]:
    found = []
    for groups in by_group(ranks).values():
        everyone = ranks if not next(iter(groups.values())).name else groups
        members = next((group.members for group in groups.values() if group.members), tuple(everyone))
        for number in sorted({call.number for group in groups.values() if (call := group.waits_in)}):
            calls = {rank: group.calls[number] for rank, group in groups.items() if number in group.calls}
            entered = {rank for rank, group in groups.items() if group.entered >= number}
            behind = tuple(rank for rank in members if rank in ranks and rank not in entered)
            silent = tuple(rank for rank in members if rank not in ranks)
            group = next(iter(groups.values()))
            found.append(_Stuck(group, calls, behind, silent))
    return found


def _missing(stuck: Sequence[_Stuck], ranks: Mapping[int, Dump], places: Mapping[int, str]) -> Verdict | None:
    """Ranks for which others wait, and which wait for nobody themselves."""
    blocked = {rank for one in stuck for rank in one.waiting}
    for one in stuck:
        free = [rank for rank in one.behind if rank not in blocked]
        # Every rank of our jobs answers; one whose thread cannot run holds Python's global lock.
        mute = [rank for rank in one.silent if not one.behind and all(dump.complete for dump in ranks.values())]
        if free or mute:
            return _absent(one, free or mute, ranks, places)
    waited = [one for one in stuck if one.behind]
    if waited and all(any(rank in other.waiting for other in waited) for one in waited for rank in one.behind):
        reason = "; ".join(f"{one.waits} for {in_words(one.behind)}" for one in waited[:SHOWN])
        lines = tuple(_line(ranks[one.waiting[0]], one.first) for one in waited)
        return Verdict("collective-mismatch", None, {"reason": f"orders differ: {reason}"}, lines)
    return None


def _absent(one: _Stuck, absent: list[int], ranks: Mapping[int, Dump], places: Mapping[int, str]) -> Verdict:
    culprit = absent[0] if len(absent) == 1 else None
    lines = tuple(_line(ranks[rank], one.calls[rank]) for rank in one.waiting)
    if all(rank in ranks and ranks[rank].end == DONE for rank in absent):
        words = {"ended": in_words(absent), "who": "the others", "reason": one.waits}
        return Verdict("uneven-inputs", culprit, words, lines)
    at = [f"{in_words([rank])} is at {places[rank]}" for rank in absent if rank in places][:SHOWN]
    collective = "; ".join([f"{one.where}, in which {one.wait}", *at])
    return Verdict("rank-stuck", culprit, {"who": in_words(absent), "collective": collective}, lines)


# -- nobody is known to be missing


def _still(stuck: Sequence[_Stuck], ranks: Mapping[int, Dump]) -> Verdict | None:
    """All ranks are in one collective. A rank that failed is no sign of that: its last call counts as not ended."""
    for one in stuck:
        if one.behind or any(ranks[rank].end == FAILED for rank in one.calls):
            continue
        lines = tuple(_line(ranks[rank], one.calls[rank]) for rank in one.waiting)
        if one.silent:
            words = {"operation": one.first.operation, "ranks": in_words(one.waiting)}
            return Verdict("watchdog-same-op", None, words, lines)
        late = one.waiting[0] if len(one.waiting) == 1 < len(one.calls) else None
        started = {"first": "1"} if one.first.number == 1 else {}
        return Verdict("collective-hangs", late, {"reason": one.waits, **started}, lines)
    return None
