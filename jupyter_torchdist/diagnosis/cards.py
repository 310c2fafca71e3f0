"""GPUs of a job that fail or are slowed down, as the driver says of them while ranks use them (``node/gauges.py``)."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.events import Finding
from ..protocol.gauges import POWER_LIMIT, Gauges
from ..protocol.plan import Plan
from ..protocol.state import JobState

MOST = 3


def broken(state: JobState, plan: Plan, gauges: Mapping[int, Gauges]) -> list[Finding]:
    """Of ranks whose GPU has reported an error that the catalogue knows, in order of rank; at most ``MOST``."""
    told = [(rank, one) for rank, one in sorted(gauges.items()) if one.gpu_xid is not None or one.gpu_errors]
    found = [finding for rank, one in told if (finding := _broken(rank, one, state, plan)) is not None]
    return found[:MOST]


def slowed(state: JobState, plan: Plan, gauges: Mapping[int, Gauges]) -> list[Finding]:
    """Of ranks whose GPU is too hot, or gets too little power, now."""
    from .catalogue import BY_CODE  # most jobs need none of it

    found = []
    kind = BY_CODE["gpu-slowed"]
    for rank, one in sorted(gauges.items()):
        reasons = [reason for reason in one.gpu_slowed.split(", ") if reason and reason != POWER_LIMIT]
        if reasons and state.state == "running":
            clock = "" if one.gpu_clock is None else f": {one.gpu_clock} MHz"
            heat = "" if one.gpu_temperature is None else f" at {one.gpu_temperature} °C"
            words = {"who": _called(rank, state, plan), "reason": f"{', '.join(reasons)}{clock}{heat}"}
            host = _host(rank, state)
            found.append(Finding(kind.code, kind.severity, rank, host, kind.said(words), kind.cause, kind.remedy, ()))
    return found[:MOST]


def _broken(rank: int, told: Gauges, state: JobState, plan: Plan) -> Finding | None:
    from .catalogue import KINDS

    line = "uncorrectable ECC error" if told.gpu_xid is None else f"Xid (PCI:0): {told.gpu_xid}, "
    for kind in KINDS:
        if match := next((match for sign in kind.patterns if (match := sign.search(line))), None):
            words = kind.said({"who": _called(rank, state, plan), **match.groupdict(default="")})
            xid = "" if told.gpu_xid is None else f" Its driver reports Xid {told.gpu_xid}."
            sentence = f"{words}{xid}"
            return Finding(kind.code, kind.severity, rank, _host(rank, state), sentence, kind.cause, kind.remedy, ())
    return None


def _called(rank: int, state: JobState, plan: Plan) -> str:
    return plan.called(rank, (_host(rank, state) or "") if len(plan.nodes) > 1 else "")


def _host(rank: int, state: JobState) -> str | None:
    return state.ranks[rank].host or None if rank in state.ranks else None
