"""Which GPUs have a job of this user. A running job's plan is its lease, so no separate lease file can be left over."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ..protocol.errors import JobNotFound, StoreError
from ..protocol.paths import Home, JobPaths, runtime_dir
from ..protocol.plan import is_open
from ..store import catalog, jobdir, journal
from ..store.files import private, writing


@dataclass(frozen=True)
class Holder:
    """A running job, the UUIDs of its GPUs (the same on every host) and the process ids of its ranks."""

    paths: JobPaths
    gpus: frozenset[str]
    pids: frozenset[int]


def holders(home: Home) -> list[Holder]:
    """The jobs that hold GPUs now. Raises ``StoreError``."""
    found = []
    for summary in catalog.jobs(home):
        if summary.final:
            continue
        paths = home.job(summary.job)
        try:
            plan, state = jobdir.read_plan(paths), journal.state(paths)
        except (StoreError, JobNotFound):
            continue
        if gpus := frozenset(gpu for node in plan.nodes for gpu in node.gpus if not is_open(gpu)):
            found.append(Holder(paths, gpus, frozenset(rank.pid for rank in state.ranks.values())))
    return found


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """A lock for one kernel of this machine, from choosing GPUs until the job with these GPUs is in the store."""
    path = private(runtime_dir()) / "choosing.lock"
    with writing(path.parent):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with writing(path.parent):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
