"""A profile as text: on what each rank spends a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..protocol.events import Profiled
from .wording import count, table

PARTS = ("compute", "communication", "overlap", "loading", "idle")
"""A step is compute and communication less their overlap, loading where it is alone, and idle."""

_HEADS = ("COMPUTE", "COMMUNICATION", "OVERLAP", "DATA LOADING", "IDLE")


class Part(Protocol):
    """One rank's part of a profile."""

    @property
    def rank(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def told(self) -> Profiled | None: ...
    @property
    def problem(self) -> str: ...


def profile(ranks: Sequence[Part], path: str) -> str:
    """The table, what went wrong, and where the timeline is."""
    done = [(one, one.told) for one in ranks if one.told and one.told.steps]
    parts = []
    if done:
        rows = [(one.name, str(told.steps), milliseconds(told.step), *_shares(told)) for one, told in done]
        parts.append(table(("RANK", "STEPS", "A STEP", *_HEADS), rows))
        units = sorted({told.unit for _, told in done})
        parts.append(f"a step ends with {' or '.join(units)}; idle: no operation, no collective, no DataLoader")
    parts += [f"{one.name}: {_fewer(one)}" for one in ranks if one.problem]
    if path:
        parts.append(
            f"timeline: {path}\n  open it at https://ui.perfetto.dev (*Open trace file*), or at chrome://tracing"
        )
    return "\n".join(parts)


def _fewer(one: Part) -> str:
    if one.told is None or not one.told.steps:
        return one.problem
    return f"{count(one.told.steps, 'step')} of {one.told.asked}: {one.problem}"


def _shares(told: Profiled) -> list[str]:
    values = [getattr(told, name) for name in PARTS]
    return [f"{milliseconds(value)} {100 * value / told.step:.0f} %" if told.step else "" for value in values]


def milliseconds(seconds: float) -> str:
    """``0.042 ms``, ``12.3 ms``, ``1234 ms``."""
    value = 1000 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
