"""The verbs that produce text, for a cell and for a shell."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..client import stacks
from ..client.drivers import pool
from ..client.job import Job, attach
from ..client.submit import Request, prepare
from ..protocol import codec
from ..protocol.errors import UserError
from ..protocol.inventory import local_inventory
from ..protocol.wire import agents
from ..store import catalog, gauges, logs
from ..views import job_text, plan_tables, stack_text, wording
from . import ansi, defaults, doctor, hosts
from .diagnose import diagnose
from .exported import export

CANCEL_SECONDS = 10.0
"""How many seconds ``cancel`` waits in addition to the job's grace."""


def perform(arguments: argparse.Namespace) -> Iterator[str]:
    """The text of a verb in pieces that end with a newline, safe for a terminal. Raises ``TorchDistError``."""
    verbs = {
        "jobs": _jobs,
        "show": _show,
        "logs": _logs,
        "stacks": _stacks,
        "diagnose": diagnose,
        "cancel": _cancel,
        "export": export,
        "rm": _remove,
        "nodes": _nodes,
        "doctor": _doctor,
        "plan": _plan,
        "stop": _stop,
    }
    return map(ansi.safe, verbs[arguments.verb](arguments))


def _jobs(arguments: argparse.Namespace) -> Iterator[str]:
    found = catalog.jobs()
    if arguments.json:
        yield codec.dumps([vars(summary) for summary in found]) + "\n"
    else:
        yield job_text.jobs_table(found, time.time()) + "\n"


def _show(arguments: argparse.Namespace) -> Iterator[str]:
    job = attach(arguments.job)
    taken = gauges.read(job.paths)
    if arguments.json:
        words: dict[str, Any] = {"spec": job.spec.to_json(), "plan": job.plan.to_json(), "state": job.state.to_json()}
        words["gauges"] = {str(rank): one.to_json() for rank, one in taken.items()}
        yield codec.dumps({**words, "manifest": job.manifest.to_json()}) + "\n"
    else:
        yield job_text.job_page(job.state, job.spec, job.plan, job.manifest, time.time(), taken) + "\n"


def _logs(arguments: argparse.Namespace) -> Iterator[str]:
    job = attach(arguments.job)
    files = logs.files(job.paths, arguments.rank, arguments.stream)
    if arguments.rank is not None and arguments.rank not in range(job.plan.world_size):
        raise UserError(f"job {job.id} has no rank {arguments.rank}", f"its ranks are 0 to {job.plan.world_size - 1}")
    for file in files:
        for line in logs.selected(file.path, arguments.grep, arguments.tail):
            text = ansi.safe(line.removesuffix("\n")) + "\n"
            yield logs.labelled(file.rank, text) if arguments.rank is None else text


def _stacks(arguments: argparse.Namespace) -> Iterator[str]:
    found = stacks.of(attach(arguments.job))
    if arguments.json:
        yield codec.dumps([vars(stack) for stack in found]) + "\n"
    else:
        yield (stack_text.full(found) if arguments.full else stack_text.grouped(found)) + "\n"


def _cancel(arguments: argparse.Namespace) -> Iterator[str]:
    job = attach(arguments.job)
    if job.state.final:
        yield f"{job_text.title(job.state)} has ended already: {job_text.state_word(job.state)}\n"
        return
    if arguments.kill:
        job.kill()
    else:
        job.interrupt()
    yield f"{ended(job)}\n"


def ended(job: Job) -> str:
    """Wait for a job that was asked to stop, and say how it ended."""
    try:
        state = job.wait(job.spec.options.grace + CANCEL_SECONDS)
    except TimeoutError:
        return f"{job_text.title(job.state)} was asked to stop but still runs: `%dist cancel {job.id} --kill`"
    return f"{job_text.title(state)}: {job_text.headline(state, time.time())}"


def _remove(arguments: argparse.Namespace) -> Iterator[str]:
    limits = arguments.older is not None or arguments.keep_bytes is not None
    if not arguments.jobs and not limits:
        raise UserError("rm: which jobs?", "name them, or give --older 7d, or --keep-bytes 10G")
    for paths in [catalog.find(text) for text in arguments.jobs]:
        catalog.remove(paths)
        yield f"removed {paths.job}\n"
    if limits:
        gone = catalog.collect_garbage(max_age=arguments.older, max_bytes=arguments.keep_bytes)
        what = f"{wording.count(len(gone.jobs), 'job')} and {wording.count(gone.blobs, 'blob')}"
        yield f"removed {what}: {wording.size(gone.size)}\n"


def _nodes(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.hosts:
        yield from hosts.nodes(arguments)
        return
    yield plan_tables.inventory_table([local_inventory()]) + "\n"
    found = agents.running()
    for welcome in found:
        jobs = f", running {', '.join(welcome['jobs'])}" if welcome["jobs"] else ""
        yield f"  agent {welcome['process']['pid']}{jobs}\n"
        for warm in welcome["warm"]:
            yield f"    warm process {warm['pid']} ({'ready' if warm['ready'] else 'starting'}), {warm['python']}\n"
    if not found:
        yield "  no warm processes\n"


def _doctor(arguments: argparse.Namespace) -> Iterator[str]:
    levels = []
    for check in hosts.examine(arguments) if arguments.hosts else doctor.checks():
        levels.append(check.level)
        yield doctor.line(check)
    yield f"\n{doctor.summary(levels)}\n"


def _plan(arguments: argparse.Namespace) -> Iterator[str]:
    options = defaults.options(arguments.options, Path.cwd())
    yield plan_tables.plan_table(prepare(Request(source="pass\n", label="plan", options=options)).plan) + "\n"


def _stop(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.hosts:
        yield from hosts.stop(arguments)
        return
    pool().close()
    found = agents.stop()
    warm = list(itertools.chain.from_iterable(welcome["warm"] for welcome in found))
    busy = [job for welcome in found for job in welcome["jobs"]]
    yield f"ended {wording.count(len(warm), 'warm process', 'warm processes')}\n"
    if busy:
        yield f"still running: {', '.join(busy)}; their agent ends after them\n"
