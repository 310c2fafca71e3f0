"""The supported releases of torch, and features that older supported releases lack."""

from __future__ import annotations

import re

from .errors import ResourceError
from .strategy import StrategyPlan

OLDEST = (2, 8)
"""``pyproject.toml`` says the same."""

Release = tuple[int, int]


def release_of(version: str) -> Release:
    """``2.11.0+cu130`` → (2, 11). Raises ``ValueError`` for a text that is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is no version of torch")
    return int(found[1]), int(found[2])


def check(version: str) -> None:
    """Raises ``ResourceError`` for a release that is too old."""
    if release_of(version) < OLDEST:
        raise ResourceError(
            f"torch {version} is too old: jupyter_torchdist needs torch {words(OLDEST)} or newer",
            f"pip install 'torch>={words(OLDEST)}'",
        )


def check_plan(version: str, strategy: StrategyPlan, *, binds: bool) -> None:
    """Raises ``ResourceError`` for a feature that this release lacks. ``binds``: ranks are pinned near their GPU."""
    if release_of(version) >= (2, 9):
        return
    replicated = strategy.degree("dp_replicate") > 1 and strategy.degree("dp_shard") == 1
    for asked, what, instead in (
        (replicated and strategy.degree("tp") > 1, f"--strategy {strategy.name}", "use --strategy fsdp+tp or tp"),
        (
            strategy.options.get("sharding_strategy") == "NO_SHARD",
            "-O sharding_strategy=NO_SHARD",
            "use --strategy ddp",
        ),
        (strategy.options.get("schedule") == "dualpipev", "-O schedule=dualpipev", "use -O schedule=zbv"),
        (binds, "--numa-binding", "leave it out"),
    ):
        if asked:
            raise ResourceError(
                f"{what} needs torch 2.9 or newer; this is torch {version}", f"pip install 'torch>=2.9', or {instead}"
            )


def words(release: Release) -> str:
    return ".".join(map(str, release))
