"""The resources that a rank uses on its node: CPU, memory, GPU. The agent writes them, and every view reads them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

PLACE = 200
"""Characters of a place at most."""

POWER_LIMIT = "its power limit"
"""Of ``Gauges.gpu_slowed``: a GPU at work is often at it."""

_WORDS = {"place": PLACE, "gpu_slowed": 80}
"""Fields of ``Gauges`` that are words, with their characters at most."""

NETWORK = "network"
"""Beside the ranks of a node's file: the ``Traffic`` of its host by interface."""

_NAME, _INTERFACES = 40, 64
"""Characters of an interface's name at most, and interfaces of a host."""

_MOST = 2**53
"""The limit of exact integers in JavaScript."""


@dataclass(frozen=True)
class Gauges:
    """The resources of one rank at its agent's last measurement. Sizes in bytes; null means unknown."""

    cpu: int | None = None
    """CPU time of the rank and its children, in per cent of one core."""
    memory: int | None = None
    """Memory of the rank and its children, without mapped files, which ranks share."""
    memory_peak: int | None = None
    """The largest measurement so far."""
    gpu: int | None = None
    """Per cent of the time in which its GPU was computing, for any process."""
    gpu_memory: int | None = None
    gpu_memory_peak: int | None = None
    gpu_total: int | None = None
    gpu_shared: bool = False
    """``gpu_memory`` is the memory of all processes on the GPU, because NVML does not report the rank's part."""
    gpu_clock: int | None = None
    """MHz of its multiprocessors."""
    gpu_temperature: int | None = None
    """Degrees Celsius."""
    gpu_slowed: str = ""
    """Why its clock is lower than it could be: ``heat, its power limit``."""
    gpu_errors: int | None = None
    """Errors of its memory that could not be corrected, since the rank was looked at first."""
    gpu_xid: int | None = None
    """The last error (Xid) that the driver has reported of it."""
    nvlink_received: int | None = None
    """Bytes per second over all its NVLinks."""
    nvlink_sent: int | None = None
    nvlink_errors: int | None = None
    """How often its NVLinks sent again or started again, since the rank was looked at first."""
    looks: int | None = None
    """How often its main thread was looked at during the last minute; the next three are per cent of that."""
    waits: int | None = None
    """It waited in a collective; unknown with NCCL, whose collectives run on the GPU."""
    loads: int | None = None
    """It waited for a ``DataLoader``, or was in its code."""
    network: int | None = None
    """It waited for a socket."""
    place: str = ""
    """The user's line at which it was most often, when it did not wait: ``Cell In[3], line 6``."""

    def after(self, earlier: Gauges | None) -> Gauges:
        """With the peaks so far. A GPU peak of all processes is dropped when the rank's own memory is reported."""
        if earlier is None:
            earlier = Gauges(gpu_shared=self.gpu_shared)
        shared = earlier.gpu_shared if self.gpu_memory is None else self.gpu_shared
        return replace(
            self,
            memory_peak=_higher(self.memory, earlier.memory_peak),
            gpu_memory_peak=_higher(self.gpu_memory, earlier.gpu_memory_peak if shared == earlier.gpu_shared else None),
            gpu_shared=shared,
            gpu_xid=self.gpu_xid if self.gpu_xid is not None else earlier.gpu_xid,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> Gauges:
        """Malformed values count as unknown, because user code can write into the job's directory."""
        if not isinstance(value, dict):
            return Gauges()
        names = {field.name for field in fields(Gauges)} - {"gpu_shared"}
        numbers = {name: _whole(value.get(name)) for name in names - _WORDS.keys()}
        words = {name: told[:most] for name, most in _WORDS.items() if isinstance(told := value.get(name), str)}
        return Gauges(**numbers, **words, gpu_shared=value.get("gpu_shared") is True)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Traffic:
    """What goes over a network interface of a host, for any process. Bytes per second."""

    received: int
    sent: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def of_host(value: Any) -> dict[str, Traffic]:
        """By interface. Malformed ones are left out, because user code can write into the job's directory."""
        found = {}
        for name, told in value.items() if isinstance(value, dict) else ():
            rates = [_whole(told.get(way)) for way in ("received", "sent")] if isinstance(told, dict) else [None]
            if None not in rates and len(name) <= _NAME:
                found[name] = Traffic(*(rate or 0 for rate in rates))
        return dict(list(found.items())[:_INTERFACES])


def rounded(value: float, digits: int) -> int:
    """``value`` rounded to ``digits`` significant digits, so that a small change is not reported again."""
    whole = round(value)
    return round(whole, min(0, digits - len(str(abs(whole)))))


def _higher(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None
