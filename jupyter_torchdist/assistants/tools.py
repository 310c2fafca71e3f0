"""The tools: questions about the jobs of this user, and, where that is allowed, ``cancel`` and ``rerun``.

Their names, parameters and docstrings are what an assistant reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any, Literal

from ..client.job import Job, attach
from ..client.stacks import of as asked_stacks
from ..client.submit import rerun as run_again
from ..diagnosis import ours
from ..feed import curves as drawing
from ..feed import rerun as again
from ..feed import search as searching
from ..feed.curveindex import CurveIndex
from ..protocol.errors import UserError
from ..protocol.feed import CurvesAsked, SearchAsked
from ..protocol.gauges import Gauges
from ..protocol.paths import user_name
from ..store import catalog, gauges, segments
from ..store.cache import JobSummary
from ..store.logs import decode as text_of
from ..store.logs import evidence
from ..verbs import answers as verbs
from ..verbs import parse
from ..verbs.schema import Checks, Standing
from ..views import job_text, plan_tables
from ..views.wording import first_few
from . import answers
from .answers import (
    FEW,
    LINE,
    TEXT,
    Curve,
    CurveList,
    FindingList,
    HitLine,
    Hits,
    JobList,
    JobPage,
    LogText,
    PlanText,
    RankList,
    RankRow,
    StackList,
    cut,
    part,
)

Stream = Literal["out", "err"]

LOG_BYTES = 16 * 1024
"""Bytes of a log in one answer, if the question does not say how many."""

MOST_BYTES = 64 * 1024

POINTS = 4000
"""Points of all curves in one answer."""

MANY = 20
"""Names of curves in an error."""

SEARCH_SECONDS = 5.0
"""How long one search may take before it says how to go on."""


def jobs(state: str = "", first: int = 0, count: int = 20) -> JobList:
    """List jobs, newest first. `state` keeps one state, such as running or failed. At most 50 at once."""
    found = [job for job in catalog.jobs() if state in ("", job.state)]
    shown, rest = part(found, first, count, "jobs")
    return JobList(tuple(map(_short, shown)), len(found), rest)


def _short(job: JobSummary) -> JobSummary:
    return replace(job, label=cut(job.label, LINE), reason=cut(job.reason, LINE), gpus=job.gpus[:FEW])


def job(job: str, source_start: int = 0) -> JobPage:
    """Say how one job stands: state, failures, findings, who waits for whom, its source. `job` is an id or a name."""
    one = _own(job)
    state = one.state
    standing, rest = answers.standing(state)
    source = one.spec.source
    if not 0 <= source_start <= len(source):
        raise UserError(f"source_start={source_start}: the source has {len(source)} characters", "begin with 0")
    end = source_start + TEXT
    if end < len(source):
        rest.append(f"{len(source) - end} more characters of the source: ask with source_start={end}")
    now = time.time()
    hosts = job_text.hosts(state)
    return JobPage(
        standing,
        one.spec.label,
        cut(job_text.headline(state, now), LINE),
        tuple(cut(line, LINE) for line in job_text.waiting_lines(state, now)[: 2 * FEW]),
        tuple(hosts[: answers.MOST]),
        one.plan.world_size,
        source[source_start:end],
        cut(again.command(one.spec), TEXT),
        "; ".join(rest),
    )


def ranks(job: str, first: int = 0, count: int = 50) -> RankList:
    """List the ranks of a job: host, process, state in words, CPU, memory and GPU. At most 50 at once."""
    one = _own(job)
    state, taken = one.state, gauges.read(one.paths)
    rows = [
        RankRow(number, rank.host, rank.pid, cut(job_text.rank_line(state, rank), LINE), taken.get(number, Gauges()))
        for number, rank in sorted(state.ranks.items())
    ]
    shown, rest = part(rows, first, count, "ranks")
    return RankList(shown, len(rows), rest)


def logs(job: str, rank: int, stream: Stream = "out", start: int | None = None, size: int = LOG_BYTES) -> LogText:
    """Read what one rank printed: `size` bytes (at most 65536) from the byte `start` on; without `start`, the end."""
    one = _own(job)
    verbs.checked_rank(one, rank)
    log = segments.find(one.paths).get(f"{rank}.{stream}")
    total = 0 if log is None else log.size()
    if not 1 <= size <= MOST_BYTES:
        raise UserError(f"size={size}: an answer has 1 to {MOST_BYTES} bytes", "ask for the next part with start")
    begin = max(0, total - size) if start is None else start
    if not 0 <= begin <= total:
        raise UserError(f"start={begin}: {stream} of rank {rank} has {total} bytes", "start counts from 0")
    data = b"" if log is None else log.read(begin, begin + size)
    begin += (skipped := segments.from_character(data))
    data = data[skipped : len(data) - segments.unfinished(data)]
    end = begin + len(data)
    rest = []
    if begin:
        rest.append(f"before this: start={max(0, begin - size)}, size={min(size, begin)}")
    if end < total:
        rest.append(f"after this: start={end}")
    return LogText(rank, stream, begin, end, total, text_of(data), "; ".join(rest))


def search(
    job: str, pattern: str, regex: bool = False, rank: int | None = None, at: dict[str, int] | None = None
) -> Hits:
    """Search what a job's ranks printed, newest lines first. `at` of an answer, given again, goes on from there."""
    one = _own(job)
    verbs.checked_rank(one, rank)
    found = {name: log for name, log in segments.find(one.paths).items() if rank in (None, log.rank)}
    if at is not None and (unknown := set(at) - set(found)):
        raise UserError(f"at: there is no log {min(unknown)}", "give the `at` of an earlier answer")
    hits: list[HitLine] = []
    until = time.monotonic() + SEARCH_SECONDS
    while True:
        before = at or {name: log.size() for name, log in found.items()}
        answer = searching.search(found, SearchAsked(pattern, regex, True, at=at))
        room = answers.MOST - len(hits)
        for hit in answer["hits"][:room]:
            number, _, stream = hit["file"].partition(".")
            hits.append(HitLine(int(number), stream, hit["start"], cut(hit["text"], LINE)))
        if len(answer["hits"]) > room:
            kept = answer["hits"][:room]
            at = _before(kept, answer["hits"][room:], before, answer["at"] or {})
        else:
            at = answer["at"]
        if at is None or len(hits) >= answers.MOST or time.monotonic() > until:
            return Hits(tuple(hits), at, "older lines were not searched: ask again with at" if at else "")


