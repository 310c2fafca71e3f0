"""What a view of a job (in a browser) and its feed (in a server or a kernel) say to each other.

All of it is JSON in the form of ``codec``. The transport is a WebSocket or a widget's comm; the words are the same.
Times are seconds since the epoch, offsets and sizes are bytes. A *file* is named ``RANK.STREAM`` (``3.out``).
A *segment* is a piece of one file: ``{file, start, end, t, text}``: bytes ``start`` to ``end`` as text, whole lines
(a line longer than ``LINE_LIMIT`` comes in several); ``t`` is about when its last byte was written (null: unknown).

=========  ================================================================================================
feed says  with (each message has ``n``, counting from 1 on this connection)
=========  ================================================================================================
hello      version, now, job, spec, plan, receipt [Captured], notes [text], command (what one types to run it again
           in a shell), state (``JobState``, at ``state.seq``), sizes {file: bytes}; again when another attempt
           begins, which may have another plan
events     events [Event as in the journal]: what happened after ``state.seq``
lines      segments, in order of time; a ``start`` beyond the last ``end`` of that file: lines were passed over. A
           line whose end is not written yet comes after 0.25 s; that file's next segment goes on with it
status     effective (``JobState.state``, or ``orphaned``), progress {desc, n, total (null: unknown)} or null,
           ranks {rank: {step, last {curve: value}}}, curves {version, names, note}: what curves there are; ``version``
           grows with every new point; ``note`` is a sentence where curves are left out, else empty;
           gauges {rank: ``Gauges``}: what each rank takes, or took at last; not of ranks that nobody looked at;
           network {node: {interface: ``Traffic``}}: what goes over the interfaces that are busy, or went at last;
           samples that the job has trained with so far (null: unknown); tracked [{tracker, link, said}]: where the
           job is recorded; findings [Finding]: ranks for which the others wait again and again
answer     id, and what was asked for, or error (a sentence)
gone       reason: the files of the job were deleted; the last message
=========  ================================================================================================

=========  ================================================================================================
view says  with
=========  ================================================================================================
open       logs {file: end of what the view has} (empty: begin with the last ``FIRST_BYTES`` of each file)
ack        n: everything up to this message was shown; the feed waits when much is not
ask        id, what, and:
  older    at {file: offset}, files [file] (all when empty), limit: the ``limit`` bytes before ``at``, merged by time
           → segments, at (for the next question; a file that is at 0 has no more)
  around   file, offset, limit → segments of that file around ``offset``
  search   pattern, regex (bool), case (bool: heeds case), files, at {file: offset} or null → hits [{file, start
           (of the line), t, text}], at (null: everything was searched), searched; newest lines first, and never
           longer than about 0.15 s: one asks again from ``at``. An error where the expression is none, or where it
           takes too long on a single line
  curves   names ([]: all), mode (``rank0``, ``ranks``, ``band``: mean, minimum and maximum over the ranks),
           ranks ([]: all), x (``step``, ``time``), low, high (the range of x; null: all), width (points that the
           screen can show) → version, complete (bool: no point was merged with another),
           series [{name, rank (null for a band), x, y, low, high}], columns of doubles, in order of x; ``low`` and
           ``high`` are what was merged into a point, or the band; NaN is a gap
  display  rank, number: a display of which a line of that rank's output says ``[display 3: image/png]``
           → data {MIME type: value, as in a notebook}, metadata; after updates the newest
  communication  fresh (bool: the ranks of a running job write now what their recorders hold; ask again for it)
           → transports, calls, time (when the recorders were read; null: never), silent (ranks without a recording)
  cancel   kill (bool) → said (a sentence)
=========  ================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from .events import Finding
from .gauges import Gauges, Traffic
from .typed import Record

VERSION = 1

MIME_TYPE = "application/vnd.torchdist.job+json"
"""The MIME type of an output that is a view: ``{job, host}``; ``host`` has the job directory."""

LINE_LIMIT = 64 * 1024

FIRST_BYTES = 256 * 1024
"""How many bytes of each file's end a view gets first if it opens in the middle of a job."""

DISPLAY_LIMIT = 32 * 1024 * 1024
"""The largest size of one display in bytes, with all its MIME types."""

MESSAGE_BYTES = 256 * 1024
"""The largest number of bytes of text in one ``lines`` message."""

UNSEEN = 8
"""The largest number of messages without an ``ack``."""

RATE = 15.0
"""The largest number of messages a second that a feed sends without a question."""

BEAT = 5
"""Seconds between two empty messages of our WebSockets: they show that the connection is not broken."""


# Generated for TypeScript too (scripts/protocol_types.py): ``Annotated[Any, Record]`` is the JSON of a record.


class Segment(TypedDict):
    """A piece of one file: whole lines, or a part of a very long one."""

    file: str
    start: int
    end: int
    t: float | None
    text: str


