"""Dumps of PyTorch's flight recorder: JSON or pickled, of NCCL and Gloo, as PyTorch writes them and as our ranks do.

The format is version 2 of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``. Differences between the backends:

* Gloo never says that a collective has ended, only that it is *retired*; NCCL retires one that timed out, too.
* Gloo's list of groups holds one entry, of the group that was made last. Our own dumps have the ranks of every group.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..protocol import codec
from ..protocol.errors import OptionError
from ..protocol.typed import Malformed, Record
from .tracebacks import is_library

VERSION = "2."
DEFAULT = "default_pg"
"""What PyTorch calls the group of all ranks."""

LARGEST = 5_000_000
"""Values in a pickled dump."""

DEPTH = 12
"""Levels of a pickled dump."""

DIMENSIONS, TENSORS = 64, 100_000
"""That are counted of one collective."""

DONE, FAILED = "done", "failed"
"""Of ``Dump.end``."""

_RANK = re.compile(r"(\d+)(?:\.[A-Za-z]+)*$")
_NATIVE = re.compile(r"\?\?|\.(?:cpp|cc|c|h|cu|so[.\d]*)$")
_TYPES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One collective that one rank has entered, the ``number``-th of its group."""

    operation: str
    number: int
    sent: int
    """Elements of this rank's input."""
    received: int
    """Elements of its output."""
    type: str
    """Of the first tensor: ``float32``; empty if there is none."""
    ended: bool
    created: float
    """Seconds since the epoch, on the rank's clock."""
    place: str
    """The user's line: ``Cell In[3], line 6``; empty if it is not known."""
    index: int
    """In the dump, from 1."""

    def __str__(self) -> str:
        what = f"{self.operation} #{self.number}"
        return f"{what} of {self.sent} {self.type}" if self.sent and self.type else what


@dataclass(frozen=True)
class Group:
    """What one rank did in one process group. ``members`` are ranks of the job; None if the dump does not tell."""

    name: str
    """Empty for the group of all ranks."""
    members: tuple[int, ...] | None
    calls: dict[int, Call]
    """By number: the last ones."""
    entered: int
    """Number of the last collective."""

    @property
    def waits_in(self) -> Call | None:
        """The first collective that has not ended."""
        return next((self.calls[number] for number in sorted(self.calls) if not self.calls[number].ended), None)


@dataclass(frozen=True)
class Dump:
    """One rank's recorder."""

    file: str
    rank: int
    node: str | None
    groups: dict[str, Group]
    """By backend and name, the same on every rank: ``gloo:0``."""
    time: float = 0.0
    """When it was written, in seconds since the epoch; 0 if unknown."""
    end: str = ""
    """``done`` or ``failed`` if the rank's code had ended."""
    complete: bool = False
    """Whether every rank of the job was to write one."""


def is_dump(data: bytes) -> bool:
    """Whether a file's content is meant to be a dump."""
    return data.startswith(b"\x80") or (data.lstrip()[:1] == b"{" and b'"pg_config"' in data)


def read(file: str, data: bytes, node: str | None = None) -> Dump:
    """The last dump in a file. Raises ``OptionError`` for what is not one."""
    try:
        value = _unpickled(data) if data.startswith(b"\x80") else _last(data)
        if isinstance(value, dict) and "recorders" in value:
            ours = _Ours.from_json(value)
            groups = {name: group for one in ours.recorders for name, group in _groups(one, ours).items()}
            return Dump(file, ours.rank, node, groups, ours.t, ours.end, complete=True)
        found = _RANK.search(file)
        if found is None:
            raise Malformed("its name does not end with the rank's number, as in nccl_trace_rank_3")
        return Dump(file, int(found[1]), node, _groups(_Recorder.from_json(value), None))
    except ValueError as error:
        hint = "give the dumps that PyTorch wrote, unchanged"
        raise OptionError(f"{file} is no dump of the flight recorder: {error}", hint) from error


# -- the formats


@dataclass(frozen=True)
class _Frame:
    filename: str
    line: int = 0


@dataclass(frozen=True)
class _Entry:
    process_group: tuple[str, str]
    collective_seq_id: int
    profiling_name: str
    pg_id: int = 0
    is_p2p: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    state: str = ""
    retired: bool = False
    time_created_ns: int = 0
    frames: tuple[_Frame, ...] = ()

    @property
    def backend(self) -> str:
        return self.profiling_name.partition(":")[0]

    @property
    def group(self) -> str:
        return f"{self.backend}:{self.process_group[0]}"


