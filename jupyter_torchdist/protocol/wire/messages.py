"""What a driver and an agent say to each other, with the types of what is said. ``type`` of a frame is the name.

A frame that is not of its declared types ends the channel that it came over, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import ChannelError
from ..events import ProfileRequest
from ..plan import Kept
from ..process import ProcessId
from ..trees import Tree
from ..typed import Malformed, Record
from .reports import Examined, Removed

Files = dict[str, str]
Offsets = dict[str, int]

# -- the driver says


@dataclass(frozen=True)
class Login(Record):
    """From the relay of a connection, before its driver speaks: the login's environment, interpreter and torch."""

    environ: dict[str, str]
    python: str
    release: str
    """Of the interpreter."""
    torch: str
    path: tuple[str, ...] = ()
    """The interpreter's ``sys.path``."""


@dataclass(frozen=True)
class SameLogin(Record):
    """Over a forwarded socket, which has no relay: the login is that of another connection, by its name."""

    login: str


@dataclass(frozen=True)
class Hello(Record):
    """Who drives. ``software``: the welcome's inventory is to have it."""

    process: ProcessId
    software: bool = False


@dataclass(frozen=True)
class Warm(Record):
    """Have a warm process ready for such jobs. Without an interpreter: for jobs of this login."""

    python: str = ""
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepare(Record):
    """Files of a job and digests of its blobs, for a node without the driver's disk.

    ``store``: the driver's directory of blobs, which the node may see. ``gpus``: UUIDs of those that the job needs.
    """

    job: str
    files: Files
    blobs: tuple[str, ...]
    store: str = ""
    gpus: tuple[str, ...] = ()
    origin: str = ""
    """Who drives the job from where, ``alice@laptop``."""
    driver: int = 1
    """As in ``Plan``."""
    trees: tuple[Tree, ...] = ()
    """Directories of ``--sync``: the answer names files that are missing, as if they were blobs."""
    cwd: str = ""  # of the ranks, where the node has it
    attempt: int = 1
    wheels: Files = field(default_factory=dict)
    """With ``--env-sync``: the digests of wheels, by file name. They come as blobs do."""
    secret: str = ""
    """By which other nodes fetch blobs from this one; empty: none of them does."""
    address: str = ""
    """At which they do; empty: the node chooses."""


@dataclass(frozen=True)
class BlobPiece(Record):
    """Bytes of a blob, from ``offset`` on."""

    digest: str
    offset: int
    last: bool


@dataclass(frozen=True)
class Fetch(Record):
    """Get blobs, with their whole sizes, from another node, which has them or gets them, too."""

    job: str
    blobs: dict[str, int]
    address: str
    port: int
    secret: str


@dataclass(frozen=True)
class Start(Record):
    """Start the node's part. ``offsets`` are bytes of files that are here. The frame's body is ``Plan.text``."""

    job: str
    order: dict[str, Any]
    """Of ``Assignment``."""
    shared: bool
    offsets: Offsets = field(default_factory=dict)


@dataclass(frozen=True)
class Follow(Record):
    """Take up a job, and ship what its files have beyond the offsets."""

    job: str
    job_root: str
    node: str
    ranks: tuple[int, ...]
    attempt: int
    shared: bool
    offsets: Offsets
    origin: str = ""
    driver: int = 1
    """Both as in ``Prepare``."""
    blobs: tuple[str, ...] = ()
    """Digests of captured data that the driver's machine lacks."""


@dataclass(frozen=True)
class Signal(Record):
    """A signal for every rank."""

    job: str
    signal: int


@dataclass(frozen=True)
class OfJob(Record):
    """``stacks``: every rank writes its stacks and dumps its recorder; an event says where it is.

    ``forget``: the driver has everything. ``copy``: a machine without the job's directory wants to take the job over;
    ``job`` may also be its name, or the beginning of its id. ``build``: make the environment of the wheels, which are
    all there; the answer is ``built``.
    """

    job: str


@dataclass(frozen=True)
class Profile(Record):
    """Every rank profiles its next steps."""

    job: str
    request: ProfileRequest


@dataclass(frozen=True)
class End(Record):
    """SIGTERM, after ``grace`` seconds SIGKILL; nothing is left."""

    job: str
    grace: float
    attempt: int = 1


@dataclass(frozen=True)
class Steward(Record):
    """Where the first node's agent hears the other agents of the job, and the secret by which they know each other.

    It tells the driver, which tells the other agents.
    """

    job: str
    attempt: int
    address: str
    port: int
    secret: str


@dataclass(frozen=True)
class Ping(Record):
    """``ping``: is somebody there? ``t`` comes back in a ``pong``, with the node's clock in seconds since the epoch."""

    t: float = 0.0
    clock: float = 0.0


