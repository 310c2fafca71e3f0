"""What a rank takes of its node: processor, memory, GPU. The agent writes it, and every view reads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

_MOST = 2**53
"""JavaScript holds whole numbers up to here."""


@dataclass(frozen=True)
class Gauges:
    """What one rank took when its node's agent last looked. Sizes in bytes; null is not known."""

    cpu: int | None = None
    """Of the rank and its children, in per cent of one core."""
    memory: int | None = None
    """Of the rank and its children, without what it has in common with other ranks: files that are mapped."""
    memory_peak: int | None = None
    """The most of the looks so far."""
    gpu: int | None = None
    """Per cent of the time in which its GPU computed, for whomever."""
    gpu_memory: int | None = None
    gpu_memory_peak: int | None = None
    gpu_total: int | None = None
    gpu_shared: bool = False
    """``gpu_memory`` is that of all processes on the GPU: NVML does not tell which of it is the rank's."""

    def after(self, earlier: Gauges | None) -> Gauges:
        """With the highest of what was seen. What the whole GPU held says nothing of a rank that is told by itself."""
        if earlier is None:
            earlier = Gauges(gpu_shared=self.gpu_shared)
        shared = earlier.gpu_shared if self.gpu_memory is None else self.gpu_shared
        return replace(
            self,
            memory_peak=_higher(self.memory, earlier.memory_peak),
            gpu_memory_peak=_higher(self.gpu_memory, earlier.gpu_memory_peak if shared == earlier.gpu_shared else None),
            gpu_shared=shared,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> Gauges:
        """Nothing is known of what is malformed: user code can write into the job's directory."""
        if not isinstance(value, dict):
            return Gauges()
        numbers = {field.name: _whole(value.get(field.name)) for field in fields(Gauges) if field.name != "gpu_shared"}
        return Gauges(**numbers, gpu_shared=value.get("gpu_shared") is True)


def rounded(value: float, digits: int) -> int:
    """To so many digits, which is all that anyone reads: a value that hardly moves is told once."""
    whole = round(value)
    return round(whole, min(0, digits - len(str(abs(whole)))))


def _higher(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None