def _before(
    kept: list[Any], dropped: list[Any], before: Mapping[str, int], after: Mapping[str, int]
) -> dict[str, int] | None:
    """Where to go on, so that the hits that were dropped are found again, and those that were kept are not."""
    at = {}
    for name, place in before.items():
        own = [hit["start"] for hit in kept if hit["file"] == name]
        if any(hit["file"] == name for hit in dropped):
            at[name] = min(own, default=place)
        else:
            at[name] = after.get(name, 0)
    return {name: place for name, place in at.items() if place} or None


def findings(job: str) -> FindingList:
    """Say why a job failed: causes with a code, a sentence, what to do, and the lines that show it."""
    one = _own(job)
    found = ours.diagnose(evidence(one.paths), one.state)
    left = len(found) - FEW
    rest = f"{left} more: `torchdist diagnose {one.id}` in a shell" if left > 0 else ""
    return FindingList(answers.findings(found), rest)


def stacks(job: str, first: int = 0, count: int = 10) -> StackList:
    """Ask the ranks of a running job where they are now: their Python stacks. Takes about a second."""
    found = [replace(one, text=cut(one.text, TEXT, end=True)) for one in asked_stacks(_own(job))]
    shown, rest = part(found, first, count, "ranks")
    return StackList(shown, len(found), rest)


