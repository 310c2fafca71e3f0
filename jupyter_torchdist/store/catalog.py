"""All jobs of the data directory: listing, finding by prefix or name, removal, garbage collection."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..protocol.errors import JobNotFound, StoreError
from ..protocol.events import FINAL_STATES
from ..protocol.machine.packages import KEPT_SECONDS
from ..protocol.paths import Home, JobPaths, is_safe
from ..protocol.paths import home as default_home
from . import cache, journal, liveness
from .cache import JobSummary
from .files import writing
from .jobdir import read_manifest, read_plan, read_spec


def jobs(home: Home | None = None, known: Mapping[str, JobSummary] | None = None) -> list[JobSummary]:
    """All jobs, the newest first. Jobs in ``known`` are not read again.

    Raises ``StoreError`` if the data directory cannot be read.
    """
    home, known = home or default_home(), known or {}
    present = _present(home)
    found = [known[job] for job in present if job in known]
    new = [job for job in present if job not in known]
    if new or not known:
        found += _read(home, new, present)
    return sorted(found, key=lambda summary: (summary.submitted, summary.job), reverse=True)


def _read(home: Home, new: list[str], present: list[str]) -> list[JobSummary]:
    """Summaries of the ``new`` jobs, from the cache if possible. ``present`` are all jobs in the data directory."""
    cached = cache.load(home)
    found = [summary for job in new if (summary := cached.get(job) or _summarise(home.job(job)))]
    fresh = [summary for summary in found if summary.final and summary.job not in cached]
    cache.keep(home, fresh, gone=cached.keys() - set(present))
    return found


def _present(home: Home) -> list[str]:
    try:
        with os.scandir(home.jobs) as entries:
            return [entry.name for entry in entries if is_safe(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        hint = "make it readable, or set $TORCHDIST_HOME to another directory"
        raise StoreError(f"{home.jobs} cannot be read: {error.strerror}", hint) from error


def _summarise(paths: JobPaths) -> JobSummary | None:
    """The job's summary; None if the job was removed meanwhile."""
    try:
        state = journal.state(paths)
        effective = liveness.effective_state(paths, state)
    except JobNotFound:
        return None
    notebook, rerun_of, damage = "", "", ""
    gpus: tuple[str, ...] = ()
    try:
        spec = read_spec(paths)
        notebook, rerun_of = spec.notebook, spec.rerun_of
        gpus = tuple(gpu for node in read_plan(paths).nodes for gpu in node.gpus)
    except JobNotFound:
        return None
    except StoreError as error:
        damage = error.message
    return JobSummary(
        job=paths.job,
        name=state.name,
        state=effective,
        label=state.label,
        world_size=state.world_size,
        submitted=state.submitted,
        ended=state.ended,
        notebook=notebook,
        reason=state.reason,
        gpus=gpus,
        rerun_of=rerun_of,
        damage=damage,
    )


def find(text: str, home: Home | None = None) -> JobPaths:
    """The job whose id is ``text``, else whose id alone begins with it, else the newest job with that name.

    Raises ``JobNotFound``, which suggests the closest match.
    """
    home = home or default_home()
    present = sorted(_present(home))
    if text in present:
        return home.job(text)
    begin = [job for job in present if text and job.startswith(text)]
    if len(begin) == 1:
        return home.job(begin[0])
    known = jobs(home)
    for summary in known:
        if summary.name == text:
            return home.job(summary.job)
    if begin:
        raise JobNotFound(f"{len(begin)} jobs begin with {text!r}: {', '.join(begin[-5:])}", "give more of the id")
    names = [*present, *(summary.name for summary in known if summary.name)]
    near = difflib.get_close_matches(text, names, 1, 0.5)
    hint = f"did you mean {near[0]}? `%dist` lists the jobs" if near else "`%dist` lists the jobs"
    raise JobNotFound(f"there is no job {text!r} in {home.root}", hint)


def remove(paths: JobPaths) -> None:
    """Delete a job's directory. Raises ``StoreError`` if the job has not ended, ``JobNotFound``."""
    state = liveness.effective_state(paths)
    if state not in FINAL_STATES and not (state == "orphaned" and _beyond_help(paths)):
        remedy = f"`%dist cancel {paths.job}` ends it"
        if state == "orphaned":
            remedy = f"its driver is gone; `%dist attach {paths.job}` finds out how it stands"
        raise StoreError(f"job {paths.job} is {state}, so it is not removed", remedy)
    discard(paths)


def _beyond_help(paths: JobPaths) -> bool:
    """Whether no driver can take up the job, because its specification or plan is lost."""
    try:
        read_spec(paths), read_plan(paths)
    except StoreError:
        return True
    return False


