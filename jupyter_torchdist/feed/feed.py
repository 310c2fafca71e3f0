"""The feed of one view: messages in, messages out. All data is read from the job directory.

A feed has no thread and no clock. Its owner calls ``receive`` for each message, and ``poll`` about twenty times a
second. Each call ends within about 0.1 s (a search: 0.15 s). Longer work continues in the next call.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..diagnosis import live
from ..protocol.errors import TorchDistError, UserError
from ..protocol.feed import (
    MESSAGE_BYTES,
    RATE,
    UNSEEN,
    VERSION,
    Acked,
    Around,
    AroundAsked,
    Asked,
    CancelAsked,
    CommunicationAsked,
    CurvesAsked,
    DisplayAsked,
    Events,
    Gone,
    Hello,
    Lines,
    Older,
    OlderAsked,
    Opened,
    Said,
    SearchAsked,
    Status,
)
from ..protocol.paths import Home, JobPaths
from ..protocol.typed import Malformed
from ..store import displays, jobdir, liveness, presence, segments, tracking
from ..store.gauges import GaugeFiles
from ..store.segments import Log
from ..store.tail import Tail
from . import communication, curves, history, status
from .cancel import cancel
from .captured import captured
from .curveindex import CurveIndex
from .pace import Pace
from .rerun import command
from .search import search
from .states import States

Message = dict[str, Any]

WORK = 0.04
"""Seconds that one call spends on reading curves, and again on answers."""

STATUS_PERIOD = 0.25
LOOK_PERIOD = 0.5
"""Seconds between two checks for new files, for the driver and for the directory."""

FLOOD = 8 * 1024 * 1024
"""If all logs together grow by more bytes per second, lines are sent only once per ``FLOOD_PERIOD``."""
FLOOD_PERIOD = 1.0
FLOOD_LOOK = 0.05
"""Seconds between two measurements of this growth."""

TASKS = 32
"""Largest number of open questions."""

_BURST = 3.0


@dataclass(frozen=True)
class _Task:
    """A question that is being answered."""

    number: int
    work: curves.Work
    on_curves: bool


class Feed:
    """The feed of one view. Raises ``JobNotFound``, or ``DamagedJob`` if the job's specification or plan is damaged.

    ``may_cancel``: whether the user of the view may cancel the job.
    """

    def __init__(self, paths: JobPaths, home: Home, may_cancel: bool = True) -> None:
        self._paths, self._home = paths, home
        self._may_cancel = may_cancel
        self._spec, self._plan = jobdir.read_spec(paths), jobdir.read_plan(paths)
        self._curves = CurveIndex.of(paths)
        self._gauges = GaugeFiles(paths)
        self._tracked: list[tracking.Tracking] = []
        self._closed = self._opened = False
        self._start({})

    def _start(self, have: dict[str, int]) -> None:
        """A view opens: reset everything, also the message numbers."""
        self._n = self._acked = 0
        self._states = States(self._paths)
        self._tail = Tail(have)
        self._logs: dict[str, Log] = {}
        self._tasks: deque[_Task] = deque()
        self._pace = Pace()
        self._tokens, self._refilled = _BURST, float("-inf")
        self._looked = self._told = self._marked = self._sized = self._lined = self._folded = float("-inf")
        self._abreast = False
        """Whether all curves were completely read at the last call."""
        self._size = 0
        self._fast = False
        self._status: Status | None = None
        self._effective = ""

    # ---- in

    def receive(self, message: Message) -> list[Message]:
        """Handle a message. Returns immediate replies; answers that take longer come from ``poll``."""
        if self._closed:
            return []
        kind = message.get("type")
        if kind == "open":
            return self._open(message)
        if kind == "ack":
            with contextlib.suppress(Malformed):
                self._acked = max(self._acked, min(Acked.from_json(message).n, self._n))
            return []
        if kind == "ask":
            return self._ask(message)
        return []

    @property
    def busy(self) -> bool:
        """Whether a question is open."""
        return bool(self._tasks)

    def close(self) -> None:
        """Send no more messages."""
        self._closed = True
        self._tasks.clear()

    def _open(self, message: Message) -> list[Message]:
        offsets: dict[str, int] = {}
        with contextlib.suppress(Malformed):
            offsets = Opened.from_json(message).logs
        try:
            self._start(offsets)
            said = [self._hello()]
        except TorchDistError as error:
            self._n = 0
            return self._gone() or self._end(_sentence(error))
        self._opened = True
        return said

    def _ask(self, message: Message) -> list[Message]:
        try:
            asked = Asked.from_json(message)
        except Malformed:
            return []  # without a number there is nobody to answer
        if len(self._tasks) >= TASKS:
            return [self._say("answer", id=asked.id, error="too many questions at once; ask again")]
        self._tasks.append(_Task(asked.id, self._work(asked.what, message), asked.what == "curves"))
        return self._go_on(WORK)

    # ---- out

    def poll(self, now: float) -> list[Message]:
        """The messages to send now. ``now``: seconds on a monotonic clock."""
        if self._closed or not self._opened:
            return []
        if gone := self._look(now):
            return gone
        self._refill(now)
        self._read_curves(now)
        said = self._go_on(WORK)
        for more in (self._events, self._status_now, self._lines):
            while self._may_say():
                found = more(now)
                said += found
                if not found:
                    break
        return said

    def _read_curves(self, now: float) -> None:
        """Read new points as often as the status is sent. Reading many points at once costs less."""
        if not self._abreast or now - self._folded >= STATUS_PERIOD:
            self._folded = now
            self._abreast = self._curves.advance(WORK)

    def _refill(self, now: float) -> None:
        self._tokens = min(_BURST, self._tokens + max(0.0, now - self._refilled) * (RATE - _BURST))
        self._refilled = now

    def _may_say(self) -> bool:
        return self._tokens >= 1.0 and self._n - self._acked < UNSEEN

    def _say(self, kind: str, **words: Any) -> Message:
        self._n += 1
        return {"type": kind, "n": self._n, **words}

    def _unasked(self, kind: str, **words: Any) -> list[Message]:
        self._tokens -= 1.0
        return [self._say(kind, **words)]

    def _look(self, now: float) -> list[Message]:
        if now - self._looked < LOOK_PERIOD:
            return []
        self._looked = now
        if gone := self._gone():
            return gone
        self._logs.update({name: log for name, log in segments.find(self._paths).items() if name not in self._logs})
        self._curves.look()
        self._gauges.look()
        self._tracked = tracking.read(self._paths)
        if now - self._marked >= presence.PERIOD and not self._states.state.final:
            self._marked = now
            presence.mark(self._paths)
        try:
            self._effective = liveness.effective_state(self._paths, self._states.state)
        except TorchDistError:
            return self._gone()
        return []

    def _gone(self) -> list[Message]:
        if self._paths.root.is_dir():
            return []
        return self._end(f"the files of job {self._paths.job} were deleted")

    def _end(self, reason: str) -> list[Message]:
        gone: Gone = {"reason": reason}
        said = [self._say("gone", **gone)]
        self.close()
        return said

    def _hello(self) -> Message:
        with contextlib.suppress(TorchDistError):  # else the plan from before
            self._plan = jobdir.read_plan(self._paths)
        receipt, notes = self._bundle()
        self._logs = segments.find(self._paths)
        hello: Hello = {
            "version": VERSION,
            "now": time.time(),
            "job": self._paths.job,
            "spec": self._spec.to_json(),
            "plan": self._plan.to_json(),
            "receipt": receipt,
            "notes": notes,
            "command": command(self._spec),
            "state": self._states.state.to_json(),
            "sizes": {name: log.size() for name, log in self._logs.items()},
        }
        return self._say("hello", **hello)

    def _bundle(self) -> tuple[list[Message], list[str]]:
        try:
            return captured(self._paths)
        except TorchDistError as error:
            return [], [f"the captured names cannot be read: {error.message}"]

    def _events(self, now: float) -> list[Message]:
        try:
            events, anew = self._states.poll()
        except TorchDistError:  # the journal cannot be read now
            return []
        again = any(event["kind"] == "job.starting" and event.get("attempt", 1) > 1 for event in events)
        if anew or again:  # another attempt has another plan
            self._tokens -= 1.0
            return [self._hello()]
        return self._unasked("events", **Events(events=events)) if events else []

    def _status_now(self, now: float) -> list[Message]:
        if now - self._told < STATUS_PERIOD:
            return []
        self._told = now
        state = self._states.state
        late = live.of(state, self._plan, self._spec, self._gauges.latest)
        gauges = self._gauges
        effective = self._effective or state.state
        found = status.of(effective, self._curves, gauges.latest, self._tracked, late, gauges.network)
        if found == self._status:
            return []
        self._status = found
        return self._unasked("status", **found)

    def _lines(self, now: float) -> list[Message]:
        sizes = {name: log.size() for name, log in self._logs.items()}
        if self._floods(sum(sizes.values()), now):
            return []
        found = self._tail.poll(self._logs, sizes, now, MESSAGE_BYTES, self._states.state.final)
        if not found:
            return []
        self._lined = now
        lines: Lines = {"segments": [segment.to_json() for segment in found]}
        return self._unasked("lines", **lines)

    def _floods(self, size: int, now: float) -> bool:
        """Whether to wait: ranks write so fast that frequent reading would take CPU time from them."""
        if now - self._sized >= FLOOD_LOOK:
            self._fast = size - self._size > FLOOD * (now - self._sized)
            self._sized, self._size = now, size
        return self._fast and now - self._lined < FLOOD_PERIOD

    # ---- answers

    def _go_on(self, seconds: float) -> list[Message]:
        """Work on the open questions in turn, for ``seconds``."""
        until = time.monotonic() + seconds
        said: list[Message] = []
        while task := self._next_task():
            with self._pace.spending(task.on_curves):
                answer = self._step(task)
            if answer is not None:
                self._tasks.popleft()
                self._pace.spend(sum(len(one["x"]) for one in answer.get("series", ())))
                said.append(self._say("answer", id=task.number, **answer))
            if time.monotonic() >= until:
                break
            self._tasks.rotate(-1)
        return said

    def _next_task(self) -> _Task | None:
        """The first task that need not wait."""
        for _ in range(len(self._tasks)):
            if not self._tasks[0].on_curves or self._may_draw():
                return self._tasks[0]
            self._tasks.rotate(-1)
        return None

    def _may_draw(self) -> bool:
        """Whether curves may be answered now: after the first read, and for a running job within the allowed pace."""
        return self._folded > float("-inf") and (self._states.state.final or self._pace.open)

    def _step(self, task: _Task) -> curves.Answer | None:
        """Continue a task. Returns its answer, or None if it is not finished."""
        try:
            next(task.work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except TorchDistError as error:
            return {"error": _sentence(error)}
        except (Malformed, OSError) as error:
            return {"error": f"this question cannot be answered: {error}"}
        return None

    def _work(self, what: str, asked: Message) -> curves.Work:
        if what == "curves":
            return (yield from curves.answer(self._curves, CurvesAsked.from_json(asked)))
        if what == "display":
            wanted = DisplayAsked.from_json(asked)
            return (yield from displays.find(self._paths, wanted.rank, wanted.number))
        if what == "communication":
            fresh = CommunicationAsked.from_json(asked).fresh
            self._refuse_guests(fresh, "ask its ranks")
            if fresh:
                communication.record(self._paths, self._home)
            return (yield from communication.answer(self._paths, jobdir.read_plan(self._paths)))
        answers: dict[str, Callable[[Message], curves.Answer]] = {
            "older": self._older,
            "around": self._around,
            "search": lambda asked: search(self._all_logs(), SearchAsked.from_json(asked)),
            "cancel": self._cancel,
        }
        self._refuse_guests(what == "cancel", "cancel")
        if what not in answers:
            raise UserError(
                f"the feed cannot answer {what[:40]!r}", "the view may have another version: reload the page"
            )
        return answers[what](asked)

    def _refuse_guests(self, acts: bool, what: str) -> None:
        if acts and not self._may_cancel:
            raise UserError(f"this job is not yours to {what}", "ask its owner")

    def _all_logs(self) -> dict[str, Log]:
        if not self._logs:
            self._logs = segments.find(self._paths)
        return self._logs

    def _cancel(self, asked: Message) -> Said:
        return {"said": cancel(self._paths, self._home, CancelAsked.from_json(asked).kill)}

    def _older(self, asked: Message) -> Older:
        said = OlderAsked.from_json(asked)
        return history.older(self._all_logs(), said.at, list(said.files), said.limit)

    def _around(self, asked: Message) -> Around:
        said = AroundAsked.from_json(asked)
        log = self._all_logs().get(said.file)
        if log is None:
            return {"segments": []}
        return history.around(log, max(0, said.offset), said.limit)


def _sentence(error: TorchDistError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message
