"""Ranks for which the others wait again and again, from what each rank did during the last minute.

A rank that waits in a collective waits for another one. So the rank that holds up the others is the one that hardly
waits: its own waiting does not count as work, whatever it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.events import Finding
from ..protocol.gauges import Gauges
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..protocol.state import JobState
from . import places

LOOKS = 80
"""A rank is judged after so many looks at it: 20 seconds."""

MARGIN = 20
"""Per cent of the time: so much longer wait the others. Less is common between equal ranks."""

MOST = 3
"""Findings at most, of the ranks that hold up the others longest."""


def of(state: JobState, plan: Plan, spec: JobSpec, gauges: Mapping[int, Gauges]) -> list[Finding]:
    """One warning for each rank that holds up the others, while the job runs; empty where not all ranks are known."""
    ranks = [rank for rank in state.ranks.values() if rank.state == "running"]
    known = {rank.rank: gauges[rank.rank] for rank in ranks if rank.rank in gauges}
    known = {rank: told for rank, told in known.items() if (told.looks or 0) >= LOOKS}
    if state.state != "running" or len(known) < max(state.world_size, 2):
        return []
    late = _late(known)
    worst = sorted(late, key=lambda rank: -late[rank])[:MOST] if 2 * len(late) <= len(known) else []
    return [_finding(rank, late[rank], known, state, plan, spec) for rank in worst]


def _late(known: Mapping[int, Gauges]) -> dict[int, int]:
    """How much less each late rank waits than the others do; where that is unknown: how much longer it loads data."""
    from statistics import median  # takes milliseconds, and few jobs come this far

    waits = {rank: told.waits for rank, told in known.items() if told.waits is not None}
    if len(waits) == len(known):
        usual = median(sorted(waits.values())[len(waits) // 2 :])
        found = {rank: round(usual - share) for rank, share in waits.items()}
    else:
        loads = {rank: told.loads or 0 for rank, told in known.items()}
        usual = median(sorted(loads.values())[: (len(loads) + 1) // 2])
        found = {rank: round(share - usual) for rank, share in loads.items()}
    return {rank: share for rank, share in found.items() if share >= MARGIN}


def _finding(rank: int, share: int, known: Mapping[int, Gauges], state: JobState, plan: Plan, spec: JobSpec) -> Finding:
    from .catalogue import BY_CODE  # most jobs need none of it

    told = known[rank]
    code, does = _does(told)
    kind = BY_CODE[code]
    host = state.ranks[rank].host
    who = plan.called(rank, host if len(plan.nodes) > 1 else "")
    at = f" at {told.place}" if told.place else ""
    words = f"{who} holds up the others for {share} % of the time: it {does}{at}{_card(rank, known)}"
    line = places.line(spec, told.place)
    remedy = kind.remedy.replace("JOB", state.job)
    return Finding(code, kind.severity, rank, host or None, words, kind.cause, remedy, (line,) if line else ())


def _does(told: Gauges) -> tuple[str, str]:
    loads, network = told.loads or 0, told.network or 0
    works = 100 - loads - network - (told.waits or 0)
    if loads >= max(network, works):
        return "late-by-input", "waits for data"
    return ("late-by-network", "waits for the network") if network >= works else ("late-by-work", "works")


def _card(rank: int, known: Mapping[int, Gauges]) -> str:
    """``; its GPU has 1200 MHz at 88 °C, the others 1980 MHz``."""
    told = known[rank]
    if told.gpu_clock is None:
        return ""
    from statistics import median

    others = [one.gpu_clock for number, one in known.items() if number != rank and one.gpu_clock is not None]
    heat = "" if told.gpu_temperature is None else f" at {told.gpu_temperature} °C"
    beside = f", the others {round(median(others))} MHz" if others else ""
    slowed = f", slowed by {told.gpu_slowed}" if told.gpu_slowed else ""
    return f"; its GPU has {told.gpu_clock} MHz{heat}{beside}{slowed}"
