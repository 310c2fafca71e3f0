"""Fakes that honour the contracts: a job directory filled by hand, and a driver that runs the ranks one after another.

``FakeJob`` writes the same files as a driver and its ranks. ``python -m jupyter_torchdist.testing --zygote`` starts
drivers without agent, torch or parallel ranks, for tests of all code that starts jobs and reads them.
``FakeLauncher`` is an engine with a queue, for tests of launchers; its ranks are real.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import marshal
from .driver.zygote import forking, serve
from .launchers.base import EngineState
from .launchers.local import LocalLauncher
from .protocol import codec
from .protocol.bundle import Manifest
from .protocol.errors import LaunchError
from .protocol.events import ErrorRecord, Event, Finding
from .protocol.gauges import Gauges
from .protocol.paths import Home, JobPaths
from .protocol.paths import home as default_home
from .protocol.plan import Inventory, NodePlan, Plan
from .protocol.process import ProcessId, exit_in_words
from .protocol.spec import JobSpec, Options
from .protocol.wire.channel import Channel
from .ranks import execution
from .store import jobdir, journal, liveness
from .store.blobs import BlobStore
from .store.files import publish_json
from .usercode.source import remember_cell

NODE = "node0"


def a_spec(job: str = "20260102-030405-0a0b0c", **changes: Any) -> JobSpec:
    """A specification of a job with two CPU ranks; ``changes`` replace its fields."""
    fields: dict[str, Any] = {
        "job": job,
        "kind": "cell",
        "source": "pass\n",
        "label": "Cell In[1]",
        "first_line": 2,
        "options": Options(ranks=2),
        "created": 1_000_000.0,
    }
    return JobSpec(**{**fields, **changes})


def a_plan(spec: JobSpec, nodes: int = 1, **changes: Any) -> Plan:
    """The plan of ``spec``'s CPU ranks, in equal parts on ``nodes`` nodes (``node0``, ``node1``…)."""
    world_size = spec.options.ranks or 1
    each = -(-world_size // nodes)
    parts = [tuple(range(first, min(first + each, world_size))) for first in range(0, world_size, each)]
    fields: dict[str, Any] = {
        "job": spec.job,
        "world_size": world_size,
        "backend": "gloo",
        "nodes": tuple(NodePlan(f"node{index}", ranks) for index, ranks in enumerate(parts)),
        "fresh": spec.options.fresh,
        "numa_binding": None,
        "timeout": spec.options.timeout,
        "grace": spec.options.grace,
        "collect": spec.options.collect,
        "out": spec.options.out,
    }
    return Plan(**{**fields, **changes})


def a_manifest(store: BlobStore, job: str, **changes: Any) -> Manifest:
    """The manifest of an empty bundle; its blobs are in ``store``."""
    fields: dict[str, Any] = {
        "job": job,
        "python": sys.version.split()[0],
        "stream": store.put(pickle.dumps({})),
        "buffers": (),
        "names": (),
        "receipt": (),
        "linecache": store.put(b"{}"),
    }
    return Manifest(**{**fields, **changes})


class FakeRank:
    """One rank of a ``FakeJob``; every method writes what a real rank would write."""

    def __init__(self, job: FakeJob, rank: int) -> None:
        self.job, self.rank = job, rank
        self.node = job.plan.node_of(rank).name
        self.files = job.paths.node(self.node)

    def _tell(self, kind: str, **data: Any) -> FakeRank:
        self.job.tell(kind, node=self.node, rank=self.rank, **data)
        return self

    def started(self, process: ProcessId | None = None) -> FakeRank:
        process = process or ProcessId("node0.example", "a-boot", "a-namespace", 4000 + self.rank, 1)
        return self._tell("rank.started", process=process.to_json(), local_rank=self.rank)

    def ready(self) -> FakeRank:
        return self._tell("rank.ready")

    def done(self) -> FakeRank:
        return self._tell("rank.done")

    def interrupted(self) -> FakeRank:
        return self._tell("rank.interrupted")

    def failed(
        self, error: BaseException | None = None, frames: tuple[tuple[str, int, str, str], ...] = ()
    ) -> FakeRank:
        """``frames`` have the format of ``ErrorRecord.frames``."""
        error = error or ValueError("no good")
        name, text = type(error).__name__, f"Traceback:\n{type(error).__name__}: {error}"
        record = ErrorRecord(name, type(error).__module__, str(error), text, frames, t=self.job.now)
        return self._tell("rank.failed", error=record.to_json())

    def exited(self, code: int) -> FakeRank:
        return self._tell("rank.exited", code=code, why=exit_in_words(code))

    def prints(self, text: str | bytes, stream: str = "out") -> FakeRank:
        """Append to the rank's log."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return self._append(getattr(self.files, stream)(self.rank), data)

    def records(self, *records: dict[str, Any]) -> FakeRank:
        """Append to the rank's metrics."""
        return self._append(
            self.files.metrics(self.rank), "".join(f"{codec.dumps(record)}\n" for record in records).encode()
        )

    def displays(self, *records: dict[str, Any]) -> FakeRank:
        """Append to the rank's rich output."""
        lines = (f"{codec.dumps({'kind': 'display', **record})}\n" for record in records)
        return self._append(self.files.display(self.rank), "".join(lines).encode())

    def _append(self, path: Path, data: bytes) -> FakeRank:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(data)
        return self


class FakeJob:
    """A job directory whose driver is this object. ``now`` is its clock (seconds since the epoch); tests set it."""

    @staticmethod
    def of(paths: JobPaths) -> FakeJob:
        """Become the driver of a job that a client created, with the real time."""
        job = FakeJob.__new__(FakeJob)
        job.home, job.paths, job.now = Home(paths.root.parent.parent), paths, time.time()
        job.spec, job.plan, job.manifest = (
            jobdir.read_spec(paths),
            jobdir.read_plan(paths),
            jobdir.read_manifest(paths),
        )
        job._journal = journal.Writer(paths)
        return job

    def __init__(
        self, home: Home | None = None, ranks: int = 2, *, nodes: int = 1, now: float = 1_000_000.0, **spec: Any
    ) -> None:
        self.home, self.now = home or default_home(), now
        options = spec.pop("options", Options(ranks=ranks))
        job = spec.pop("job", "") or f"20260102-030405-{os.urandom(3).hex()}"
        self.spec = a_spec(job, options=options, created=now, **spec)
        self.plan = a_plan(self.spec, nodes)
        self.manifest = a_manifest(BlobStore(self.home), job)
        self.paths = jobdir.create_job(self.home, self.spec, self.plan, self.manifest)
        self._journal = journal.Writer(self.paths)

    def rank(self, rank: int) -> FakeRank:
        return FakeRank(self, rank)

    def tell(self, kind: str, node: str | None = None, rank: int | None = None, **data: Any) -> FakeJob:
        """Append an event to the journal."""
        self._journal.append(Event(kind, self.now, node, rank, data=data))
        return self

    def drive(self, process: ProcessId | None = None, beat: float | None = None) -> FakeJob:
        """Publish which process is the driver; the default is this process."""
        process = process or ProcessId.mine()
        liveness.publish_driver(self.paths, process, self.now if beat is None else beat)
        return self.tell("job.driver", process=process.to_json())

    def running(self) -> FakeJob:
        """All ranks run user code."""
        self.drive().tell("job.starting", attempt=1, fresh=False)
        for rank in range(self.plan.world_size):
            self.rank(rank).started().ready()
        return self.tell("job.running")

    def ended(
        self,
        state: str = "succeeded",
        reason: str = "",
        first_failure: int | None = None,
        findings: Sequence[Finding] = (),
    ) -> FakeJob:
        """The end: last event, summary, journal closed."""
        causes = [finding.to_json() for finding in findings]
        self.tell("job.ended", state=state, reason=reason, first_failure=first_failure, findings=causes)
        self.close()
        journal.publish_summary(self.paths, journal.state(self.paths))
        return self

    def takes(self, **gauges: Gauges) -> FakeJob:
        """Publish the gauges that the agents read of the ranks, given as ``rank0``, ``rank1``…"""
        told = {int(rank.removeprefix("rank")): taken for rank, taken in gauges.items()}
        for node in self.plan.nodes:
            self.paths.node(node.name).root.mkdir(mode=0o700, parents=True, exist_ok=True)
            words = {str(rank): told[rank].to_json() for rank in node.ranks if rank in told}
            publish_json(self.paths.node(node.name).gauges, words)
        return self

    def close(self) -> None:
        self._journal.close()

    def __enter__(self) -> FakeJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


FAKE_ENGINE = "TORCHDIST_FAKE_ENGINE"
"""The directory with the queue of ``FakeLauncher``: a file for each submission, which tests write and read."""


class FakeSubmission:
    """One file of the queue: ``{"word", "position", "reason"}`` (``EngineState``). Its agent runs on this machine."""

    def __init__(self, directory: Path, name: str) -> None:
        self._file = directory / name
        self.token = {"id": name}

    hosts: Sequence[str] = ()

    def tell(self, word: str, position: int | None = None, reason: str = "") -> None:
        """Set what the engine reports from now on."""
        publish_json(self._file, {"word": word, "position": position, "reason": reason})

    def state(self) -> EngineState:
        return EngineState(**codec.loads(self._file.read_bytes()))

    def connect(self, node: NodePlan) -> Channel:
        assert self.state().word != "queued"
        return LocalLauncher().connect(node)

    def shared(self, node: NodePlan) -> bool:
        return True

    def cancel(self) -> None:
        self.tell("ended", reason="it was taken back")


class FakeLauncher:
    """An engine with one submission for all nodes. A new submission has the state in the file ``first.json``."""

    def __init__(self) -> None:
        self.directory = Path(os.environ[FAKE_ENGINE])

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        return LocalLauncher().probe(options, environ)

    def planned(self, plan: Plan, options: Options, inventories: Sequence[Inventory]) -> Plan:
        return plan

    def submit(self, plan: Plan, attempt: int) -> FakeSubmission:
        submission = FakeSubmission(self.directory, f"{plan.job}-{attempt}")
        submission.tell(**codec.loads((self.directory / "first.json").read_bytes()))
        return submission

    def attach(self, plan: Plan, token: Mapping[str, Any]) -> FakeSubmission:
        found = sorted(self.directory.glob(f"{plan.job}-*"))
        if not found:
            raise LaunchError(f"there is no submission for job {plan.job}")
        return FakeSubmission(self.directory, token.get("id", found[-1].name))


def run_job(line: dict[str, Any]) -> None:
    """Do what a driver and its ranks do with ``line``, in this process and one rank after the other.

    There is no process group. A request that arrives ends the job before its next rank.
    """
    os.environ.update(line["world"]["environ"])
    sys.path[:] = line["world"]["sys_path"]
    os.chdir(line["world"]["cwd"])
    with FakeJob.of(JobPaths(Path(line["job_root"]))) as job:
        job.running()
        failed = None
        for number in range(job.plan.world_size):
            if jobdir.taken_requests(job.paths):
                job.ended("cancelled")
                return
            if not _run_rank(job, number, Path(line["blobs"])):
                failed = number
                break
        for other in range(job.plan.world_size):
            if failed is not None and other > failed:
                job.rank(other).interrupted()
        job.ended("succeeded" if failed is None else "failed", "" if failed is None else "a rank failed", failed)


def _run_rank(job: FakeJob, number: int, blobs: Path) -> bool:
    """Run user code as one rank. Returns whether it ended without an error."""
    rank, main = job.rank(number), types.ModuleType("__main__")
    sys.modules["__main__"] = main
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(job.plan.world_size))
    rank.prints("")
    loaded = None
    with open(rank.files.out(number), "a") as out, contextlib.redirect_stdout(out):
        try:
            loaded = marshal.load_bundle(job.manifest, blobs, main)
            _run_code(job.spec, main.__dict__, job.manifest.flags)
        except Exception as error:  # noqa: BLE001  # whatever user code raises is the rank's outcome
            marshal.dump_exception(error, loaded, job.paths.error(number))
            rank.failed(error)
            return False
    if number == 0 or job.plan.collect == "all":
        bound = dict.fromkeys([*job.manifest.bound, *marshal.changed_names(loaded, main), execution.VALUE])
        values = {name: vars(main)[name] for name in bound if name in vars(main)}
        dumped = marshal.dump_results(values, loaded, job.paths, number)
        job.tell("rank.result", rank.node, number, names=dumped.names, left=dumped.left, size=dumped.size)
    rank.done()
    return True


def _run_code(spec: JobSpec, namespace: dict[str, Any], flags: int) -> None:
    if spec.kind == "cell":
        remember_cell(spec.source, spec.label, spec.first_line)
        execution.run_cell(execution.compile_cell(spec.source, spec.label, spec.first_line, flags), namespace)
    elif spec.kind == "function":
        execution.run_call(namespace)
    else:
        sys.argv = list(spec.argv)
        sys.path.insert(0, str(Path(spec.label).parent))
        namespace.update(__file__=spec.label)
        exec(compile(spec.source, spec.label, "exec"), namespace)


if __name__ == "__main__":
    serve(forking(run_job))
