"""How the ranks of a job reach each other, and when each entered its last collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..client.job import attach_to
from ..protocol.disk import open_plain
from ..protocol.errors import OptionError
from ..protocol.feed import Communication, Entered, Transports
from ..protocol.paths import Home, JobPaths
from ..protocol.plan import NodePlan, Plan
from ..store import logs, times

if TYPE_CHECKING:  # what reads dumps takes milliseconds to import, and most views ask nothing here
    from ..diagnosis.arrivals import Arrivals
    from ..diagnosis.dumps import Dump

HEAD = 512 * 1024
"""Bytes of a rank's log that are read for NCCL's lines. It writes them when the ranks connect."""

LINE = 1024 * 1024
"""Bytes of one dump; it has at most 100 collectives of each group."""


def record(paths: JobPaths, home: Home) -> None:
    """Have the ranks write what their recorders hold; nothing if the job has ended. Raises ``TorchDistError``."""
    attach_to(paths, home).ask_stacks()


def answer(paths: JobPaths, plan: Plan) -> Generator[None, None, dict[str, Any]]:
    """What the files of the job tell now. Goes on after each rank."""
    from ..diagnosis import arrivals, recorder

    found: list[Dump] = []
    told: list[Transports] = []
    printed = logs.evidence(paths) if plan.backend == "nccl" else []
    ahead = {node.name: times.ahead(paths.clock(node.name)) for node in plan.nodes}
    for node in plan.nodes:
        if plan.backend == "nccl":
            told.append(_transports(node, printed, len(plan.nodes) == 1))
        for rank in node.ranks:
            yield
            if (dump := _dump(paths.node(node.name).recorder(rank), rank, node.name)) is not None:
                found.append(replace(dump, time=dump.time - ahead[node.name]))
    yield
    of_now = recorder.of_one_moment(found)
    answer: Communication = {
        "transports": told,
        "calls": [_entered(one) for one in arrivals.of(found, ahead)],
        "time": max((dump.time for dump in of_now.values()), default=None),
        "silent": [rank for rank in range(plan.world_size) if rank not in of_now],
    }
    return {**answer}


def _entered(one: Arrivals) -> Entered:
    return {
        "name": one.name,
        "group": one.group,
        "ranks": list(one.at),
        "at": list(one.at.values()),
        "missing": list(one.missing),
        "ended": one.ended,
    }


def _dump(path: Path, rank: int, node: str) -> Dump | None:
    """The rank's last whole one. None for a file that user code has damaged."""
    from ..diagnosis import dumps

    with contextlib.suppress(OptionError):
        dump = dumps.read(path.name, logs.tail(path, 2, LINE).encode(), node)
        return dump if dump.rank == rank else None
    return None


def _transports(node: NodePlan, files: Sequence[logs.LogFile], alone: bool) -> Transports:
    from ..diagnosis import transports

    lines = (line for file in files if file.node == node.name for line in _lines(file))
    inside, outside = transports.of(lines, alone)
    return {"node": node.name, "inside": inside, "outside": outside}


def _lines(file: logs.LogFile) -> Iterator[str]:
    """NCCL's lines about channels, of what a rank printed or of NCCL's own log."""
    from ..diagnosis import transports

    if file.stream == logs.RECORDER:
        return
    with contextlib.suppress(OSError), open_plain(file.path) as opened:
        for line in opened.read(HEAD).split(b"\n"):
            if transports.MARK in line:
                yield logs.decode(line)
