"""Creates a job's directory in one step: it is built as a draft, then renamed. Reads its files."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..protocol import codec
from ..protocol.bundle import Manifest
from ..protocol.disk import read_plain
from ..protocol.errors import JobNotFound
from ..protocol.events import Event, ProfileRequest
from ..protocol.paths import Home, JobPaths
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..protocol.typed import Malformed, Record
from .files import damaged, private, publish, publish_json, read_json, writing

Word = TypeVar("Word", bound=Record)


@contextlib.contextmanager
def creating(home: Home, job: str) -> Iterator[None]:
    """Use around storing a job's blobs and ``create_job``: meanwhile garbage collection removes no blobs.

    Raises ``StoreError`` if the data directory cannot be written. Always removes the draft.
    """
    draft = home.draft(job)
    try:
        private(home.root, home.jobs, draft.root)
        yield
    finally:
        shutil.rmtree(draft.root, ignore_errors=True)


def create_job(home: Home, spec: JobSpec, plan: Plan, manifest: Manifest, attempt: int | None = None) -> JobPaths:
    """Create the directory of a new job, with ``job.submitted`` in its journal.

    ``attempt``: of a job that another machine has started, and whose blobs stay there.

    Raises ``StoreError``, and ``DamagedJob`` if a blob of the manifest is missing. On an error nothing is left behind.
    """
    with creating(home, spec.job):
        draft, final = home.draft(spec.job), home.job(spec.job)
        private(draft.requests, draft.nodes, draft.results)
        publish_json(draft.spec, spec.to_json())
        publish_json(draft.plan, plan.to_json())
        publish_json(draft.manifest, manifest.to_json())
        lines = _submitted(spec, plan).to_line()
        if attempt is not None:
            began = {"attempt": attempt, "fresh": plan.fresh, "restarts": attempt - 1}
            lines += Event("job.starting", spec.created, seq=2, data=began).to_line()
        publish(draft.journal, lines)
        for blob in manifest.blobs if attempt is None else ():
            if not (path := home.blob(blob.digest)).exists():
                raise damaged(path, "it is missing")
        with writing(home.jobs):
            os.rename(draft.root, final.root)
        return final


def _submitted(spec: JobSpec, plan: Plan) -> Event:
    nodes = [node.name for node in plan.nodes]
    data = {"job": spec.job, "world_size": plan.world_size, "nodes": nodes, "name": spec.options.name}
    return Event("job.submitted", spec.created, seq=1, data={**data, "label": spec.label})


def read_spec(paths: JobPaths) -> JobSpec:
    """The job's specification. Raises ``JobNotFound``, or ``DamagedJob`` if the file is missing or invalid."""
    return _read(paths, paths.spec, JobSpec)


def read_plan(paths: JobPaths) -> Plan:
    """The job's plan. Raises ``JobNotFound``, or ``DamagedJob`` if the file is missing or invalid."""
    return _read(paths, paths.plan, Plan)


def read_manifest(paths: JobPaths) -> Manifest:
    """The job's manifest. Raises ``JobNotFound``, or ``DamagedJob`` if the file is missing or invalid."""
    return _read(paths, paths.manifest, Manifest)


def _read(paths: JobPaths, path: Path, kind: type[Word]) -> Word:
    if not paths.root.is_dir():
        raise JobNotFound(f"there is no job {paths.job}", "`%dist` lists the jobs")
    value = read_json(path)
    try:
        return kind.from_json(value)
    except Malformed as error:
        raise damaged(path, str(error)) from error


@dataclass(frozen=True)
class ClientRequest(Record):
    """What a client asks: ``interrupt``, ``terminate``, ``kill``, ``stacks``, or ``profile`` with its request."""

    kind: str
    profile: ProfileRequest | None = None


def taken_requests(paths: JobPaths) -> list[ClientRequest]:
    """Read and remove new requests of clients, the oldest first.

    User code can write to the directory: it may be missing, or contain anything.
    """
    try:
        names = sorted(name for name in os.listdir(paths.requests) if name.endswith(".json"))
    except OSError:
        return []
    found = []
    for file in [paths.requests / name for name in names]:
        with contextlib.suppress(OSError, ValueError):
            found.append(ClientRequest.from_json(codec.loads(read_plain(file))))
        with contextlib.suppress(OSError):
            file.unlink()
    return found
