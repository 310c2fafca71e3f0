"""The client's view of a job: state, logs, results, failure. Everything is read from the job directory."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from .. import marshal, states
from ..protocol.bundle import Captured, Manifest
from ..protocol.errors import JobLost, RankFailed, UserError
from ..protocol.events import Event, ProfileRequest
from ..protocol.paths import Home, JobPaths
from ..protocol.paths import home as default_home
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..protocol.state import JobState
from ..store import catalog, files, jobdir, journal, liveness, logs
from ..usercode.source import remember_cell
from . import failures, items, tables
from .drivers import DriverPool
from .drivers import pool as default_pool

VALUE = "__torchdist_value__"
"""The name in a rank's results for the value of a function or of a cell's last line."""

EAGER = 1.0
"""Seconds for which a wait polls every 5 ms; later it polls every 20 ms."""

CHECK = 0.5
"""Seconds between two checks whether the driver is alive."""

SETTLING = 2.0
"""Seconds for a new interpreter to start and take the job over."""

TAKEOVERS = 3
"""How many new drivers one job gets after its driver died, before the job is given up."""


@dataclass(frozen=True)
class Brought:
    """The names that ``bring`` assigned, and the names left behind, each with the reason."""

    names: tuple[str, ...]
    left: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [f"brought {', '.join(self.names)}" if self.names else "nothing to bring"]
        words += [f"{name} stayed behind: {why}" for name, why in self.left]
        return "\n".join([*words, *self.notes])


class Job:
    """One job. Thread-safe; ``await job`` waits without blocking the event loop.

    ``memo`` holds the captured objects of the notebook that submitted it, for updates in place; None after ``attach``.
    """

    findings: tuple[Any, ...] = ()

    def __init__(
        self,
        paths: JobPaths,
        spec: JobSpec,
        plan: Plan,
        manifest: Manifest,
        *,
        home: Home | None = None,
        pool: DriverPool | None = None,
    ) -> None:
        self.paths, self.spec, self.plan, self.manifest = paths, spec, plan, manifest
        self.memo: dict[int, Any] | None = None
        self._home, self._pool = home or default_home(), pool
        self._asked = journal.asked_for(paths)
        self._seen = (self._asked, 0)
        self._results: dict[int, marshal.Values] = {}
        self._attributes: dict[str, Any] = {}
        """Attributes that the cell set on modules."""
        self._states: dict[str, states.State] = {}
        """The state of the process that the cell changed."""
        self._took_over = False
        self._checked = 0.0
        self._takeovers = 0
        self._successor: subprocess.Popen[bytes] | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        # A notebook keeps this text: a state that passes would stand there for ever.
        state = f"{self.state.state}, " if self.state.final else ""
        return f"<Job {self.id}{name}: {state}{self.plan.world_size} ranks, {self.spec.label}>"

    @property
    def id(self) -> str:
        return self.spec.job

    @property
    def name(self) -> str | None:
        return self.spec.options.name

    @property
    def receipt(self) -> tuple[Captured, ...]:
        """What was captured."""
        return self.manifest.receipt

    # ---- state

    @property
    def state(self) -> JobState:
        """The job's current state. Cheap: only new events of the journal are read."""
        state, offset = self._seen
        if state.final:
            return state
        state, end = journal.advanced(self.paths, state, offset)
        if end <= offset and self.paths.summary.exists():
            state = journal.state(self.paths)
        self._seen = (state, end)
        if state.world_size != self.plan.world_size:  # an attempt on fewer hosts
            self.plan = jobdir.read_plan(self.paths)
        return state

    @property
    def done(self) -> bool:
        return self.state.final

    def events(self) -> list[Event]:
        """All changes of state so far."""
        return journal.read(self.paths)[0]

    def wait(self, timeout: float | None = None) -> JobState:
        """The final state. Raises ``TimeoutError`` after ``timeout`` seconds (the job continues), ``JobLost``."""
        began = time.monotonic()
        for pause in self._watch(timeout, began):
            time.sleep(pause)
        return self.state

    async def _wait(self) -> JobState:
        for pause in self._watch(None, time.monotonic()):
            await asyncio.sleep(pause)
        return self.state

    def __await__(self) -> Generator[Any, None, JobState]:
        return self._wait().__await__()

    def _watch(self, timeout: float | None, began: float) -> Generator[float, None, None]:
        """Pauses (seconds) until the job's end; between them a dead driver is replaced."""
        while not self.state.final:
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                raise TimeoutError(f"job {self.id} is still {self.state.state} after {timeout:g} s")
            if waited > CHECK:
                self.revive()
            yield 0.005 if waited < EAGER else 0.02
        self._driver_pool().reap()

    def revive(self) -> None:
        """Start a new driver if the job's driver died; checked at most every half second.

        Raises ``JobLost`` when several new drivers ended, too, and ``LaunchError``.
        """
        now = time.monotonic()
        if now - self._checked < CHECK:
            return
        self._checked = now
        # A long journal takes it seconds to read.
        starting = self._successor is not None and self._successor.poll() is None
        if starting or liveness.effective_state(self.paths, self.state) != "orphaned":
            return
        if not self.paths.spec.exists():
            raise JobLost(f"the files of job {self.id} were deleted while it ran", f"they were in {self.paths.root}")
        if self._takeovers >= TAKEOVERS:
            raise JobLost(
                f"job {self.id} has no driver, and {TAKEOVERS} new drivers ended too",
                f"`%dist logs {self.id}` shows what it wrote; `%dist rm {self.id}` removes it",
            )
        if self._successor is None or self._successor.returncode != 0:  # 0: another one is taking the job over
            self._takeovers += 1
        self._checked = now + SETTLING
        self._successor = self._driver_pool().attach(self.paths)

    def _driver_pool(self) -> DriverPool:
        return self._pool or default_pool()

    # ---- requests

    def interrupt(self) -> None:
        """Raise ``KeyboardInterrupt`` in every rank; ranks that do not end are killed after ``--grace``."""
        self._request("interrupt")

    def terminate(self) -> None:
        """Send SIGTERM to every rank, as torchrun does when it must end; ranks left are killed after ``--grace``."""
        self._request("terminate")

    def kill(self) -> None:
        """End every process of the job at once."""
        self._request("kill")

    cancel = interrupt

    def ask_stacks(self) -> None:
        """Have every rank write its stacks (``client/stacks.py`` waits for them)."""
        self._request("stacks")

    def ask_profile(self, request: ProfileRequest) -> None:
        """Have every rank profile its next steps (``client/profiles.py`` waits for them)."""
        self._request("profile", profile=request.to_json())

    def _request(self, kind: str, **more: Any) -> None:
        if not self.state.final:
            files.private(self.paths.requests)
            name = f"{time.time_ns()}-{secrets.token_hex(4)}.json"
            files.publish_json(self.paths.requests / name, {"kind": kind, "t": time.time(), **more})

    # ---- logs and metrics

    def logs(
        self, rank: int | None = None, stream: str | None = None, tail: int | None = None, grep: str | None = None
    ) -> str:
        """The output of a rank, or of all ranks with ``[rank N]`` before each line; the last ``tail`` lines of each.

        ``grep`` keeps lines that match this regular expression (raises ``re.error`` if it is invalid).
        """
        pieces = []
        for file in logs.files(self.paths, rank, stream):
            text = "".join(logs.selected(file.path, grep, tail))
            pieces.append(logs.labelled(file.rank, text) if rank is None and self.plan.world_size > 1 else text)
        return "".join(pieces)

    @property
    def metrics(self) -> Any:
        """Curves of all ranks, one row for each record: with pandas a ``DataFrame``, else lists by column."""
        return tables.curves(self.paths)

    # ---- results

    def result(self, rank: int = 0) -> marshal.Values:
        """The values that came back from ``rank``, by name; objects of the notebook are updated in place.

        Without values of this rank it raises what the job raised, or ``UserError`` while the job runs.
        """
        if rank not in self._results:
            if rank not in range(self.plan.world_size):
                raise UserError(f"job {self.id} has no rank {rank}", f"its ranks are 0 to {self.plan.world_size - 1}")
            if not self.paths.result(rank).exists():
                raise self._without_result(rank)
            # The notebook's objects can hold the values of one rank only; values of other ranks go into copies.
            memo = self.memo if rank == 0 else None
            self._results[rank] = values = marshal.load_results(self.paths, rank, memo, _main(), states.write_early)
            self._attributes |= marshal.attributes.take(values)
            self._states = states.take(values) or self._states
            if self.spec.kind == "cell":  # where functions that came back are from
                remember_cell(self.spec.source, self.spec.label, self.spec.first_line)
            self._release()
        return self._results[rank]

    def _without_result(self, rank: int) -> BaseException:
        state = self.state
        if not state.final:
            return UserError(f"rank {rank} of job {self.id} has no results yet", "wait for it: `job.wait()`")
        return self.exception() or UserError(
            f"rank {rank} of job {self.id} sent no results",
            "only rank 0 sends results, unless the cell runs with --collect all",
        )

    @property
    def value(self) -> Any:
        """The value of the function, or of the cell's last line, on rank 0; None if there is none.

        Raises what ``result`` raises, and ``UserError`` for a value that cannot be pickled.
        """
        return self._value_of(0)

    def values(self) -> list[Any]:
        """``value`` of every rank (``--collect all``)."""
        return [self._value_of(rank) for rank in range(self.plan.world_size)]

    def returned(self) -> list[Any]:
        """What a function returned, by rank; without ``--collect all`` a list with rank 0's value alone."""
        return self.values() if self.plan.collect == "all" else [self.value]

    def _value_of(self, rank: int) -> Any:
        result = self.result(rank)
        if why := dict(result.left).get(VALUE):
            raise UserError(
                f"the value of rank {rank} cannot be pickled: {why.replace(VALUE, 'value', 1)}",
                "return its parts that can, such as numbers, tensors or a state_dict",
            )
        if why := dict(result.unread).get(VALUE):
            raise RankFailed(f"the value of rank {rank}: {why}", "install the missing package here", rank=rank)
        return result.get(VALUE)

    def items(self) -> Iterator[Any]:
        """The items of a generator, each as soon as it is there: a list by rank, or rank 0's without ``--collect all``.

        Raises what the job raised, and ``UserError`` if ranks yielded different numbers of items.
        """
        yield from items.follow(self, lambda state: None)
        self.raise_for_state()

    def bring(self, namespace: dict[str, Any] | None = None) -> Brought:
        """Assign the results to names in ``namespace`` (default: ``__main__``), and restore the state of the process.

        The values are rank 0's; with ``--collect all`` they are lists by rank.

        Raises what ``result`` raises.
        """
        namespace = _main() if namespace is None else namespace
        result = self.result(0)
        values = {name: value for name, value in result.items() if name != VALUE}
        if self.plan.collect == "all":
            ranks = [self.result(rank) for rank in range(self.plan.world_size)]
            values = {name: [rank.get(name) for rank in ranks] for name in values}
        namespace.update(values)
        for name in result.deleted:
            namespace.pop(name, None)
        notes = (*result.notes, *self.bring_state(namespace))
        told = self.state.ranks.get(0)  # complete; the results file lists only values that failed to be written
        left = told.left if told and told.left else result.left
        unread = tuple((name, why) for name, why in result.unread if name)
        return Brought(tuple(values), (*left, *unread), notes)

    def bring_state(self, namespace: dict[str, Any] | None = None) -> tuple[str, ...]:
        """Apply module attributes and process state (random numbers, default dtype, logging levels…) that the cell
        changed to this process, once. Returns notes on what failed. ``bring`` calls this, and so does waiting for a
        function.

        Raises what ``result`` raises.
        """
        self.result(0)
        if self._took_over:
            return ()
        self._took_over = True
        place = states.Place.notebook(_main() if namespace is None else namespace)
        return (*marshal.attributes.write_back(self._attributes), *states.write_back(self._states, place))

    # ---- failure

    def exception(self) -> BaseException | None:
        """The exception to raise here: None after success or while the job runs, else the first failing rank's."""
        if self.done and self._error is None:
            self._error = failures.exception(self.paths, self.state, self.memo, _main(), self.spec.options.exclude)
            self._release()
        return self._error

    def _release(self) -> None:
        """Drop the memo, which keeps the notebook's objects alive, when nothing can need it any more."""
        brought = 0 in self._results or (self.done and not self.paths.result(0).exists())
        if brought and (self._error is not None or self.state.state == "succeeded"):
            self.memo = None

    def raise_for_state(self) -> None:
        """Raise ``exception()`` if there is one."""
        if error := self.exception():
            try:
                raise error
            finally:
                del self, error  # the exception's traceback keeps this frame alive

    def let_go(self) -> None:
        """Drop all loaded results: the caller of ``bring`` has them. Later calls read them from the files again."""
        self.memo = self._error = None
        self._results.clear()
        self._attributes.clear()
        self._states.clear()


def _main() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def attach_to(paths: JobPaths, home: Home, pool: DriverPool | None = None) -> Job:
    """The job in this directory. Raises ``JobNotFound``, ``DamagedJob``."""
    spec, plan = jobdir.read_spec(paths), jobdir.read_plan(paths)
    return Job(paths, spec, plan, jobdir.read_manifest(paths), home=home, pool=pool)


def attach(text: str, home: Home | None = None, pool: DriverPool | None = None) -> Job:
    """The job with this id, beginning of an id, or name. If its driver died, it gets a new one.

    Raises ``JobNotFound``, ``DamagedJob``, ``LaunchError``.
    """
    home = home or default_home()
    job = attach_to(catalog.find(text, home), home, pool)
    job.revive()
    return job
