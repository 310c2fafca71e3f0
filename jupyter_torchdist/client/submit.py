"""Turns a user's request into a running job: check, capture, plan, pack, write, hand over to a driver."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import capture as capturing
from ..launchers import registry
from ..marshal.portable import is_ours
from ..planning import software
from ..planning.topology import make_plan, usable
from ..protocol import trees
from ..protocol.bundle import Manifest
from ..protocol.errors import OptionError, ResourceError
from ..protocol.hosts import known_hosts
from ..protocol.machine import inventory, tickets
from ..protocol.paths import Home, JobPaths, queue_dir
from ..protocol.paths import home as default_home
from ..protocol.plan import Inventory, Plan, is_open, open_gpu
from ..protocol.spec import LOCAL, PROGRAMS, SSH, JobSpec, Options
from ..store import catalog, jobdir
from ..store.blobs import blob_store
from ..trackers import registry as trackers
from . import leases, start_notes
from .drivers import DriverPool
from .drivers import pool as default_pool
from .git import git_state
from .job import Job, attach_to
from .rehearse import copy_fits, memory_plan
from .world import chosen_variables, world_here

if TYPE_CHECKING:
    from ..capture import Capture
    from ..protocol.memory import MemoryPlan


@dataclass(frozen=True)
class Request:
    """What to run, as the user gave it.

    ``kind`` is ``cell`` (``source`` with names of ``namespace``), ``function`` (``function`` with ``args`` and
    ``kwargs``), ``script`` (``source`` is the file's text, ``label`` its path), ``module`` (``source`` is the
    module's name) or ``command``. ``argv`` is the program's ``sys.argv``.
    """

    source: str = ""
    label: str = ""
    first_line: int = 1
    """The line number of ``source``'s first line that the user sees."""
    options: Options = field(default_factory=Options)
    namespace: Mapping[str, Any] = field(default_factory=dict)
    """The dictionary that is the globals of the notebook's functions."""
    hidden: frozenset[str] = frozenset()
    """Names in ``namespace`` that do not belong to the user."""
    kind: str = "cell"
    flags: int = 0
    """Compiler flags of the notebook's ``from __future__`` imports."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """File name of an earlier cell's code -> its name in tracebacks, such as ``Cell In[3]``."""
    argv: tuple[str, ...] = ()
    notebook: str = ""
    cwd: Path | None = None
    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedJob:
    """A job ready to run: ``--plan`` prints its plan and the capture's receipt, ``submit`` runs it."""

    spec: JobSpec
    capture: Capture
    plan: Plan
    cwd: Path
    home: Home

    def memory(self) -> MemoryPlan | None:
        """The memory that the strategy needs and the memory available; None without a strategy.

        Runs a rehearsal (seconds) and stores the captured data. Raises ``StoreError``.
        """
        return memory_plan(self.spec, self.capture, self.plan, self.cwd, self.home)


def prepare(request: Request, home: Home | None = None) -> PreparedJob:
    """Check, capture and plan; nothing is started and nothing written.

    Exception: with ``--strategy auto`` on GPUs, a rehearsal of the first step finds out whether a complete copy fits.

    Raises ``OptionError``, ``CellSyntaxError``, ``UndefinedName``, ``CaptureError``, ``ResourceError`` or
    ``LaunchError``.
    """
    home = home or default_home()
    cwd = request.cwd or Path.cwd()
    trackers.check(request.options.track, {**os.environ, **chosen_variables(request.options)})
    options = _with_known_hosts(request.options)
    if options.wait and (options.launcher != LOCAL or options.replace or options.ranks is not None):
        raise OptionError("--wait waits for GPUs of this machine", "leave out --ranks, --replace, --hosts, --launcher")
    if options.sync and options.launcher == LOCAL:
        raise OptionError("--sync copies a directory to hosts", "leave it out, or name --hosts")
    if options.env_sync and options.launcher != SSH:
        raise OptionError("--env-sync installs packages on hosts", "leave it out, or name --hosts")
    options = replace(options, sync=tuple(trees.checked(one, cwd) for one in options.sync))
    if options.checkpoint is not None:  # a rerun may start in another directory but uses the same checkpoint
        options = replace(options, checkpoint=str((cwd / Path(options.checkpoint).expanduser()).absolute()))
    spec = JobSpec(
        job=new_job_id(),
        kind=request.kind,
        source=request.source,
        label=request.label,
        first_line=request.first_line,
        options=options,
        created=time.time(),
        argv=request.argv,
        notebook=request.notebook,
        git=git_state(cwd) if options.track else {},
    )
    began = time.monotonic()
    inventories = _inventories(options)
    asked = time.monotonic() - began if options.hosts else 0.0
    capture = _capture(request, cwd, portable=not all(is_ours(one.python) for one in inventories if one.python))
    capture = _compared(replace(capture, notes=(*options.ignored, *capture.notes)), _synced(options, inventories))
    plan = _plan(spec, home, inventories, lambda first: copy_fits(spec, capture, first, cwd, home, inventories[0]))
    capture = replace(capture, notes=(*capture.notes, *start_notes.notes(plan, inventories)))
    return PreparedJob(spec, capture, replace(plan, asked=asked), cwd, home)


def submit(
    request: Request,
    home: Home | None = None,
    pool: DriverPool | None = None,
    starting: Callable[[], None] = lambda: None,
) -> Job:
    """Run the request. Returns when a driver has taken the job.

    ``starting`` is called just before the job is created: from there on the caller should hold back interrupts.

    Raises what ``prepare`` raises, ``StoreError`` and ``LaunchError``. Then nothing runs, and the only files left are
    captured data that the next cell may use.
    """
    home = home or default_home()
    prepared = prepare(request, home)
    with jobdir.creating(home, prepared.spec.job):
        manifest = capturing.pack(prepared.capture, prepared.spec.job, blob_store(home).put)
        starting()
        job = launch_bundle(prepared.spec, manifest, prepared.plan, prepared.cwd, home, pool)
    job.memo = prepared.capture.memo
    return job


def launch_bundle(
    spec: JobSpec, manifest: Manifest, plan: Plan, cwd: Path, home: Home, pool: DriverPool | None = None
) -> Job:
    """Run a job whose bundle is already stored. Raises ``StoreError``, ``ResourceError``, ``LaunchError``."""
    pool = pool or default_pool()
    plan = replace(plan, sync=spec.options.sync, cwd=str(cwd) if spec.options.sync else "")
    try:
        with leases.choosing() if _on_gpus(spec, plan) else contextlib.nullcontext():
            if _on_gpus(spec, plan):
                plan = _free(spec, plan, home, pool)
            paths = jobdir.create_job(home, spec, plan, manifest)
        return _handed_over(spec, manifest, plan, cwd, paths, home, pool)
    except BaseException:
        tickets.leave(spec.job)
        raise


def _handed_over(
    spec: JobSpec, manifest: Manifest, plan: Plan, cwd: Path, paths: JobPaths, home: Home, pool: DriverPool
) -> Job:
    job = Job(paths, spec, plan, manifest, home=home, pool=pool)
    try:
        world = world_here(spec.options, cwd)
        pool.hand(paths, home.blobs, world, lambda: job.state.driver is not None)
    except KeyboardInterrupt:
        job.kill()
        raise
    except BaseException:
        catalog.discard(paths)
        raise
    return job


def rerun(
    which: str | Job,
    home: Home | None = None,
    pool: DriverPool | None = None,
    cwd: Path | None = None,
    env: Sequence[str] = (),
) -> Job:
    """Run the bundle of a job again, as a new job; ``which`` is a job, an id, the beginning of an id, or a name.

    The new job runs in ``cwd`` (default: this process's directory) on newly chosen GPUs. ``env``: variables for its
    ranks, ``NAME`` or ``NAME=VALUE``, beside the ones of the earlier job's ``--env``; a name in both has this value.
    Raises ``JobNotFound``, ``DamagedJob`` (the captured data is missing), and what ``submit`` raises.
    """
    home = home or default_home()
    earlier = which if isinstance(which, Job) else attach_to(catalog.find(which, home), home, pool)
    trackers.check(earlier.spec.options.track, os.environ)
    given = {item.partition("=")[0] for item in env}
    kept = tuple(item for item in earlier.spec.options.env if item.partition("=")[0] not in given)
    options = replace(earlier.spec.options, env=(*kept, *env))
    spec = replace(earlier.spec, options=options, job=new_job_id(), created=time.time(), rerun_of=earlier.spec.job)
    with jobdir.creating(home, spec.job):
        for blob in earlier.manifest.blobs:
            blob_store(home).verify(blob)
        manifest = replace(earlier.manifest, job=spec.job)
        plan = _planned_anew(earlier.plan, spec, home, _inventories(spec.options))
        return launch_bundle(spec, manifest, plan, cwd or Path.cwd(), home, pool)


def _planned_anew(earlier: Plan, spec: JobSpec, home: Home, inventories: Sequence[Inventory]) -> Plan:
    """A plan on GPUs that are free now. With as many ranks as before it keeps the strategy, which a capture chose."""
    plan = _plan(spec, home, inventories)
    return replace(plan, strategy=earlier.strategy) if plan.world_size == earlier.world_size else plan


def _on_gpus(spec: JobSpec, plan: Plan) -> bool:
    """Whether we choose the GPUs. An engine that chooses them itself gives each to one job only."""
    gpus = [gpu for node in plan.nodes for gpu in node.gpus]
    return any(spec.options.launcher == LOCAL or not is_open(gpu) for gpu in gpus)


def _free(spec: JobSpec, plan: Plan, home: Home, pool: DriverPool) -> Plan:
    """The plan on GPUs that are free now: another kernel may have taken some while this kernel packed.

    With ``--replace``, jobs that hold the planned GPUs are ended first. With ``--wait`` the GPUs may be left open.
    """
    inventories = _inventories(spec.options)
    if spec.options.launcher == LOCAL:
        gpus = tuple(gpu.uuid for gpu in usable(spec.options, inventories[0]))
        entered = tickets.enter(tickets.Asked(spec.job, plan.world_size, gpus, (os.getpid(),)))
        if spec.options.wait and not entered:
            raise ResourceError(
                f"--wait: {queue_dir()} cannot be used, where the jobs of this machine have their places",
                "leave --wait out; or an administrator makes the directory, with mode 1777",
            )
    if spec.options.replace:
        wanted = {gpu for node in plan.nodes for gpu in node.gpus}
        for holder in leases.holders(home):
            if wanted & holder.gpus:
                earlier = attach_to(holder.paths, home, pool)
                earlier.kill()
                earlier.wait()
        inventories = _inventories(spec.options)
    plan = _planned_anew(plan, spec, home, inventories)
    if not any(is_open(gpu) for node in plan.nodes for gpu in node.gpus):
        tickets.grant(spec.job, plan.nodes[0].gpus)
    return plan


def new_job_id() -> str:
    """``YYYYMMDD-HHMMSS-xxxxxx``, local time and 24 random bits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _capture(request: Request, cwd: Path, *, portable: bool) -> Capture:
    if request.kind == "function":
        return capturing.capture_call(
            request.function, request.args, request.kwargs, cwd=cwd, labels=request.labels, portable=portable
        )
    script = request.kind in PROGRAMS  # a rank runs the file itself: this process has none of its names
    return capturing.capture_cell(
        "" if script else request.source,
        request.label,
        request.first_line,
        {} if script else request.namespace,
        include=request.options.include,
        exclude=request.options.exclude,
        hidden=request.hidden,
        flags=request.flags,
        cwd=cwd,
        labels=request.labels,
        stateless=script,
        portable=portable,
    )


def _compared(capture: Capture, inventories: Sequence[Inventory]) -> Capture:
    """With a note on packages of hosts that differ. Raises ``ResourceError`` for one that a host lacks."""
    hosts = [one for one in inventories if one.software is not None]
    if not hosts:
        return capture
    packages = capturing.packages(capture)
    note = software.compare(packages, platform.python_version(), inventory.installed("torch"), hosts)
    return replace(capture, packages=packages, notes=(*capture.notes, *filter(None, [note])))


def _synced(options: Options, inventories: Sequence[Inventory]) -> list[Inventory]:
    """The hosts as they are when the ranks start."""
    here = capturing.installed() if options.env_sync else {}
    return [software.after_sync(here, one) if here else one for one in inventories]


def _with_known_hosts(options: Options) -> Options:
    """With ``--remote``: the hosts to choose among. Where no host is known, the job runs on this machine."""
    if not options.remote or options.hosts or options.launcher not in (LOCAL, SSH):
        return options
    hosts = known_hosts(options.host_option)
    if not hosts:
        note = "--remote: no host is known, so the job runs here; write hosts below [hosts] in torchdist.toml"
        return replace(options, ignored=(*options.ignored, note))
    return replace(options, hosts=hosts, launcher=SSH)


def _inventories(options: Options) -> tuple[Inventory, ...]:
    return registry.launcher(options.launcher).probe(options, {**os.environ, **chosen_variables(options)})


def _plan(
    spec: JobSpec, home: Home, inventories: Sequence[Inventory], fits: Callable[[Plan], bool | None] | None = None
) -> Plan:
    inventories = [_without_own(one, home) for one in inventories]
    any_gpu = any(inventory.gpus for inventory in inventories)
    holders = leases.holders(home) if any_gpu and spec.options.ranks is None else []
    own = set() if spec.options.hosts else {os.getpid()}
    if spec.options.replace:  # their GPUs will be free: ``submit`` ends these jobs before it starts the new one
        own.update(pid for holder in holders for pid in holder.pids)
        holders = []
    busy = {gpu: holder.paths.job for holder in holders for gpu in holder.gpus}
    if any_gpu and spec.options.ranks is None and spec.options.launcher == LOCAL:
        return _plan_in_turn(spec, inventories[0], busy, own, fits)
    plan = make_plan(spec, inventories, busy=busy, own=own, fits=fits)
    if spec.options.env_sync:
        plan = software.with_packages(plan, capturing.installed(), inventories)
    return registry.launcher(spec.options.launcher).planned(plan, spec.options, inventories)


def _without_own(inventory: Inventory, home: Home) -> Inventory:
    """The inventory without the word of jobs of this home that they have a GPU: ``leases`` knows that better."""
    ours = {gpu for gpu in inventory.gpus if gpu.job and home.job(gpu.job.partition(" ")[0]).root.exists()}
    return replace(inventory, gpus=tuple(replace(gpu, job="") if gpu in ours else gpu for gpu in inventory.gpus))


def _plan_in_turn(
    spec: JobSpec, here: Inventory, busy: dict[str, str], own: set[int], fits: Callable[[Plan], bool | None] | None
) -> Plan:
    """The plan on GPUs of this machine for which nobody waits. With ``--wait`` they are left open if there are none."""
    try:
        gpus = [gpu.uuid for gpu in usable(spec.options, here)]
        if first := tickets.ahead(spec.job, gpus, tickets.counting()):
            raise ResourceError(
                f"the GPUs of {here.host} have a queue of {len(first)}, and the first is job {first[0].whose}",
                "--wait takes the next place in it",
            )
        return make_plan(spec, [here], busy=busy, own=own, fits=fits)
    except ResourceError:
        if not spec.options.wait:
            raise
    everyone = {pid for gpu in here.gpus for pid in gpu.pids}
    here = replace(here, gpus=tuple(replace(gpu, job="") for gpu in here.gpus))
    plan = make_plan(spec, [here], own=everyone, fits=fits)
    (node,) = plan.nodes
    left_open = tuple(open_gpu(index).uuid for index in range(len(node.gpus)))
    return replace(plan, nodes=(replace(node, gpus=left_open),))