@dataclass(frozen=True)
class Nothing(Record):
    """``stop_warm``: end warm processes and the agent, once no job runs."""


DRIVER_SAYS: dict[str, type[Record]] = {
    "login": Login,
    "same_login": SameLogin,
    "hello": Hello,
    "warm": Warm,
    "prepare": Prepare,
    "blob": BlobPiece,
    "fetch": Fetch,
    "start": Start,
    "follow": Follow,
    "signal": Signal,
    "stacks": OfJob,
    "profile": Profile,
    "end": End,
    "forget": OfJob,
    "steward": Steward,
    "copy": OfJob,
    "build": OfJob,
    "ping": Ping,
    "stop_warm": Nothing,
}

# -- the agent says


@dataclass(frozen=True)
class Welcome(Record):
    """Who the agent is, what its node has, which warm processes wait, and which jobs run."""

    process: ProcessId
    inventory: dict[str, Any]
    warm: tuple[dict[str, Any], ...]
    jobs: tuple[str, ...]
    addresses: tuple[str, ...] = ()
    """Addresses of the node, that of this connection first; none over a local socket."""
    interpreter: str = ""
    """The Python that was found for this connection."""
    login: str = ""
    """The name of this connection's login, for other connections."""
    socket: str = ""
    """Path of the agent's socket on the node."""
    clock: float = 0.0
    """The node's time, in seconds since the epoch."""
    kept: Kept = field(default_factory=Kept)


@dataclass(frozen=True)
class Missing(Record):
    """What the node lacks. ``built``: the environment of the job's wheels is there."""

    job: str
    blobs: tuple[str, ...]
    built: bool = False
    have: Offsets = field(default_factory=dict)
    """Of those of which a part is here, how many bytes."""
    place: tuple[str, int] | None = None
    """Address and port at which other nodes fetch blobs; None: they cannot."""


@dataclass(frozen=True)
class Fetched(Record):
    """So many more bytes have come from the other node. ``left``: what does not come, with the bytes that are here."""

    job: str
    size: int
    left: Offsets = field(default_factory=dict)


@dataclass(frozen=True)
class Stored(Record):
    """A blob is there; ``right``: its digest is what it was called."""

    digest: str
    right: bool


@dataclass(frozen=True)
class Built(Record):
    """The environment of the job's wheels is there."""

    job: str


@dataclass(frozen=True)
class Grown(Record):
    """A file that both see has grown."""

    job: str
    file: str
    size: int = 0


@dataclass(frozen=True)
class FileBytes(Record):
    """What is new in a file of the node's own, from ``offset`` on."""

    job: str
    file: str
    offset: int


@dataclass(frozen=True)
class Whole(Record):
    """The latest version of a file that is replaced, not appended to (the gauges)."""

    job: str
    file: str


@dataclass(frozen=True)
class Ended(Record):
    """Nothing of the job is alive on the node, and everything was shipped."""

    job: str
    attempt: int


@dataclass(frozen=True)
class Quiet(Record):
    """Of each rank that is alive: how many seconds ago it made progress, and made progress or worked."""

    job: str
    attempt: int
    ranks: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class RefusedJob(Record):
    """The node cannot do what it was told (a full disk, no process to be had, a GPU that another job has)."""

    job: str
    reason: str


@dataclass(frozen=True)
class Copied(Record):
    """What a driver of another machine needs of a job that the node has a part of."""

    jobs: tuple[str, ...]
    """The jobs that were meant. The rest is there if it is one."""
    files: Files = field(default_factory=dict)
    node: str = ""
    """Which of the plan's nodes this is."""
    attempt: int = 1
    driver: int = 1
    """The number of the machine that drives the job now."""


@dataclass(frozen=True)
class Replaced(Record):
    """The job is driven from elsewhere now: ``by`` is who and where, ``alice@laptop``."""

    job: str
    by: str


AGENT_SAYS: dict[str, type[Record]] = {
    "welcome": Welcome,
    "removed": Removed,
    "examined": Examined,
    "missing": Missing,
    "fetched": Fetched,
    "stored": Stored,
    "built": Built,
    "grown": Grown,
    "bytes": FileBytes,
    "whole": Whole,
    "ended": Ended,
    "quiet": Quiet,
    "refused": RefusedJob,
    "steward": Steward,
    "copied": Copied,
    "replaced": Replaced,
    "pong": Ping,
}


def understood(says: dict[str, type[Record]], message: dict[str, Any]) -> Record:
    """The frame as a value of its declared type. Raises ``ChannelError`` for any other."""
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in says:
        raise ChannelError(f"an unknown message {str(kind)[:60]!r}")
    try:
        return says[kind].from_json(message)
    except Malformed as error:
        raise ChannelError(f"a message {kind!r} with wrong data: {error}") from error
