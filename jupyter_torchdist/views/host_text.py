"""Hosts in words: what each one has, and what was removed there."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.plan import Inventory, Kept
from .wording import count, size, table

HEADER = ("HOST", "GPUS", "CORES", "MEMORY", "DISK", "KEPT", "CLOCK", "TORCH", "PYTHON", "STATE")
CLOCK_SECONDS = 0.5
"""A smaller difference of clocks is not shown: it includes the way of the answer."""


def hosts_table(rows: Sequence[Sequence[str]]) -> str:
    """One row a host. Memory and disk are what is free."""
    return table(HEADER, rows)


def row(host: Inventory, clock: float, jobs: Sequence[str], kept: Kept) -> tuple[str, ...]:
    """A host that answered. ``clock``: how many seconds its clock is ahead of ours."""
    return (
        host.host,
        _gpus(host),
        str(host.cores),
        size(host.memory),
        size(host.disk),
        _kept(kept),
        "same" if abs(clock) < CLOCK_SECONDS else f"{clock:+.1f} s",
        host.torch,
        f"{host.python} {host.reach.python}",
        f"runs {', '.join(jobs)}" if jobs else "ready",
    )


def _kept(kept: Kept) -> str:
    """``1.2 GB, 2 environments 300 MB``."""
    words = [size(kept.data)] if kept.data else []
    if kept.environments:
        words.append(f"{count(kept.environments, 'environment')} {size(kept.environments_size)}")
    return ", ".join(words) or "nothing"


def failed_row(host: str, message: str, hint: str) -> tuple[str, ...]:
    """A host that did not answer, and why."""
    said = why(host, message)
    return (host, *["-"] * (len(HEADER) - 2), f"{said} → {hint}" if hint else said)


def why(host: str, message: str) -> str:
    """The message without the host's name in front."""
    return message.removeprefix(host).lstrip(": ")


def _gpus(host: Inventory) -> str:
    """``6 of 8 free, H200``."""
    if not host.gpus:
        return "none"
    free = sum(gpu.idle for gpu in host.gpus)
    names = ", ".join(dict.fromkeys(gpu.name for gpu in host.gpus))
    return f"{free} of {len(host.gpus)} free, {names}"


def removed(host: str, warm: int, paths: Sequence[str], kept: Sequence[str]) -> str:
    """What was ended and removed on a host, and what stays."""
    lines = [f"{host}: ended {count(warm, 'warm process', 'warm processes')}, removed"]
    lines += [f"  {path}" for path in paths]
    lines += [f"  kept: {path}" for path in kept]
    return "\n".join(lines)
