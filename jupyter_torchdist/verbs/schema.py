"""What ``--json`` prints: one object for each verb, or one a line. ``docs/programs.md`` is written from here.

A later release may add fields. It does not remove one, and does not change its meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..client.profiles import Profile
from ..client.stacks import RankStack
from ..diagnosis.hosts import Check
from ..protocol.bundle import Captured
from ..protocol.errors import TorchDistError
from ..protocol.events import ErrorRecord, Finding
from ..protocol.gauges import Gauges
from ..protocol.memory import MemoryPlan
from ..protocol.plan import Inventory, Kept, Plan
from ..protocol.spec import JobSpec
from ..protocol.state import JobState
from ..protocol.typed import Record
from ..store.cache import JobSummary
from ..store.tracking import Tracking


@dataclass(frozen=True)
class Jobs(Record):
    """All jobs, the newest first."""

    jobs: tuple[JobSummary, ...]


@dataclass(frozen=True)
class Tracked(Record):
    """A job at one tracker."""

    tracker: str
    link: str
    """The page of its run, or a directory; empty if the run has not begun."""
    delivered: bool
    """Whether the job has ended, and the tracker has everything."""
    said: str
    """What does not go well; empty if all does."""

    @staticmethod
    def all_of(found: Iterable[Tracking]) -> tuple[Tracked, ...]:
        return tuple(Tracked(one.tracker, one.link, one.closed, one.said) for one in found)


@dataclass(frozen=True)
class Tracks(Record):
    """A job at its trackers."""

    trackers: tuple[Tracked, ...]


@dataclass(frozen=True)
class Shown(Record):
    """Everything about one job."""

    spec: JobSpec
    plan: Plan
    state: JobState
    gauges: dict[int, Gauges]
    """By rank. A rank that nobody looked at is missing."""
    captured: tuple[Captured, ...]
    notes: tuple[str, ...]
    """Notes of the capture; those of the run are in ``state``."""
    trackers: tuple[Tracked, ...] = ()


@dataclass(frozen=True)
class Line(Record):
    """One line that a rank printed, without its newline."""

    rank: int
    stream: str
    """``out`` or ``err``."""
    text: str


@dataclass(frozen=True)
class Failure(Record):
    """A rank that failed or was killed."""

    rank: int
    host: str
    error: ErrorRecord | None
    """Its exception; null if it raised none."""
    why: str
    """How its process ended, if that needs an explanation: ``was killed (SIGKILL)``."""


@dataclass(frozen=True)
class Standing(Record):
    """How a job stands."""

    job: str
    name: str | None
    state: str
    """``submitted``, ``starting``, ``running``, ``stopping``. These are final: ``succeeded``, ``failed``,
    ``cancelled``, ``timed_out``, ``lost``."""
    queued: str
    """What it waits for, while it waits for its turn; else empty."""
    reason: str
    """Why it ended so; empty if no reason is needed."""
    submitted: float
    ended: float
    """0 before the end."""
    failures: tuple[Failure, ...]
    """The first failure first."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @staticmethod
    def of(state: JobState) -> Standing:
        """As the job's state says."""
        return Standing(
            state.job,
            state.name,
            state.state,
            state.queued,
            state.reason,
            state.submitted,
            state.ended,
            tuple(Failure(rank.rank, rank.host, rank.error, rank.why) for rank in state.failures()),
            state.findings,
            state.notes,
        )


@dataclass(frozen=True)
class Stacks(Record):
    """Where the ranks are that have not ended, by rank."""

    stacks: tuple[RankStack, ...]


@dataclass(frozen=True)
class Findings(Record):
    """Why a job failed, the cause first; empty where no line tells of a fault."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Exported(Record):
    """A job as plain files."""

    directory: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Removed(Record):
    """What was removed. ``size`` in bytes."""

    jobs: tuple[str, ...]
    blobs: int
    """Captured data that no job used any more."""
    size: int


@dataclass(frozen=True)
class Problem(Record):
    """One error of ours."""

    kind: str
    """The name of its class, such as ``JobNotFound``."""
    message: str
    hint: str
    """What to do now."""

    @staticmethod
    def of(error: TorchDistError) -> Problem:
        """With the words as they are."""
        return Problem(type(error).__name__, error.message, error.hint)


@dataclass(frozen=True)
class Failed(Record):
    """The last line of a verb that failed. The exit status is that of the verb without ``--json``."""

    error: Problem


@dataclass(frozen=True)
class WarmProcess(Record):
    """A process that has imported torch, and of which ranks are forked."""

    pid: int
    ready: bool
    python: str


@dataclass(frozen=True)
class Agent(Record):
    """A process of ours on a node, with its warm processes and the ids of its jobs."""

    pid: int
    jobs: tuple[str, ...]
    warm: tuple[WarmProcess, ...]

    @staticmethod
    def of(pid: int, jobs: Iterable[str], warm: Iterable[Mapping[str, Any]]) -> Agent:
        """``warm`` as the agent says it."""
        return Agent(pid, tuple(jobs), tuple(WarmProcess(one["pid"], one["ready"], one["python"]) for one in warm))


@dataclass(frozen=True)
class Node(Record):
    """This machine, or one host of ``--hosts``."""

    host: str
    inventory: Inventory | None
    """Null for a host that did not answer."""
    agents: tuple[Agent, ...] = ()
    clock: float = 0.0
    """How many seconds its clock is ahead of this machine's."""
    error: Problem | None = None
    kept: Kept = field(default_factory=Kept)
    """Of a host: what is there for the next jobs."""


@dataclass(frozen=True)
class Nodes(Record):
    """The machines, in the order in which they were asked for."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Checks(Record):
    """What ``doctor`` found. ``level`` of a check is ``fine``, ``warning`` or ``fault``."""

    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Planned(Record):
    """What would run."""

    plan: Plan
    memory: MemoryPlan | None = None
    """Of ``run --plan`` with a strategy."""
    captured: tuple[Captured, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoppedNode(Record):
    """What was ended on a machine. On a host, what was removed, too; nothing while it runs ``jobs``."""

    host: str
    warm: int = 0
    """Warm processes that were ended."""
    jobs: tuple[str, ...] = ()
    """Jobs that still run there."""
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Directories with files that cells wrote."""
    error: Problem | None = None


@dataclass(frozen=True)
class Stopped(Record):
    """What ``stop`` did, machine by machine."""

    nodes: tuple[StoppedNode, ...]


@dataclass(frozen=True)
class Printed:
    """What a verb prints with ``--json``: objects of ``lines``, if any, then one of ``last``."""

    last: type[Record] | None
    lines: type[Record] | None = None


OF_VERB = {
    "run": Printed(Standing, Line),
    "run --background": Printed(Standing),
    "run --plan": Printed(Planned),
    "jobs": Printed(Jobs),
    "show": Printed(Shown),
    "logs": Printed(None, Line),
    "attach": Printed(Standing, Line),
    "stacks": Printed(Stacks),
    "profile": Printed(Profile),
    "diagnose": Printed(Findings),
    "cancel": Printed(Standing),
    "rerun": Printed(Standing, Line),
    "export": Printed(Exported),
    "track": Printed(Tracks),
    "rm": Printed(Removed),
    "nodes": Printed(Nodes),
    "doctor": Printed(Checks),
    "plan": Printed(Planned),
    "stop": Printed(Stopped),
}
