"""A job that another machine has started on hosts, taken over by this machine: what is needed comes from the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..launchers.ssh import launcher
from ..protocol import codec
from ..protocol.bundle import Manifest
from ..protocol.errors import JobNotFound, LaunchError
from ..protocol.hosts import Host
from ..protocol.paths import Home
from ..protocol.paths import home as default_home
from ..protocol.plan import Inventory, Plan
from ..protocol.spec import JobSpec
from ..protocol.wire.messages import Copied
from ..store import catalog, jobdir, journal
from .drivers import DriverPool
from .drivers import pool as default_pool
from .job import Job, attach, attach_to

Copies = Sequence[tuple[Inventory, Copied]]


def take_over(
    text: str, hosts: Sequence[Host], settings: Sequence[str], home: Home | None = None, pool: DriverPool | None = None
) -> Job:
    """The job with this id, beginning of an id, or name, which runs or has run on ``hosts``; this machine drives it.

    ``settings`` are those of ``--host-option``. A job that this machine drives is only attached.

    Raises ``JobNotFound``, ``LaunchError`` and ``StoreError``.
    """
    home = home or default_home()
    try:
        paths = catalog.find(text, home)
    except JobNotFound:
        paths = None
    if paths is not None and journal.state(paths).state != "lost":
        return attach(paths.job, home, pool)
    copies = launcher.copies(hosts, text)
    _check(text, copies)
    spec, plan, manifest = _read(copies[0][1])
    names = tuple(inventory.host for inventory, _ in copies)
    options = replace(spec.options, hosts=names, host_option=tuple(settings))
    plan = _planned(plan, copies)
    if paths is not None:
        catalog.discard(paths)
    attempt = max(copied.attempt for _, copied in copies)
    paths = jobdir.create_job(home, replace(spec, options=options), plan, manifest, attempt)
    (pool or default_pool()).attach(paths)
    return attach_to(paths, home, pool)


def _check(text: str, copies: Copies) -> None:
    """Raises ``JobNotFound`` unless all hosts have a part of one job, and of the same."""
    found: dict[str, list[str]] = {}
    for inventory, copied in copies:
        if not copied.jobs:
            raise JobNotFound(
                f"{inventory.host} has nothing of a job {text!r}",
                "a host keeps a job until its results were fetched; leave out hosts that did not run it",
            )
        for job in copied.jobs:
            found.setdefault(job, []).append(inventory.host)
    if len(found) > 1:
        words = "; ".join(f"{job} on {', '.join(hosts)}" for job, hosts in found.items())
        raise JobNotFound(f"{text!r} may be several jobs: {words}", "give more of the id")


def _read(copied: Copied) -> tuple[JobSpec, Plan, Manifest]:
    try:
        spec, plan, manifest = (codec.loads(copied.files[name]) for name in ("spec.json", "plan.json", "manifest.json"))
        return JobSpec.from_json(spec), Plan.from_json(plan), Manifest.from_json(manifest)
    except (LookupError, ValueError) as error:
        why = f"what the hosts have of job {copied.jobs[0]} cannot be read: {error}"
        raise LaunchError(why, "take it over with the release of jupyter_torchdist that started it") from None


def _planned(plan: Plan, copies: Copies) -> Plan:
    """The plan as this machine reaches its nodes. Raises ``JobNotFound`` if a node is missing among ``copies``."""
    reached = {copied.node: inventory for inventory, copied in copies}
    if missing := [node.called for node in plan.nodes if node.name not in reached]:
        hosts = ", ".join(missing)
        raise JobNotFound(f"job {plan.job} runs on {hosts} as well", "name all of its hosts in --hosts")
    own = [reached[node.name] for node in plan.nodes]
    nodes = tuple(replace(node, host=here.host, reach=here.reach) for node, here in zip(plan.nodes, own, strict=True))
    return replace(plan, nodes=nodes, driver=1 + max(copied.driver for _, copied in copies))
