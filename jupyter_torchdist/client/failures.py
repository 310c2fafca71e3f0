"""The exception for a job that did not succeed: the first failing rank's own; the others are in its notes."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

from .. import marshal
from ..protocol.disk import has_no_inodes
from ..protocol.errors import JobCancelled, JobLost, JobStalled, JobTimedOut, LaunchError, RankFailed
from ..protocol.paths import JobPaths
from ..protocol.state import JobState, RankState
from ..store import logs

TAKE_ALONG = "take it along with --include"
"""In the advice for a name that stayed in the notebook."""

LEFT_BEHIND = "was left behind with --exclude"
"""In the advice for a name that the user left there."""

MADE_BEFORE = "every rank runs this line, and another one may have made it first"
"""In the advice for a file or a directory that exists already."""

SHOWN = 8
"""How many failures of other ranks are named one by one, each on a line of at most ``WIDTH`` characters."""
WIDTH = 200

CRASH_LINES = 300
_CRASH = re.compile(r'^Fatal Python error: .*?^  File "(Cell In\[\d+\])", line (\d+)', re.DOTALL | re.MULTILINE)
"""A ``faulthandler`` dump, innermost frames first, up to the first frame of a cell."""


def exception(
    paths: JobPaths,
    state: JobState,
    memo: dict[int, Any] | None,
    main_dict: dict[str, Any],
    excluded: Container[str] = (),
) -> BaseException | None:
    """The exception to raise; None while the job runs or when it succeeded. ``excluded``: names left behind."""
    if not state.final or state.state == "succeeded":
        return None
    if state.state == "cancelled":
        return _noted(JobCancelled(state.reason or f"job {state.job} was cancelled"), state, ())
    if state.state == "timed_out":
        return _noted(JobTimedOut(state.reason or f"job {state.job} ran longer than its --timeout"), state, ())
    if state.stall is not None and state.stall.ends and state.first_failure is None:
        return JobStalled(state.reason, state.stall.finding.remedy)
    first = _first(state)
    if first is not None and (first.error or state.state != "lost"):
        error = _of_rank(paths, state, first, memo, main_dict)
    elif state.state == "lost":
        error = JobLost(state.reason or f"job {state.job} is lost", f"`%dist logs {state.job}` shows what it wrote")
    else:
        error = _not_started(paths, state)
    text = first.error.text if first is not None and first.error else ""
    notes = _left_in_notebook(error, text, main_dict, excluded)
    if isinstance(error, FileExistsError) and len(state.ranks) > 1:
        notes.append(f"{MADE_BEFORE}: give makedirs or mkdir exist_ok=True, or make it under `if td.is_main:`")
    return _noted(error, state, [*notes, *_others(state, first)])


def _noted(error: BaseException, state: JobState, notes: Iterable[str]) -> BaseException:
    """``error`` with ``notes``, and what was found out about the cause."""
    for note in [*notes, *(cause.advice for cause in state.findings)]:
        add_note(error, note)
    return error


def _first(state: JobState) -> RankState | None:
    if state.first_failure is not None and state.first_failure in state.ranks:
        return state.ranks[state.first_failure]
    return next(iter(state.failures()), None)


def _of_rank(
    paths: JobPaths, state: JobState, rank: RankState, memo: dict[int, Any] | None, main_dict: dict[str, Any]
) -> BaseException:
    if rank.error is None:
        where = f" on {rank.host}" if rank.host else ""
        hint = f"`%dist logs {state.job} --rank {rank.rank}` shows what it printed last"
        why = f"{rank.why or 'ended without an error message'}{_crash_site(paths, rank.rank)}"
        if not rank.ready and rank.node and (words := logs.last_words(paths.node(rank.node).launcher_log)):
            why += f", before its first line: {words}"
        if "no free inodes" not in why and has_no_inodes(paths.root):  # what it would have said of it had no place
            why += f"; the file system of {paths.root} has no free inodes: it holds too many files"
        return RankFailed(f"rank {rank.rank}{where} {why}", hint, rank=rank.rank)
    return marshal.load_exception(paths.error(rank.rank), memo, main_dict, rank.error)


def _crash_site(paths: JobPaths, rank: int) -> str:
    """The cell's line at which native code crashed, as ``faulthandler`` wrote it into the rank's log."""
    for log in logs.files(paths, rank, "err"):
        if found := _CRASH.search(logs.tail(log.path, CRASH_LINES)):
            return f" at {found[1]}, line {found[2]}"
    return ""


def _not_started(paths: JobPaths, state: JobState) -> BaseException:
    reason = state.reason or "the ranks could not be started"
    words = [logs.last_words(log) for log in sorted(paths.nodes.glob("*/launcher.log"))]
    told = "\n".join([reason, *(text for text in words if text and text not in reason)])
    return LaunchError(told, "correct the cause and run the cell again")


def _others(state: JobState, first: RankState | None) -> list[str]:
    """One line for each other rank that failed by itself, and one for all ranks stopped because of the failure."""
    if first is None:
        return []
    failed = [rank for rank in state.failures() if rank.rank != first.rank and rank.error is not None]
    where = f", on {first.host}" if first.host else ""
    lines = [f"rank {first.rank} failed first{where}:\n{first.error.text.rstrip()}"] if first.error else []
    lines += [f"rank {rank.rank} failed too: {_short(rank.error.title)}" for rank in failed[:SHOWN] if rank.error]
    if len(failed) > SHOWN:
        lines.append(f"{len(failed) - SHOWN} more ranks failed too")
    known = {first.rank, *(rank.rank for rank in failed)}
    stopped = sum(rank.state != "done" for rank in state.ranks.values() if rank.rank not in known)
    if stopped:
        lines.append(f"{stopped} other {'rank was' if stopped == 1 else 'ranks were'} stopped because of this")
    lines += [f"rank {rank.rank} {rank.why}" for rank in state.ranks.values() if rank.state == "done" and rank.why]
    return lines


def is_advice(note: str) -> bool:
    """Whether the note of an exception says what to do, as those do that are made here."""
    return any(words in note for words in (TAKE_ALONG, LEFT_BEHIND, MADE_BEFORE))


def _left_in_notebook(
    error: BaseException, text: str, main_dict: dict[str, Any], excluded: Container[str]
) -> list[str]:
    """Advice for a name that the notebook has and the rank had not. ``text`` is the traceback."""
    found = re.search(r"name '(\w+)' is not defined", str(error)) if isinstance(error, NameError) else None
    name = found[1] if found else ""
    if isinstance(error, KeyError) and error.args and re.search(r"\b(globals|locals|vars)\(\)", text):
        name = str(error.args[0])
    if name not in main_dict or name.startswith("__"):
        return []
    if name in excluded:
        return [f"{name} {LEFT_BEHIND}: create it in the cell before the line that uses it"]
    return [f"{name} is in the notebook, but no code names it: {TAKE_ALONG} {name}"]


def _short(title: str) -> str:
    line = title.partition("\n")[0]
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def add_note(error: BaseException, note: str) -> None:
    """``BaseException.add_note`` (PEP 678), also for Python 3.10, where some tools already read ``__notes__``."""
    notes = [*getattr(error, "__notes__", ()), note]
    try:
        error.__notes__ = notes  # type: ignore[attr-defined, unused-ignore]
    except AttributeError:
        return  # a class with slots and without ``__dict__``
