"""When each rank entered each collective: the dumps of the flight recorders, on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import recorder
from .dumps import Dump, Group

MOST = 200
"""Collectives: the last ones."""


@dataclass(frozen=True)
class Arrivals:
    """One collective of a group (empty: of all ranks). ``at``: seconds since the epoch, by rank."""

    name: str
    """``all_reduce #17 of 4 float32``; where ranks called different ones, all of them."""
    group: str
    at: dict[int, float]
    missing: tuple[int, ...]
    """Ranks of the group that have a dump and have not entered it."""
    ended: bool
    """On every rank that has entered it."""


def of(dumps: Sequence[Dump], ahead: Mapping[str, float]) -> list[Arrivals]:
    """In the order of the first rank that entered. ``ahead``: seconds that the clocks of nodes are ahead."""
    ranks = recorder.of_one_moment(dumps)
    found = [one for groups in recorder.by_group(ranks).values() for one in _of_group(groups, ranks, ahead)]
    return sorted(found, key=lambda one: min(one.at.values()))[-MOST:]


def _of_group(groups: Mapping[int, Group], ranks: Mapping[int, Dump], ahead: Mapping[str, float]) -> list[Arrivals]:
    one = next(iter(groups.values()))
    members = next((group.members for group in groups.values() if group.members), tuple(groups if one.name else ranks))
    # Recorders keep the last collectives: earlier ones are not in all of them.
    first = max(min(group.calls) for group in groups.values())
    found = []
    for number in sorted({number for group in groups.values() for number in group.calls if number >= first}):
        calls = {rank: group.calls[number] for rank, group in groups.items() if number in group.calls}
        at = {
            rank: call.created - ahead.get(ranks[rank].node or "", 0.0) for rank, call in calls.items() if call.created
        }
        missing = [rank for rank in members if rank in ranks and (rank not in groups or groups[rank].entered < number)]
        if at:
            name = " / ".join(dict.fromkeys(str(call) for call in calls.values()))
            ended = all(call.ended for call in calls.values())
            found.append(Arrivals(name, one.name, at, tuple(missing), ended))
    return found
