"""The verbs in words, for a cell and for a shell."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from ..client import profiles, stacks
from ..client.job import attach
from ..store import catalog, gauges, logs, tracking
from ..views import finding_text, host_text, job_text, plan_tables, stack_text, wording
from . import ansi, answers, doctor, hosts, profiled
from .diagnose import diagnose
from .exported import export
from .tracked import track


def perform(arguments: argparse.Namespace) -> Iterator[str]:
    """The text of a verb in pieces that end with a newline, safe for a terminal. Raises ``TorchDistError``."""
    if arguments.json:
        return map(answers.text, answers.answers(arguments))
    verbs = {
        "jobs": _jobs,
        "show": _show,
        "logs": _logs,
        "stacks": _stacks,
        "profile": _profile,
        "diagnose": _diagnose,
        "cancel": _cancel,
        "export": _export,
        "track": _track,
        "rm": _remove,
        "nodes": _nodes,
        "doctor": _doctor,
        "plan": _plan,
        "stop": _stop,
    }
    return map(ansi.safe, verbs[arguments.verb](arguments))


def _jobs(arguments: argparse.Namespace) -> Iterator[str]:
    yield job_text.jobs_table(catalog.jobs(), time.time()) + "\n"


def _show(arguments: argparse.Namespace) -> Iterator[str]:
    job = attach(arguments.job)
    taken = gauges.read(job.paths)
    tracked = tracking.lines(job.paths)
    yield job_text.job_page(job.state, job.spec, job.plan, job.manifest, time.time(), taken, tracked) + "\n"
    if found := profiles.last(job):
        yield f"\nprofile:\n{profiled.text(found)}\n"


def _logs(arguments: argparse.Namespace) -> Iterator[str]:
    for line in answers.lines(arguments):
        shown = ansi.safe(line.text) + "\n"
        yield logs.labelled(line.rank, shown) if arguments.rank is None else shown


def _stacks(arguments: argparse.Namespace) -> Iterator[str]:
    found = stacks.of(attach(arguments.job))
    yield (stack_text.full(found) if arguments.full else stack_text.grouped(found)) + "\n"


def _profile(arguments: argparse.Namespace) -> Iterator[str]:
    yield profiled.text(profiled.profile(arguments)) + "\n"


def _diagnose(arguments: argparse.Namespace) -> Iterator[str]:
    yield finding_text.findings(diagnose(arguments)) + "\n"


def _cancel(arguments: argparse.Namespace) -> Iterator[str]:
    job = attach(arguments.job)
    if job.state.final:
        yield f"{job_text.title(job.state)} has ended already: {job_text.state_word(job.state)}\n"
        return
    state = answers.cancel(job, arguments.kill).state
    if state.final:
        yield f"{job_text.title(state)}: {job_text.headline(state, time.time())}\n"
    else:
        yield f"{job_text.title(state)} was asked to stop but still runs: `%dist cancel {job.id} --kill`\n"


def _export(arguments: argparse.Namespace) -> Iterator[str]:
    found = export(arguments)
    where = found.directory
    yield f"wrote {where}; README.md there says how to run it: `{where}/run.sh`, `sbatch job.sbatch`\n"
    for note in found.notes:
        yield f"note: {note}\n"


def _track(arguments: argparse.Namespace) -> Iterator[str]:
    for one in track(arguments):
        yield f"{one.line}\n"


def _remove(arguments: argparse.Namespace) -> Iterator[str]:
    for one in answers.remove(arguments):
        yield f"removed {', '.join(one.jobs)}\n"
    for one in answers.collect(arguments):
        what = f"{wording.count(len(one.jobs), 'job')} and {wording.count(one.blobs, 'blob')}"
        yield f"removed {what}: {wording.size(one.size)}\n"


def _nodes(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.hosts:
        rows = []
        for node in hosts.nodes(arguments):
            if node.inventory is not None:
                rows.append(host_text.row(node.inventory, node.clock, node.agents[0].jobs, node.kept))
            elif node.error is not None:
                rows.append(host_text.failed_row(node.host, node.error.message, node.error.hint))
        yield host_text.hosts_table(rows) + "\n"
        return
    here = answers.this_machine()
    if here.inventory is not None:
        yield plan_tables.inventory_table([here.inventory]) + "\n"
    for agent in here.agents:
        jobs = f", running {', '.join(agent.jobs)}" if agent.jobs else ""
        yield f"  agent {agent.pid}{jobs}\n"
        for warm in agent.warm:
            yield f"    warm process {warm.pid} ({'ready' if warm.ready else 'starting'}), {warm.python}\n"
    if not here.agents:
        yield "  no warm processes\n"


def _doctor(arguments: argparse.Namespace) -> Iterator[str]:
    levels = []
    for check in hosts.examine(arguments) if arguments.hosts else doctor.checks():
        levels.append(check.level)
        yield doctor.line(check)
    yield f"\n{doctor.summary(levels)}\n"


def _plan(arguments: argparse.Namespace) -> Iterator[str]:
    yield plan_tables.plan_table(answers.plan(arguments.options).plan) + "\n"


def _stop(arguments: argparse.Namespace) -> Iterator[str]:
    if not arguments.hosts:
        done = answers.stop_here()
        yield f"ended {wording.count(done.warm, 'warm process', 'warm processes')}\n"
        if done.jobs:
            yield f"still running: {', '.join(done.jobs)}; their agent ends after them\n"
        return
    nodes = []
    for node in hosts.stop(arguments):
        nodes.append(node)
        if node.error is None:
            yield host_text.removed(node.host, node.warm, node.removed, node.kept) + "\n"
    hosts.raise_for(nodes)
