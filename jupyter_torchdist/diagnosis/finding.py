"""What a diagnosis says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["fault", "warning", "info"]


@dataclass(frozen=True)
class Evidence:
    """One line of a log. ``number`` counts from 1."""

    file: str
    number: int
    text: str


@dataclass(frozen=True)
class Finding:
    """A cause. ``sentence`` is what a person reads first; ``rank`` and ``node`` are None where no log tells."""

    code: str
    severity: Severity
    rank: int | None
    node: str | None
    sentence: str
    cause: str
    remedy: str
    evidence: tuple[Evidence, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, for ``--json``."""
        return asdict(self)