class Hit(TypedDict):
    """A line that a search found, from its ``start``."""

    file: str
    start: int
    t: float | None
    text: str


class Series(TypedDict):
    """A curve of one rank, or of several (``rank`` is null) as a band."""

    name: str
    rank: int | None
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


class Progress(TypedDict):
    """A progress bar; ``total`` is null if it is unknown."""

    desc: str
    n: float
    total: float | None


class Wait(TypedDict):
    """Ranks that wait in the same collective."""

    ranks: list[int]
    collective: str
    """For example ``all_reduce #17``."""
    awaited: list[int]
    """The ranks for which it waits, as far as they are known."""
    since: float


class RankStatus(TypedDict):
    """The step of a rank, and the last value of each of its curves."""

    step: float | None
    last: dict[str, float]


class CurveNames(TypedDict):
    """The names of the curves."""

    version: int
    names: list[str]
    note: str


class Hello(TypedDict):
    """The first message. ``spec``, ``plan``, ``receipt`` and ``state`` are the JSON of the records."""

    version: int
    now: float
    job: str
    spec: Any
    plan: Any
    receipt: list[Any]
    notes: list[str]
    command: str
    state: Any
    sizes: dict[str, int]


class Events(TypedDict):
    """``Event`` as in the journal."""

    events: list[Any]


class Lines(TypedDict):
    """Segments in order of time."""

    segments: list[Segment]


class Tracked(TypedDict):
    """Where the job is recorded: ``link`` is a page, a directory, or empty; ``said`` is what does not go well."""

    tracker: str
    link: str
    said: str


class _Newer(TypedDict, total=False):
    gauges: dict[str, Annotated[Any, Gauges]]
    network: dict[str, dict[str, Annotated[Any, Traffic]]]
    samples: float | None
    tracked: list[Tracked]
    findings: list[Annotated[Any, Finding]]


class Status(_Newer):
    """Data that changes often. A server that is older than the page does not send the fields of ``_Newer``."""

    effective: str
    progress: Progress | None
    ranks: dict[str, RankStatus]
    curves: CurveNames


class Gone(TypedDict):
    """The last message."""

    reason: str


class Older(TypedDict):
    """The answer to ``older``."""

    segments: list[Segment]
    at: dict[str, int]


class Around(TypedDict):
    """The answer to ``around``."""

    segments: list[Segment]


class Found(TypedDict):
    """The answer to ``search``."""

    hits: list[Hit]
    at: dict[str, int] | None
    searched: int


class Drawn(TypedDict):
    """The answer to ``curves``."""

    version: int
    complete: bool
    series: list[Series]


class Shown(TypedDict):
    """The answer to ``display``: a MIME bundle, as in a notebook."""

    data: dict[str, Any]
    metadata: dict[str, Any]


class Transports(TypedDict):
    """What NCCL's log says of a node: how its ranks reach each other, and the other nodes: ``P2P/IPC``."""

    node: str
    inside: list[str]
    outside: list[str]


class Entered(TypedDict):
    """A collective, and when each of ``ranks`` entered it. ``missing``: ranks that have not."""

    name: str
    """For example ``all_reduce #17 of 4 float32``."""
    group: str
    """Empty for the group of all ranks."""
    ranks: list[int]
    at: Sequence[float]
    missing: list[int]
    ended: bool
    """On all of ``ranks``."""


class Communication(TypedDict):
    """The answer to ``communication``. ``calls`` are in the order of their first rank."""

    transports: list[Transports]
    calls: list[Entered]
    time: float | None
    silent: list[int]


class Said(TypedDict):
    """The answer to ``cancel``."""

    said: str


# -- the view says


@dataclass(frozen=True)
class Opened(Record):
    """``open``."""

    logs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Acked(Record):
    """``ack``."""

    n: int = 0


@dataclass(frozen=True)
class Asked(Record):
    """``ask``, whatever the question is."""

    id: int
    what: str = ""


@dataclass(frozen=True)
class OlderAsked(Record):
    """``older``."""

    at: dict[str, int]
    limit: int
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class AroundAsked(Record):
    """``around``."""

    file: str
    offset: int
    limit: int


@dataclass(frozen=True)
class SearchAsked(Record):
    """``search``."""

    pattern: str
    regex: bool = False
    case: bool = False
    files: tuple[str, ...] = ()
    at: dict[str, int] | None = None


@dataclass(frozen=True)
class CurvesAsked(Record):
    """``curves``."""

    mode: Literal["rank0", "ranks", "band"]
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    x: Literal["step", "time"] = "step"
    low: float | None = None
    high: float | None = None
    width: float = 1000.0


@dataclass(frozen=True)
class DisplayAsked(Record):
    """``display``."""

    rank: int
    number: int


@dataclass(frozen=True)
class CommunicationAsked(Record):
    """``communication``."""

    fresh: bool = False


@dataclass(frozen=True)
class CancelAsked(Record):
    """``cancel``."""

    kill: bool = False
