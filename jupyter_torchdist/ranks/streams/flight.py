"""Reads from torch's flight recorder the collectives of this rank, including those issued in C++ (DDP).

Reading the counters takes about 20 microseconds. Reading the entries takes about 20 milliseconds when the ring of
2,000 is full. Both work while a rank is blocked. The recorder is on unless ``TORCH_FR_BUFFER_SIZE`` is 0. It does not
record point-to-point operations, ``monitored_barrier`` and some backends.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed import distributed_c10d

from ...torch_private.collectives import ranks_of_groups, recorder_dump

NCCL, OTHERS = "_dump_nccl_trace", "_dump_fr_trace"
"""The recorder of NCCL, which exists if torch was built with NCCL, and the recorder of the other backends."""

_WIDTHS = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1,
    "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


class Group(NamedTuple):
    """A process group by its number in a recorder. The number is valid only in this process."""

    recorder: str
    number: int


class Counts(NamedTuple):
    """Numbers of collectives of one group since its creation."""

    entered: int
    ended: int

    @property
    def under_way(self) -> bool:
        return self.entered > self.ended


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has entered and that has not ended."""

    operation: str
    """Such as ``all_reduce``."""
    group: str
    """Backend and name, the same on every rank: ``gloo:0``."""
    number: int
    """Its number among the collectives of its group, from 1."""
    since: float
    """Seconds since the epoch."""
    size: int
    """Bytes of this rank's input; 0 if unknown."""


def counts() -> dict[Group, Counts]:
    """How many collectives of each group were entered and have ended."""
    found = {}
    for recorder in (NCCL, OTHERS):
        for number, status in _dump(recorder, entries=False).get("pg_status", {}).items():
            entered, ended = (max(int(status[f"last_{what}_collective"]), 0) for what in ("enqueued", "completed"))
            found[Group(recorder, int(number))] = Counts(entered, ended)
    return found


def names(recorder: str) -> dict[Group, str]:
    """The names of the groups in the recorder's entries, in the form of ``Collective.group``."""
    entries = _dump(recorder, entries=True).get("entries", ())
    return {Group(recorder, int(entry["pg_id"])): _group(entry) for entry in entries}


def oldest(group: Group) -> Collective | None:
    """The oldest unfinished collective of ``group``."""
    for entry in _dump(group.recorder, entries=True).get("entries", ()):
        if entry["pg_id"] == group.number and not (
            entry["retired"] or entry["is_p2p"] or entry["state"] == "completed"
        ):
            operation, number = entry["profiling_name"].partition(":")[2], int(entry["collective_seq_id"])
            return Collective(operation, _group(entry), number, entry["time_created_ns"] / 1e9, _size(entry))
    return None


def members(group: str) -> list[int] | None:
    """The job's ranks in a group named as ``Collective.group``. None: all ranks. Empty: the group is not known."""
    name = group.partition(":")[2]
    for process_group, ranks in ranks_of_groups():
        if process_group is not None and process_group.group_name == name:
            return None if len(ranks) == distributed_c10d.get_world_size() else sorted(ranks)
    return []


def groups() -> dict[str, list[int]]:
    """The job's ranks in each group, by the group's name in the recorder."""
    found = ranks_of_groups()
    return {group.group_name: sorted(ranks) for group, ranks in found if hasattr(group, "group_name")}


def dumps() -> list[dict[str, Any]]:
    """All that the recorders hold, but no stacks: torch would import its compiler for them, which takes seconds."""
    return [found for recorder in (NCCL, OTHERS) if (found := _dump(recorder, entries=True)).get("entries")]


def _dump(recorder: str, *, entries: bool) -> dict[str, Any]:
    dump = recorder_dump(recorder)
    if dump is None:
        return {}
    found: dict[str, Any] = pickle.loads(dump(entries, False, False))  # without stacks; data of this process
    return found


def _group(entry: dict[str, Any]) -> str:
    return f"{entry['profiling_name'].partition(':')[0]}:{entry['process_group'][0]}"


def _size(entry: dict[str, Any]) -> int:
    widths = [_WIDTHS.get(kind, 0) for kind in entry["input_dtypes"]]
    sizes = [math.prod(shape) * width for shape, width in zip(entry["input_sizes"], widths, strict=False)]
    return sum(sizes) if all(widths) else 0
