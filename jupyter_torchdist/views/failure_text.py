"""Texts about failures, and about values that did not come back."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.errors import TorchDistError
from ..protocol.events import ErrorRecord
from ..protocol.state import JobState, RankState
from .wording import count, first_few


def failure(state: JobState, failed: Sequence[RankState] | None = None) -> str:
    """The first failure in full, with one line about the other failures."""
    failed = state.failures() if failed is None else failed
    if not failed:
        return state.reason
    first = failed[0]
    text = error_text(first.error) if first.error else first.why or first.state
    where = f"rank {first.rank}{f' on {first.host}' if first.host else ''}"
    return "\n".join(filter(None, [where, text, others(state, first.rank), *because(state)])).rstrip()


def because(state: JobState) -> list[str]:
    """For each cause that the failure itself does not say: what happened, and what to do."""
    return [finding.advice for finding in state.findings]


def others(state: JobState, first: int) -> str:
    """What happened to the ranks other than ``first``, in one line; empty if there is nothing to say."""
    rest = [rank for number, rank in sorted(state.ranks.items()) if number != first]
    own = [rank for rank in rest if rank.error]
    lines = []
    if own:
        kinds = first_few((f"rank {rank.rank} {rank.error.type}" for rank in own if rank.error), 8)
        lines.append(f"{count(len(own), 'other rank')} failed too: {kinds}")
    stopped = sum(not rank.error and rank.state != "done" for rank in rest)
    if stopped:
        lines.append(f"{count(stopped, 'other rank')} {'was' if stopped == 1 else 'were'} stopped because of this")
    return "; ".join([*lines, *left_early(state)])


def left_early(state: JobState) -> list[str]:
    """One sentence for each rank that ended its process early without an error, for example by ``os._exit(0)``."""
    return [
        f"rank {number} {rank.why}" for number, rank in sorted(state.ranks.items()) if rank.state == "done" and rank.why
    ]


def error_text(record: ErrorRecord) -> str:
    """The traceback as the rank recorded it, or the title if there is none."""
    return record.text.rstrip() or record.title


def refusal(error: TorchDistError) -> str:
    """One of our own errors: its message and its hint."""
    return f"{type(error).__name__}: {error}"


def lost_lines(state: JobState) -> list[str]:
    """One sentence for each rank that lost output because the disk was full."""
    ranks = [rank for _, rank in sorted(state.ranks.items()) if rank.dropped]
    return [f"rank {rank.rank}: the disk was full, {count(rank.dropped, 'printed line')} lost" for rank in ranks]


def left_behind(state: JobState, rank: int = 0) -> str:
    """The names that did not come back, each with its reason, in one line; empty if all came back."""
    left = state.ranks[rank].left if rank in state.ranks else ()
    return "; ".join(f"{name}: {reason}" for name, reason in left)
