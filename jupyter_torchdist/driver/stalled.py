"""Who holds up a job of which no rank makes progress: from its state, in which every rank says where it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from ..diagnosis import places
from ..diagnosis.catalogue import BY_CODE
from ..protocol.events import Finding
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..protocol.state import RANK_ENDS, JobState, RankState, Waiting
from ..views.job_text import collective
from ..views.wording import ranks as in_words

PLACES = 3
"""Of how many ranks the place is named."""

_RENDEZVOUS = ("new_group", "init_process_group", "monitored_barrier", "rendezvous", "_store_based_barrier")
_STORE = re.compile(r"store\w*\s*\.\s*(?:get|wait|multi_get|compare_set|add|check)\s*\(", re.IGNORECASE)


class StalledJob:
    """A job that stalls. ``at_work``: ranks that use the processor, or read and write."""

    def __init__(self, plan: Plan, spec: JobSpec, state: JobState, at_work: Collection[int] = ()) -> None:
        self._plan, self._state, self._at_work = plan, state, at_work
        self._spec = spec
        self._alive = [rank for _, rank in sorted(state.ranks.items()) if rank.state not in RANK_ENDS]

    def finding(self) -> Finding:
        """One sentence that names the ranks which hold up the others, and where they are."""
        if late := [rank for rank in self._alive if not rank.ready]:
            return self._late(late)
        if different := self._state.differences():
            return self._different(different[0])
        waits = self._waits()
        if not waits:
            return self._all_idle()
        for waiting, waiters in waits:
            awaited = [self._state.ranks[rank] for rank in self._state.awaited(waiting)]
            held = [rank for rank in awaited if not rank.waits_in] or ([] if awaited else self._silent())
            if held:
                return self._held(waiting, waiters, held)
        return self._in_a_circle(waits)

    def _waits(self) -> list[tuple[Waiting, list[int]]]:
        """The collectives in which ranks wait, the first one first, and who waits there."""
        found: dict[tuple[str, int], tuple[Waiting, list[int]]] = {}
        for rank in self._alive:
            if waiting := rank.waits_in:
                found.setdefault((waiting.group, waiting.number), (waiting, []))[1].append(rank.rank)
        return sorted(found.values(), key=lambda item: item[0].since)

    def _silent(self) -> list[RankState]:
        """Ranks that do not wait. One that holds the GIL cannot say how far it is."""
        return [rank for rank in self._alive if not rank.waits_in]

    def _late(self, late: Sequence[RankState]) -> Finding:
        verb = "hangs" if len(late) == 1 else "hang"
        waiters = [rank.rank for rank in self._alive if rank.waits_in]
        words = (
            f"{self._who(late)} {verb} before the first line of the cell{self._where(late)}{_wait_for(waiters, late)}"
        )
        return self._made("rank-not-begun", words, late)

    def _different(self, ranks: Sequence[int]) -> Finding:
        found = [self._state.ranks[rank] for rank in ranks]
        calls = [f"{self._who([rank])} {collective(rank.waiting)}{_at(rank.place)}" for rank in found if rank.waiting]
        return self._made("collective-mismatch", f"ranks call different collectives: {'; '.join(calls)}", found)

    def _held(self, waiting: Waiting, waiters: Sequence[int], held: Sequence[RankState]) -> Finding:
        ended = [rank for rank in held if rank.state in RANK_ENDS]
        if ended:
            words = f"{self._who(ended)} {_have(ended)} ended and never entered {collective(waiting)}"
            return self._made("ended-early", f"{words}{_wait_for(waiters, ended)}", ended)
        words = f"{self._who(held)} {_have(held)} not entered {collective(waiting)}"
        code = self._code(held) or "rank-stuck"
        return self._made(code, f"{words}{self._where(held)}{_wait_for(waiters, held)}", held)

    def _in_a_circle(self, waits: Sequence[tuple[Waiting, list[int]]]) -> Finding:
        """Each rank that is awaited waits itself, in another group."""
        if len(waits) == 1:
            waiting, waiters = waits[0]
            words = f"{in_words(waiters)} {_wait(waiters)} in {collective(waiting)}, and no rank is known to be missing"
            return self._made("watchdog-same-op", words, ())
        parts = []
        for waiting, waiters in sorted(waits, key=lambda item: item[1]):
            ranks = [self._state.ranks[rank] for rank in waiters]
            whom = in_words(self._state.awaited(waiting))
            of = f"{collective(waiting)} of group {waiting.group}" + (f" for {whom}" if whom else "")
            parts.append(f"{self._who(ranks)} {_wait(waiters)} in {of}{_at(ranks[0].place)}")
        first = [self._state.ranks[rank] for rank in waits[0][1]]
        return self._made("groups-deadlocked", f"ranks wait for each other: {'; '.join(parts)}", first)

    def _all_idle(self) -> Finding:
        code = self._code(self._alive)
        words = f"{self._who(self._alive)} {_make(self._alive)} no progress{self._where(self._alive)}"
        return self._made(code or "no-progress", words, self._alive)

    def _code(self, ranks: Iterable[RankState]) -> str | None:
        """What the first of them that tells waits for, by its line."""
        for rank in ranks:
            what, source = places.parts(rank.place)[2], self._source(rank.place)
            if what.startswith("DataLoader"):
                return "dataloader-stuck"
            if what == "destroy_process_group":
                return "destroy-stuck"
            if what in _RENDEZVOUS or _STORE.search(source):
                return "store-stuck"
        return None

    def _source(self, place: str) -> str:
        line = places.line(self._spec, place)
        return line.text if line else ""

    def _made(self, code: str, words: str, ranks: Sequence[RankState]) -> Finding:
        kind = BY_CODE[code]
        culprit = ranks[0] if len(ranks) == 1 else None
        evidence = filter(None, (places.line(self._spec, rank.place) for rank in ranks[:PLACES]))
        number, host = (culprit.rank, culprit.host or None) if culprit else (None, None)
        remedy = kind.remedy.replace("JOB", self._state.job)
        return Finding(code, "warning", number, host, words, kind.cause, remedy, tuple(dict.fromkeys(evidence)))

    def _who(self, ranks: Sequence[RankState]) -> str:
        """``rank 3 (node2, GPU 1)``, ``ranks 0-2``."""
        if len(ranks) != 1:
            return in_words([rank.rank for rank in ranks])
        [rank] = ranks
        return self._plan.called(rank.rank, rank.host if len(self._plan.nodes) > 1 else "")

    def _where(self, ranks: Sequence[RankState]) -> str:
        """``; it is at Cell In[12], line 14, in DataLoader``. Empty if no rank has answered."""
        places: dict[str, list[RankState]] = {}
        for rank in ranks:
            places.setdefault(rank.place, []).append(rank)
        if not any(places):
            return f"; {_it(ranks)} not answer" if ranks else ""
        parts = []
        for place, there in list(places.items())[:PLACES]:
            who = "it" if len(ranks) == 1 else "they" if len(places) == 1 else in_words([rank.rank for rank in there])
            verb = "is" if len(there) == 1 else "are"
            busy = " at work" if all(rank.rank in self._at_work for rank in there) else ""
            source = self._source(place)
            shown = f" ({source[:60]})" if source and _STORE.search(source) else ""
            parts.append(f"{who} {verb}{busy} at {place}{shown}" if place else f"{who} gave no answer")
        return "; " + ", ".join(parts)


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def _wait_for(waiters: Sequence[int], whom: Sequence[RankState]) -> str:
    """``; 7 ranks wait for it``."""
    if not waiters:
        return ""
    who = in_words(waiters) if len(waiters) == 1 else f"{len(waiters)} ranks"
    return f"; {who} {_wait(waiters)} for {'it' if len(whom) == 1 else 'them'}"


def _wait(waiters: Sequence[int]) -> str:
    return "waits" if len(waiters) == 1 else "wait"


def _have(ranks: Sequence[RankState]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _make(ranks: Sequence[RankState]) -> str:
    return "makes" if len(ranks) == 1 else "make"


def _it(ranks: Sequence[RankState]) -> str:
    return "it does" if len(ranks) == 1 else "they do"