def curves(
    job: str,
    names: list[str] | None = None,
    ranks: list[int] | None = None,
    points: int = 50,
    low: float | None = None,
    high: float | None = None,
    x: Literal["step", "time"] = "step",
) -> CurveList:
    """Give losses and other curves. First ask without `names`: it lists them. `low` and `high` bound x."""
    one = _own(job)
    for rank in ranks or ():
        verbs.checked_rank(one, rank)
    if not 16 <= points <= POINTS:
        raise UserError(f"points={points}: a curve has 16 to {POINTS} points", "ask for a range of x with low and high")
    if low is not None and high is not None and low > high:
        raise UserError(f"low={low:g} is more than high={high:g}", "low is the smaller end of the range of x")
    index = CurveIndex.of(one.paths)
    index.look()
    while not index.advance(1.0):
        time.sleep(0)
    known = list(index.names.kept)
    first = min(index.ranks, default=None)
    last = {} if first is None else {name: _finite(value) for name, value in index.ranks[first].last.items()}
    listed = tuple(known[: 4 * answers.MOST])
    rest = [f"{len(known) - len(listed)} more names: ask for them by name"] if len(known) > len(listed) else []
    drawn: tuple[Curve, ...] = ()
    complete = True
    if names:
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"there is no curve {unknown[0]!r}", f"there are: {first_few(known, MANY) or 'none'}")
        lines = len(names) * max(1, len(ranks or (0,)))
        if lines * points > POINTS:
            raise UserError(f"{lines} curves of {points} points are more than {POINTS}", "ask for fewer at once")
        asked = CurvesAsked("ranks" if ranks else "rank0", tuple(names), tuple(ranks or ()), x, low, high, points)
        found = _result(drawing.answer(index, asked))
        drawn, complete = tuple(map(_curve, found["series"])), found["complete"]
        if not complete:
            rest.append("points were merged: ask for a range with low and high")
    shown = {name: last[name] for name in list(last)[: answers.MOST]}
    return CurveList(listed, shown, drawn, complete, "; ".join(rest))


def _result(work: Generator[None, None, Mapping[str, Any]]) -> Mapping[str, Any]:
    while True:
        try:
            next(work)
        except StopIteration as end:
            answer: Mapping[str, Any] = end.value
            return answer


def _curve(series: Mapping[str, Any]) -> Curve:
    columns = (tuple(map(_finite, series[name])) for name in ("x", "y", "low", "high"))
    return Curve(series["name"], series["rank"], *columns)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def plan(options: list[str]) -> PlanText:
    """Say what options of %%distribute would run, such as ["--ranks", "4"], and run nothing."""
    planned = verbs.plan(options)
    text = plan_tables.plan_table(planned.plan)
    rest = "`torchdist plan` in a shell prints all of it" if len(text) > 4 * TEXT else ""
    return PlanText(cut(text, 4 * TEXT), tuple(cut(note, LINE) for note in planned.notes[: answers.MOST]), rest)


def doctor(hosts: str = "") -> Checks:
    """Check this machine, or `hosts` (names that ssh reaches, with commas between them). Takes up to a minute."""
    words = ["doctor", *([f"--hosts={hosts}"] if hosts else [])]
    (found,) = verbs.answers(parse.parse(words, "torchdist"))
    assert isinstance(found, Checks)
    return found


def cancel(job: str, kill: bool = False) -> Standing:
    """Stop a job: KeyboardInterrupt in every rank, and a kill after its grace; `kill` kills it at once."""
    return answers.standing(verbs.cancel(_own(job), kill).state)[0]


def rerun(job: str) -> Standing:
    """Run a job again as it was captured. The answer names the new job, which goes on."""
    return answers.standing(run_again(_own(job)).state)[0]


READING: tuple[Callable[..., Any], ...] = (
    jobs,
    job,
    ranks,
    logs,
    search,
    findings,
    stacks,
    curves,
    plan,
    doctor,
)
CONTROL: tuple[Callable[..., Any], ...] = (cancel, rerun)


def _own(text: str) -> Job:
    """The job, if it is this user's. Raises ``UserError``, ``JobNotFound``."""
    paths = catalog.find(text)
    owner = paths.root.stat().st_uid
    if owner != os.getuid():
        raise UserError(
            f"job {paths.job} belongs to {user_name(owner)}", "ask about jobs of your own: `jobs` lists them"
        )
    return attach(paths.job)
