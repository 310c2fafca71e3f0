"""Asks all ranks of a running job for a profile, and makes one timeline of what they saw."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..protocol.disk import open_plain
from ..protocol.errors import UserError
from ..protocol.events import Event, Profiled, ProfileRequest
from ..protocol.state import RANK_ENDS, JobState
from ..protocol.typed import Record
from ..store import files
from . import answers, stacks
from .job import Job

STEPS = 5
_KIND = "rank.profiled"

WITHIN = 60.0
"""Seconds in which the steps are to be done."""

WRITING = 20.0
"""Seconds that a rank may take to write what its profiler saw."""

ARRIVING = 10.0
"""Seconds for the rest of a rank's file to come from its host."""


@dataclass(frozen=True)
class RankProfile(Record):
    """One rank's part of a profile."""

    rank: int
    name: str
    """``rank 3 (host, GPU 1)``."""
    told: Profiled | None
    """Null for a rank that did not answer."""
    problem: str = ""
    """Why it has no steps, or fewer than asked for."""


@dataclass(frozen=True)
class Profile(Record):
    """On what the ranks spend a step."""

    job: str
    id: str
    ranks: tuple[RankProfile, ...]
    path: str
    """The timeline of all ranks; empty if no rank has any step."""


def take(job: Job, steps: int = STEPS, within: float = WITHIN) -> Profile:
    """Profile the next ``steps`` of every rank that runs code; returns when all have answered, or after ``within``.

    Raises ``UserError`` when no rank can be profiled, and what ``Job.revive`` raises.
    """
    state = job.state
    if state.final:
        hint = f"`%dist rerun {job.id}` runs it again; `--profile {steps}` profiles a job from its beginning"
        raise UserError(f"job {job.id} has ended: it has no steps any more", hint)
    if job.spec.kind == "command":
        raise UserError(
            f"job {job.id} runs a command: its ranks have no Python code that could be profiled",
            "run a script (`torchdist run train.py`) or a module (`-m train`)",
        )
    if not _running(state):
        raise UserError(f"no rank of job {job.id} runs its code yet", f"ask again when `%dist show {job.id}` says so")
    asked = ProfileRequest(secrets.token_hex(4), steps, within)
    job.ask_profile(asked)
    told = answers.of(job, _KIND, state.seq, within + WRITING, _running, lambda event: _told(event).id == asked.id)
    silent = _running(job.state) - told.keys()
    places: dict[int, str] = {}
    if silent:
        with contextlib.suppress(UserError):  # the job has ended meanwhile
            places = {one.rank: one.place for one in stacks.of(job)}
    found = _profile(
        job,
        asked.id,
        {rank: _told(event) for rank, event in told.items()},
        {rank: _silent(rank, asked, places) for rank in silent},
    )
    problems = {one.problem for one in found.ranks}
    if not found.path and len(problems) == 1:
        problem = problems.pop()
        hint = _hint(job, within) if "no step" in problem else f"`%dist profile {job.id}` asks again"
        raise UserError(f"job {job.id} was not profiled: on every rank, {problem}", hint)
    return found


def last(job: Job, least: int = 1) -> Profile | None:
    """The latest profile that all ranks have answered, in which one has at least so many steps; None without one."""
    if least and not any(any(job.paths.node(node.name).root.glob("rank-*.profile-*")) for node in job.plan.nodes):
        return None  # nearly all jobs: their journal need not be read
    found: dict[str, dict[int, Profiled]] = {}
    for event in job.events():
        if event.kind == _KIND:
            told = _told(event)
            found.setdefault(told.id, {})[event.rank or 0] = told
    running = _running(job.state)
    done = [
        name
        for name, told in found.items()
        if not running - told.keys() and any(one.steps >= least for one in told.values())
    ]
    return _profile(job, done[-1], found[done[-1]], {}) if done else None


def _running(state: JobState) -> set[int]:
    return {rank.rank for rank in state.ranks.values() if rank.ready and rank.state not in RANK_ENDS}


def _told(event: Event) -> Profiled:
    return Profiled.from_json(event.data["profile"])


def _silent(rank: int, asked: ProfileRequest, places: Mapping[int, str]) -> str:
    where = f"; it is at {places[rank]}" if places.get(rank) else ""
    return f"no step ended within {asked.within:g} s{where}"


def _hint(job: Job, within: float) -> str:
    return (
        f"`%dist stacks {job.id}` shows where the ranks are; a step ends with optimizer.step(), else with backward(), "
        f"td.log() or an item of td.progress(); --within TIME waits longer than {within:g} s"
    )


def _profile(job: Job, name: str, profiled: Mapping[int, Profiled], silent: Mapping[int, str]) -> Profile:
    ranks = []
    for rank in sorted({*profiled, *silent}):
        told = profiled.get(rank)
        ranks.append(RankProfile(rank, _name(job, rank), told, told.problem if told else silent[rank]))
    done = [one for one in ranks if one.told and one.told.steps]
    return Profile(job.id, name, tuple(ranks), str(_timeline(job, name, done)) if done else "")


def _name(job: Job, rank: int) -> str:
    state = job.state.ranks.get(rank)
    return job.plan.called(rank, state.host if state and state.host else job.plan.node_of(rank).called)


def _timeline(job: Job, name: str, ranks: Sequence[RankProfile]) -> Path:
    """Write the timeline, unless it is there. Times count from the first rank's start. Raises ``StoreError``."""
    path = job.paths.profile(name)
    if path.exists():
        return path
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    ahead = {event.node: event.data["ahead"] for event in job.events() if event.kind == "node.clock"}
    begins = {one.rank: one.told.origin - 1e6 * ahead.get(_node(job, one), 0.0) for one in ranks if one.told}
    first = min(begins.values())
    try:
        with files.writing(path.parent), _private(aside) as out:
            out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            for one in ranks:
                out.writelines(_lines(job, name, one, begins[one.rank] - first))
            out.write(b'{"ph":"M","name":"trace","pid":0,"args":{}}]}\n')
        with files.writing(path.parent):
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def _private(path: Path) -> Iterator[gzip.GzipFile]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5) as out:
        yield out


def _node(job: Job, one: RankProfile) -> str:
    return job.plan.node_of(one.rank).name


def _lines(job: Job, name: str, one: RankProfile, late: float) -> Iterator[bytes]:
    """The events of one rank, whose process number is the rank. It began ``late`` microseconds after the first one."""
    assert one.told is not None
    row = {"ph": "M", "pid": one.rank, "name": "process_name", "args": {"name": one.name}}
    place = {"ph": "M", "pid": one.rank, "name": "process_sort_index", "args": {"sort_index": one.rank}}
    yield from (f"{json.dumps(event)},\n".encode() for event in (row, place))
    path = job.paths.node(_node(job, one)).profile(one.rank, name)
    _wait_for(path, one.told.size)
    head = f',"pid":{one.rank},'.encode()
    try:
        with open_plain(path) as raw, gzip.open(raw) as lines:
            for line in lines:
                ts, _, rest = line.partition(b"\t")
                yield b'{"ts":%.3f' % (float(ts) + late) + head + rest.rstrip(b"\n") + b",\n"
    except (OSError, EOFError, ValueError, zlib.error):
        return  # a file that is cut: what was read is kept


def _wait_for(path: Path, size: int) -> None:
    """A rank's file may still be on its way from its host."""
    until = time.monotonic() + ARRIVING
    while time.monotonic() < until:
        if path.exists() and path.stat().st_size >= size:
            return
        time.sleep(0.05)