def discard(paths: JobPaths) -> None:
    """Delete a job's directory whatever its state: first renamed in one step, then removed file by file."""
    aside = paths.root.with_name(f".removing-{paths.job}")
    with writing(paths.root.parent):
        with contextlib.suppress(FileNotFoundError):
            os.rename(paths.root, aside)
        shutil.rmtree(aside, ignore_errors=True)


YOUNG = 3600.0
"""Seconds for which a blob that no job uses is kept, and after which a draft counts as abandoned."""


@dataclass(frozen=True)
class Collected:
    """What garbage collection removed. ``size`` is in bytes."""

    jobs: tuple[str, ...] = ()
    blobs: int = 0
    size: int = 0


def collect_garbage(
    home: Home | None = None,
    max_age: float | None = None,
    max_bytes: int | None = None,
    now: float | None = None,
) -> Collected:
    """Remove ended jobs older than ``max_age`` (seconds since their end), then the oldest ended jobs until the data
    directory holds at most ``max_bytes``, then blobs that no job names, and old packages for hosts.

    Keeps running, orphaned and unreachable jobs, and blobs that a job under creation may use. ``now`` is in seconds
    since the epoch. Raises ``StoreError``.
    """
    home, now = home or default_home(), time.time() if now is None else now
    before = _held(home)
    _abandoned(home, now)
    ended = [summary for summary in reversed(jobs(home)) if summary.final]
    going = [summary.job for summary in ended if max_age is not None and now - summary.ended > max_age]
    for job in going:
        discard(home.job(job))
    if max_bytes is not None:
        going += _until_it_fits(home, [summary.job for summary in ended if summary.job not in going], max_bytes)
    blobs = _unnamed_blobs(home, now)
    for packages in _children(home.wheels):
        if min(_age(path, now) for path in (packages, *_children(packages))) > KEPT_SECONDS:
            shutil.rmtree(packages, ignore_errors=True)
    return Collected(tuple(going), blobs, max(0, before - _held(home)))


def _until_it_fits(home: Home, candidates: list[str], max_bytes: int) -> list[str]:
    """Discard ``candidates`` in order until jobs and blobs fit into ``max_bytes``. Returns the discarded jobs."""
    sharers = Counter(digest for job in _present(home) for digest in _digests(home.job(job)))
    held = _held(home)
    going = []
    for job in candidates:
        if held <= max_bytes:
            break
        digests = _digests(home.job(job))
        sharers.subtract(digests)
        alone = [home.blob(digest) for digest in digests if not sharers[digest]]
        held -= size_of(home.job(job)) + sum(_sizes(*alone))
        discard(home.job(job))
        going.append(job)
    return going


def _digests(paths: JobPaths) -> set[str]:
    try:
        return {blob.digest for blob in read_manifest(paths).blobs}
    except (JobNotFound, StoreError):
        return set()


def _abandoned(home: Home, now: float) -> None:
    """Remove drafts, half-removed jobs and temporary files that dead processes left."""
    for path in _children(home.jobs):
        if path.name.startswith((".creating-", ".removing-")) and _age(path, now) > YOUNG:
            shutil.rmtree(path, ignore_errors=True)
    for path in _children(home.blobs):
        if path.name.endswith(".tmp") and _age(path, now) > YOUNG:
            path.unlink(missing_ok=True)


def _unnamed_blobs(home: Home, now: float) -> int:
    named = _named(home)
    if named is None:
        return 0
    removed = 0
    for path in _children(home.blobs):
        if path.name in named or path.name.startswith(".") or _age(path, now) <= YOUNG:
            continue
        if _being_created(home):
            break
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    return removed


def _named(home: Home) -> set[str] | None:
    """Digests that some job needs. None if unknown, because a job that has not ended has a damaged manifest."""
    named: set[str] = set()
    for summary in jobs(home):
        try:
            named.update(blob.digest for blob in read_manifest(home.job(summary.job)).blobs)
        except JobNotFound:
            continue
        except StoreError:
            if not summary.final:
                return None
    return named


def _being_created(home: Home) -> bool:
    return any(path.name.startswith(".creating-") for path in _children(home.jobs))


def _children(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _held(home: Home) -> int:
    """Bytes of all jobs, blobs and packages."""
    return sum(_sizes(home.jobs, home.blobs, home.wheels))


def _sizes(*roots: Path) -> Iterator[int]:
    """Size of each file that is one of ``roots`` or below one. A file that is removed meanwhile is skipped."""
    for root in roots:
        files = [root, *(Path(directory, name) for directory, _, names in os.walk(root) for name in names)]
        for file in files:
            with contextlib.suppress(OSError):
                if not file.is_dir():
                    yield file.lstat().st_size


def size_of(paths: JobPaths) -> int:
    """Bytes of a job's own files, without its share of the blobs."""
    return sum(_sizes(paths.root))
