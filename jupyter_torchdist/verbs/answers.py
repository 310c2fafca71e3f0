"""What the verbs find out and do: ``perform`` words it for people, ``--json`` gives it to programs."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..client import stacks
from ..client.drivers import pool
from ..client.job import Job, attach
from ..client.submit import Request, prepare
from ..protocol import codec
from ..protocol.errors import UserError
from ..protocol.machine.inventory import local_inventory
from ..protocol.typed import Record
from ..protocol.wire import agents
from ..store import catalog, gauges, logs, tracking
from . import defaults, doctor, hosts, profiled
from .diagnose import diagnose
from .exported import export
from .schema import (
    Agent,
    Checks,
    Findings,
    Jobs,
    Line,
    Node,
    Nodes,
    Planned,
    Removed,
    Shown,
    Stacks,
    Standing,
    Stopped,
    StoppedNode,
    Tracked,
    Tracks,
)
from .tracked import track

CANCEL_SECONDS = 10.0
"""How many seconds ``cancel`` waits in addition to the job's grace."""


def answers(arguments: argparse.Namespace) -> Iterator[Record]:
    """The objects of ``schema.OF_VERB`` for a verb that follows no job. Raises ``TorchDistError``."""
    verb = arguments.verb
    if verb == "jobs":
        yield Jobs(tuple(catalog.jobs()))
    elif verb == "show":
        yield shown(attach(arguments.job))
    elif verb == "logs":
        yield from lines(arguments)
    elif verb == "stacks":
        yield Stacks(tuple(stacks.of(attach(arguments.job))))
    elif verb == "profile":
        yield profiled.profile(arguments)
    elif verb == "diagnose":
        yield Findings(tuple(diagnose(arguments)))
    elif verb == "cancel":
        yield Standing.of(cancel(attach(arguments.job), arguments.kill).state)
    elif verb == "export":
        yield export(arguments)
    elif verb == "track":
        yield Tracks(Tracked.all_of(track(arguments)))
    elif verb == "rm":
        gone = [*remove(arguments), *collect(arguments)]
        jobs = itertools.chain.from_iterable(one.jobs for one in gone)
        yield Removed(tuple(jobs), sum(one.blobs for one in gone), sum(one.size for one in gone))
    elif verb == "nodes":
        yield Nodes(tuple(hosts.nodes(arguments)) if arguments.hosts else (this_machine(),))
    elif verb == "doctor":
        yield Checks(tuple(hosts.examine(arguments) if arguments.hosts else doctor.checks()))
    elif verb == "plan":
        yield plan(arguments.options)
    elif verb == "stop":
        yield (stopped := Stopped(tuple(hosts.stop(arguments)) if arguments.hosts else (stop_here(),)))
        hosts.raise_for(stopped.nodes)


def plain(answer: Record) -> Any:
    """An answer as JSON's own types."""
    return codec.plain(answer.to_json())


def text(answer: Record) -> str:
    """An answer as one line of ASCII."""
    return json.dumps(plain(answer), allow_nan=False, separators=(",", ":")) + "\n"


def shown(job: Job) -> Shown:
    """Everything about a job."""
    manifest = job.manifest
    tracked = Tracked.all_of(tracking.read(job.paths))
    return Shown(job.spec, job.plan, job.state, gauges.read(job.paths), manifest.receipt, manifest.notes, tracked)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """The lines of a job's logs, rank by rank. Raises ``UserError`` for a rank that the job does not have."""
    job = attach(arguments.job)
    checked_rank(job, arguments.rank)
    for file in logs.files(job.paths, arguments.rank, arguments.stream):
        for line in logs.selected(file.path, arguments.grep, arguments.tail):
            yield Line(file.rank, file.stream, line.removesuffix("\n"))


def checked_rank(job: Job, rank: int | None) -> None:
    """Raises ``UserError`` for a rank that the job does not have."""
    if rank is not None and rank not in range(job.plan.world_size):
        raise UserError(f"job {job.id} has no rank {rank}", f"its ranks are 0 to {job.plan.world_size - 1}")


def cancel(job: Job, kill: bool) -> Job:
    """Ask a job that runs to stop, and wait: for its grace and a little longer."""
    if not job.state.final:
        if kill:
            job.kill()
        else:
            job.interrupt()
        with contextlib.suppress(TimeoutError):
            job.wait(job.spec.options.grace + CANCEL_SECONDS)
    return job


def remove(arguments: argparse.Namespace) -> Iterator[Removed]:
    """Remove the jobs that were named, one by one. Raises ``UserError`` where none is named, and no limit is given."""
    if not arguments.jobs and arguments.older is None and arguments.keep_bytes is None:
        raise UserError("rm: which jobs?", "name them, or give --older 7d, or --keep-bytes 10G")
    for paths in [catalog.find(name) for name in arguments.jobs]:
        size = catalog.size_of(paths)
        catalog.remove(paths)
        yield Removed((paths.job,), 0, size)


def collect(arguments: argparse.Namespace) -> Iterator[Removed]:
    """Remove what is beyond the limits, where limits are given."""
    if arguments.older is not None or arguments.keep_bytes is not None:
        gone = catalog.collect_garbage(max_age=arguments.older, max_bytes=arguments.keep_bytes)
        yield Removed(gone.jobs, gone.blobs, gone.size)


def this_machine() -> Node:
    """Its resources, and our processes on it."""
    inventory = local_inventory()
    found = [Agent.of(one["process"]["pid"], one["jobs"], one["warm"]) for one in agents.running()]
    return Node(inventory.host, inventory, tuple(found))


def plan(options: list[str]) -> Planned:
    """What the options would run."""
    chosen = defaults.options(options, Path.cwd())
    prepared = prepare(Request(source="pass\n", label="plan", options=chosen))
    return Planned(prepared.plan, notes=prepared.capture.notes)


def stop_here() -> StoppedNode:
    """End the warm processes of this machine."""
    pool().close()
    found = agents.stop()
    warm = sum(len(welcome["warm"]) for welcome in found)
    busy = tuple(job for welcome in found for job in welcome["jobs"])
    return StoppedNode(socket.gethostname(), warm, busy)
