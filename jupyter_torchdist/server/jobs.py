"""The HTTP routes: the list, one job, cancel, rerun, delete, a file."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from jupyter_server.auth.decorator import authorized
from tornado import web
from tornado.iostream import StreamClosedError

from ..client.job import attach_to
from ..client.submit import rerun
from ..feed.cancel import cancel
from ..feed.captured import captured
from ..feed.rerun import command
from ..protocol.disk import open_plain
from ..protocol.errors import DamagedJob, StoreError, UserError
from ..protocol.events import FINAL_STATES
from ..protocol.paths import Home, JobPaths
from ..store import catalog, jobdir, journal, liveness, logs
from .base import Handler, Refusal, in_thread, permitted

CHUNK = 256 * 1024
"""The largest number of bytes of a file in memory."""

_FILE = re.compile(r"(\d{1,9})\.(out|err)")


class Jobs(Handler):
    """All jobs."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """The rows, the newest job first."""
        await self.answer(lambda: {"now": time.time(), "jobs": self.listing.rows()})


class OneJob(Handler):
    """One job, read from its files."""

    @web.authenticated
    @authorized
    async def get(self, job: str) -> None:
        """The job's specification, plan and state."""
        await self.answer(details, self.paths(job))

    @web.authenticated
    @authorized
    async def delete(self, job: str) -> None:
        """Delete the files of a job that has ended."""
        await in_thread(remove, self.paths(job))
        self.set_status(204)
        self.finish()


class Cancel(Handler):
    """The ■ button of a job."""

    @web.authenticated
    @authorized
    async def post(self, job: str) -> None:
        """Interrupt or kill the ranks, without waiting for the end. Answers with a sentence on what was done."""
        kill = self.body().get("kill", False)
        if not isinstance(kill, bool):
            raise Refusal(400, f"kill is {kill!r}", "it is true or false")
        paths = self.paths(job)
        await self.answer(lambda: {"said": cancel(paths, self.data, kill)})


class Rerun(Handler):
    """Runs the bundle of a job again."""

    @web.authenticated
    @permitted("execute")
    async def post(self, job: str) -> None:
        """Answers with the id of the new job, when a driver has taken it."""
        paths = self.paths(job)
        await self.answer(lambda: {"job": run_again(paths, self.data)})


class File(Handler):
    """A log file to download."""

    @web.authenticated
    @authorized
    async def get(self, job: str, name: str) -> None:
        """The file's current content. It is sent in chunks, and a slow reader does not block other requests."""
        self.check_xsrf_cookie()  # as for Jupyter's own files: no other page can embed a log
        paths = self.paths(job)
        with await in_thread(open_log, paths, name) as file:
            left = os.fstat(file.fileno()).st_size
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.set_header("Content-Length", str(left))
            self.set_header("X-Content-Type-Options", "nosniff")
            self.set_attachment_header(f"{job}-rank{name}.txt")
            try:
                while left and (data := await in_thread(file.read, min(left, CHUNK))):
                    left -= len(data)
                    self.write(data)
                    await self.flush()
            except StreamClosedError:
                return  # the browser closed the connection
        self.finish(set_content_type="text/plain; charset=utf-8")


def details(paths: JobPaths) -> dict[str, Any]:
    """One job as JSON; a damaged manifest counts as empty. Raises ``JobNotFound``; ``DamagedJob`` for other damage."""
    state = journal.state(paths)
    spec, plan = jobdir.read_spec(paths), jobdir.read_plan(paths)
    try:
        receipt, notes = captured(paths)
    except DamagedJob:
        receipt, notes = [], []
    return {
        "now": time.time(),
        "job": paths.job,
        "spec": spec.to_json(),
        "plan": plan.to_json(),
        "state": state.to_json(),
        "effective": liveness.effective_state(paths, state),
        "receipt": receipt,
        "notes": notes,
        "command": command(spec),
    }


def run_again(paths: JobPaths, home: Home) -> str:
    """The new job's id. Raises what ``client.submit.rerun`` raises, and ``UserError`` if this server cannot run it."""
    job = attach_to(paths, home)
    here, there = sys.version_info[:2], tuple(int(part) for part in job.manifest.python.split(".")[:2])
    hint = f"run the cell again, or `torchdist rerun {paths.job}` in its environment"
    if here != there:
        raise UserError(
            f"the job was made by Python {there[0]}.{there[1]}, the Jupyter server is {here[0]}.{here[1]}", hint
        )
    if importlib.util.find_spec("torch") is None:
        raise UserError("the environment of the Jupyter server has no torch", hint)
    beside = Path(job.spec.notebook).parent
    return rerun(job, home, cwd=beside if job.spec.notebook and beside.is_dir() else None).id


def remove(paths: JobPaths) -> None:
    """Delete a job. Raises ``JobNotFound``, ``StoreError``, or ``UserError`` for a job that has not ended."""
    try:
        catalog.remove(paths)
    except StoreError as error:
        if paths.root.is_dir() and liveness.effective_state(paths) not in FINAL_STATES:
            raise UserError(error.message, "cancel it first") from error
        raise


def open_log(paths: JobPaths, name: str) -> BinaryIO:
    """Open the log file ``name``. Raises ``JobNotFound``, ``Refusal``."""
    match = _FILE.fullmatch(name)
    if not match:
        raise Refusal(400, f"{name[:100]!r} is not the name of a log", "logs are named RANK.out and RANK.err")
    journal.state(paths)
    found = logs.files(paths, int(match[1]), match[2])
    if not found:
        stream = {"out": "stdout", "err": "stderr"}[match[2]]
        raise Refusal(404, f"rank {match[1]} of job {paths.job} has written nothing to {stream}")
    return open_plain(found[0].path, buffering=0)