@dataclass(frozen=True)
class _Recorder(Record):
    version: str
    entries: tuple[_Entry, ...] = ()
    pg_status: dict[str, dict[str, Any]] = field(default_factory=dict)
    pg_config: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.version.startswith(VERSION):
            raise Malformed(f"its version is {self.version[:20]}, and {VERSION}x is read")

    def status_of(self, entry: _Entry) -> dict[str, Any]:
        """Of the entry's group."""
        return self.pg_status.get(str(entry.pg_id), {})


@dataclass(frozen=True)
class _Ours(Record):
    """What ``ranks/streams/recording.py`` writes."""

    rank: int
    recorders: tuple[_Recorder, ...]
    t: float = 0.0
    end: str = ""
    place: str = ""
    """Where the rank was."""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)


def _last(data: bytes) -> Any:
    """A file of PyTorch is one value; of ours, a line is, and the last whole line counts."""
    if not data.lstrip().startswith(b'{"rank"'):
        return codec.loads(data)
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")
    return codec.loads(next((line for line in reversed(lines) if line.strip()), b""))


class _Plain(pickle.Unpickler):
    """Reads values alone: a pickle that names any class or function, and so could run code, is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise Malformed(f"it names {module[:60]}.{name[:60]}; a dump holds plain values only")

    def persistent_load(self, number: Any) -> Any:
        raise Malformed("it refers to objects outside; a dump holds plain values only")


def _unpickled(data: bytes) -> Any:
    try:
        value = _Plain(io.BytesIO(data)).load()
    except Malformed:
        raise
    except Exception as error:  # damaged pickles raise anything
        raise Malformed(f"the pickle is damaged: {error}") from error
    return _as_json(value, iter(range(LARGEST)))


def _as_json(value: Any, left: Iterator[int], depth: int = 0) -> Any:
    """With lists for tuples and text for keys. A few bytes of a pickle may stand for endless values."""
    if next(left, None) is None or depth > DEPTH:
        raise Malformed("it holds more than any dump does")
    if isinstance(value, dict):
        return {str(key): _as_json(item, left, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item, left, depth + 1) for item in value]
    return value


# -- what they say


def _groups(recorder: _Recorder, ours: _Ours | None) -> dict[str, Group]:
    entries = [(index, entry) for index, entry in enumerate(recorder.entries, 1) if not entry.is_p2p]
    failed = max((index for index, _ in entries), default=0) if ours is not None and ours.end == FAILED else 0
    found: dict[str, dict[int, Call]] = {}
    first: dict[str, _Entry] = {}
    for index, entry in entries:
        first.setdefault(entry.group, entry)
        call = _call(index, entry, failed, ours.place if ours is not None else "")
        found.setdefault(entry.group, {}).setdefault(call.number, call)  # operations launched as one have one number
    return {
        name: Group(
            _label(*first[name].process_group),
            _members(first[name], recorder, ours),
            calls,
            max((*calls, _number(recorder.status_of(first[name]).get("last_enqueued_collective")))),
        )
        for name, calls in found.items()
    }


def _label(name: str, description: str) -> str:
    if description == DEFAULT:
        return ""
    return description if description not in ("", "undefined") else name


def _call(index: int, entry: _Entry, failed: int, place: str) -> Call:
    """Gloo retires the collective in which a rank fails: the last one of a rank that failed has not ended.

    ``place`` is where the rank was at the time of the dump.
    """
    retired = entry.retired and entry.backend != "nccl" and index != failed
    ended = entry.state == "completed" or retired
    types = (*entry.input_dtypes, *entry.output_dtypes)
    own = (one for one in entry.frames if not _NATIVE.search(one.filename) and not is_library(one.filename))
    frame = next(own, None)
    return Call(
        entry.profiling_name.partition(":")[2] or entry.profiling_name,
        entry.collective_seq_id,
        _elements(entry.input_sizes),
        _elements(entry.output_sizes),
        _TYPES.get(types[0], types[0]) if types else "",
        ended,
        entry.time_created_ns / 1e9,
        f"{frame.filename}, line {frame.line}" if frame else "" if ended else place,
        index,
    )


def _elements(sizes: tuple[tuple[int, ...], ...]) -> int:
    return min(sum(math.prod(shape[:DIMENSIONS]) for shape in sizes[:TENSORS]), 2**63)


def _members(entry: _Entry, recorder: _Recorder, ours: _Ours | None) -> tuple[int, ...] | None:
    name = entry.process_group[0]
    if ours is not None:
        return ours.groups.get(name)
    told = recorder.pg_config.get(name, {})
    ranks = tuple(int(digits) for digits in re.findall(r"\d{1,9}", str(told.get("ranks", ""))[:1_000_000]))
    return ranks if str(told.get("name", "")) == name and ranks else None


def _number(value: Any) -> int:
    return int(value) if re.fullmatch(r"\d{1,18}", str(value)) else 0
