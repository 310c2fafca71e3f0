"""What a running job's ranks show by themselves, without a failure: broken or slow GPUs, ranks that hold up others."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.events import Finding
from ..protocol.gauges import Gauges
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..protocol.state import JobState
from . import cards, stragglers


def of(state: JobState, plan: Plan, spec: JobSpec, gauges: Mapping[int, Gauges]) -> list[Finding]:
    """The worst first; empty for a job that has ended."""
    if state.final or not gauges:
        return []
    gpus = {rank: told for rank, told in gauges.items() if told.gpu_total is not None or told.gpu_xid is not None}
    broken = cards.broken(state, plan, gpus)
    slowed = cards.slowed(state, plan, gpus) if any(told.gpu_slowed for told in gpus.values()) else []
    return [*broken, *stragglers.of(state, plan, spec, gauges), *slowed]
