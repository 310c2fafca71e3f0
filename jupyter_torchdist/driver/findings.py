"""Why a job has failed, where the failure itself does not say it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..protocol.errors import OptionError
from ..protocol.events import Finding
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..protocol.state import JobState
from ..store import gauges, logs

TOLD = ("user-exception", "rank-exited", "segfault", "remote-exit", "undetermined")
"""What the exception or the end of the first rank says itself."""

MOST = 3


def of(paths: JobPaths, plan: Plan, before: JobState, end: str, first_failure: int | None) -> list[dict[str, Any]]:
    """Of a job that ends as ``end``: at most ``MOST``, as JSON. None when a log cannot be read.

    Of a job that stalls: who holds up the others.
    """
    if before.stall is not None and end != "succeeded":
        return [before.stall.finding.to_json()]
    if end != "failed":
        return []
    from ..diagnosis import cards, ours  # most jobs end well, and need no catalogue

    state = replace(before, state=end, first_failure=first_failure)
    try:
        found = [*cards.broken(state, plan, gauges.read(paths)), *ours.diagnose(logs.evidence(paths), state)]
    except OptionError:
        return []
    untold: dict[tuple[str, int | None], Finding] = {}
    for finding in found:
        if finding.severity == "fault" and finding.code not in TOLD:
            untold.setdefault((finding.code, finding.rank), finding)
    return [finding.to_json() for finding in list(untold.values())[:MOST]]


def of_stall(plan: Plan, spec: JobSpec, state: JobState, at_work: Collection[int]) -> dict[str, Any]:
    """Who holds up the others, as JSON. ``at_work``: ranks that work."""
    from .stalled import StalledJob

    return StalledJob(plan, spec, state, at_work).finding().to_json()


def of_missed(host: str, by: str, seconds: float) -> dict[str, Any]:
    """That a host was lost while no driver was connected, as JSON: for ``seconds``, ``by`` heard nothing of it."""
    from ..diagnosis.catalogue import BY_CODE

    kind = BY_CODE["host-lost"]
    remedy = kind.remedy.replace("HOST", host)
    words = f"{by} heard nothing of {host} for {seconds:g} s, so the ranks were ended."
    return Finding(kind.code, kind.severity, None, host, words, kind.cause, remedy, ()).to_json()


def of_nodes(paths: JobPaths, plan: Plan, state: JobState, errors: Mapping[str, str]) -> str:
    """What agents and launchers said of their own failures, which are ``errors``, and, where not all ranks have
    started, the last lines of the launchers' logs.
    """
    words = list(dict.fromkeys(errors.values()))
    if len(state.ranks) < plan.world_size:
        words += [logs.last_words(paths.node(node.name).launcher_log) for node in plan.nodes]
    return "\n".join(filter(None, words))
