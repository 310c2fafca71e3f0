"""What torch's flight recorder knows of this rank's collectives, those that C++ issues (DDP's) among them.

Its counters cost some 20 microseconds, its entries some 20 milliseconds when its ring of 2,000 is full. Neither waits
for a rank that is blocked. The recorder is on unless ``TORCH_FR_BUFFER_SIZE`` is 0; point-to-point operations, a
``monitored_barrier`` and backends that do not record are unknown to it, and then so are they here.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed import distributed_c10d

from ..torch_private.collectives import ranks_of_groups, recorder_dump

NCCL, OTHERS = "_dump_nccl_trace", "_dump_fr_trace"
"""The recorder of NCCL, which is there where torch was built with it, and that of the other backends."""

_WIDTHS = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1,
    "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


class Group(NamedTuple):
    """A process group as a recorder numbers it, in this process alone."""

    recorder: str
    number: int


class Counts(NamedTuple):
    """Collectives of one group, from its first one on."""

    entered: int
    ended: int

    @property
    def under_way(self) -> bool:
        return self.entered > self.ended


@dataclass(frozen=True)
class Collective:
    """One that this rank has entered and that has not come to its end."""

    operation: str
    """Such as ``all_reduce``."""
    group: str
    """Backend and name, the same on every rank: ``gloo:0``."""
    number: int
    """Its place among the collectives of its group, from 1."""
    since: float
    """Seconds since the epoch."""
    size: int
    """Bytes that this rank puts in; 0 where that is not known."""


def counts() -> dict[Group, Counts]:
    """How many collectives of each group were entered and have ended."""
    found = {}
    for recorder in (NCCL, OTHERS):
        for number, status in _dump(recorder, entries=False).get("pg_status", {}).items():
            entered, ended = (max(int(status[f"last_{what}_collective"]), 0) for what in ("enqueued", "completed"))
            found[Group(recorder, int(number))] = Counts(entered, ended)
    return found


def names(recorder: str) -> dict[Group, str]:
    """The groups that the recorder's entries tell of, as ``Collective.group``."""
    entries = _dump(recorder, entries=True).get("entries", ())
    return {Group(recorder, int(entry["pg_id"])): _group(entry) for entry in entries}


def oldest(group: Group) -> Collective | None:
    """The first collective of ``group`` that is under way."""
    for entry in _dump(group.recorder, entries=True).get("entries", ()):
        if entry["pg_id"] == group.number and not (
            entry["retired"] or entry["is_p2p"] or entry["state"] == "completed"
        ):
            operation, number = entry["profiling_name"].partition(":")[2], int(entry["collective_seq_id"])
            return Collective(operation, _group(entry), number, entry["time_created_ns"] / 1e9, _size(entry))
    return None


def members(group: str) -> list[int] | None:
    """The job's ranks in a group named as ``Collective.group``; None is all of them, and none that it is not known."""
    name = group.partition(":")[2]
    for process_group, ranks in ranks_of_groups():
        if process_group is not None and process_group.group_name == name:
            return None if len(ranks) == distributed_c10d.get_world_size() else sorted(ranks)
    return []


def _dump(recorder: str, *, entries: bool) -> dict[str, Any]:
    dump = recorder_dump(recorder)
    if dump is None:
        return {}
    found: dict[str, Any] = pickle.loads(dump(entries, False, False))  # without stacks; this process's own
    return found


def _group(entry: dict[str, Any]) -> str:
    return f"{entry['profiling_name'].partition(':')[0]}:{entry['process_group'][0]}"


def _size(entry: dict[str, Any]) -> int:
    widths = [_WIDTHS.get(kind, 0) for kind in entry["input_dtypes"]]
    sizes = [math.prod(shape) * width for shape, width in zip(entry["input_sizes"], widths, strict=False)]
    return sum(sizes) if all(widths) else 0
