"""A job as its owner sees it, read from directories that a fake driver filled."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import marshal
from jupyter_torchdist.client import failures
from jupyter_torchdist.client import job as jobs
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.client.job import VALUE, Job, attach, attach_to
from jupyter_torchdist.protocol.errors import (
    DamagedJob,
    JobCancelled,
    JobLost,
    JobNotFound,
    JobTimedOut,
    LaunchError,
    RankFailed,
    UserError,
)
from jupyter_torchdist.protocol.events import Finding
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store.jobdir import taken_requests
from jupyter_torchdist.testing import FakeJob

DEAD = replace(ProcessId.mine(), ticks=1)


class Attaching(DriverPool):
    """A pool that starts no process: a new driver is what the test says it does."""

    def __init__(self, fake: FakeJob | None = None, ends: str = "", command: str = "false") -> None:
        super().__init__()
        self.fake, self.ends, self.command, self.attached = fake, ends, command, 0

    def attach(self, paths: JobPaths) -> subprocess.Popen[bytes]:
        self.attached += 1
        if self.fake and self.ends:
            self.fake.ended(self.ends, "its processes were gone")
        with subprocess.Popen([self.command]) as ended:
            return ended


@pytest.fixture
def fake(home: Path) -> Iterator[FakeJob]:
    with FakeJob(Home(home), ranks=3, options=Options(ranks=3, name="a name")) as fake:
        yield fake


def owner(fake: FakeJob, pool: DriverPool | None = None) -> Job:
    return attach_to(fake.paths, fake.home, pool or Attaching())


def leave(fake: FakeJob, rank: int, **values: Any) -> None:
    """Results of a rank that had nothing captured."""
    loaded = marshal.Loaded((), {}, fake.manifest, fake.home.blobs, {})
    marshal.dump_results(values, loaded, fake.paths, rank)
    fake.rank(rank).done()


def test_state_follows_the_journal(fake: FakeJob) -> None:
    job = owner(fake)
    assert (job.id, job.name, job.state.state, job.done) == (fake.spec.job, "a name", "submitted", False)
    fake.running()
    assert job.state.state == "running"
    assert set(job.state.ranks) == {0, 1, 2}
    fake.ended("succeeded")
    assert job.done
    assert job.wait() == job.state
    assert [event.kind for event in job.events()][-1] == "job.ended"
    assert repr(job) == f"<Job {job.id} 'a name': succeeded, 3 ranks, Cell In[1]>"


def test_a_lost_journal_leaves_the_summary(fake: FakeJob) -> None:
    job = owner(fake)
    fake.running().ended("failed")
    fake.paths.journal.write_bytes(b"")
    assert job.wait(0).state == "failed"


def test_waiting_ends_with_the_job_or_its_patience(fake: FakeJob) -> None:
    job = owner(fake)
    fake.running()
    with pytest.raises(TimeoutError, match=r"still running after 0\.01 s"):
        job.wait(0.01)
    timer = threading.Timer(0.02, fake.ended)
    timer.start()
    assert job.wait(20).state == "succeeded"
    timer.join()


def test_awaiting_lets_the_loop_run(fake: FakeJob) -> None:
    job = owner(fake)
    fake.running()

    async def both() -> str:
        async def end() -> None:
            await asyncio.sleep(0)
            fake.ended()

        other = asyncio.create_task(end())
        state = await job
        await other
        return state.state

    assert asyncio.run(both()) == "succeeded"


def test_a_dead_driver_is_replaced_once(fake: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CHECK", 0.0)
    fake.running().drive(DEAD)
    pool = Attaching(fake, ends="lost")
    job = owner(fake, pool)
    assert job.wait(20).state == "lost"
    assert pool.attached == 1
    assert isinstance(job.exception(), JobLost)


def test_drivers_that_die_again_and_again_are_given_up(fake: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CHECK", 0.0)
    fake.running().drive(DEAD)
    monkeypatch.setattr(jobs, "SETTLING", 0.0)
    pool = Attaching()
    with pytest.raises(JobLost, match="has no driver, and 3 new drivers ended too"):
        owner(fake, pool).wait(20)
    assert pool.attached == 3


def test_a_job_that_another_driver_is_taking_over_is_not_given_up(
    fake: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new driver that finds another one at work ends with 0; with a long journal that one takes seconds to begin."""
    monkeypatch.setattr(jobs, "CHECK", 0.0)
    monkeypatch.setattr(jobs, "SETTLING", 0.0)
    fake.running().drive(DEAD)
    job = owner(fake, pool := Attaching(command="true"))
    while pool.attached < 2 * jobs.TAKEOVERS:
        job.revive()
    fake.ended()
    assert job.wait(20).state == "succeeded"


def test_requests_are_files_in_order(fake: FakeJob) -> None:
    job = owner(fake)
    fake.running()
    job.interrupt()
    job.cancel()
    job.kill()
    assert [asked.kind for asked in taken_requests(fake.paths)] == ["interrupt", "interrupt", "kill"]
    fake.ended("cancelled")
    job.kill()
    assert taken_requests(fake.paths) == []


def test_a_driver_may_take_a_request_at_once(fake: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, taken = os.rename, []

    def published(source: str, path: Path) -> None:
        rename(source, path)
        taken.extend(taken_requests(fake.paths))

    job = owner(fake)
    fake.running()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", published)
        job.cancel()
    assert [asked.kind for asked in taken] == ["interrupt"]


def test_logs(fake: FakeJob) -> None:
    job = owner(fake)
    fake.rank(0).prints("a\nb\nc\n").prints("oh", "err")
    fake.rank(2).prints("x\ny").prints("", "err")
    assert job.logs(0) == "a\nb\nc\noh"
    assert job.logs(0, "out") == "a\nb\nc\n"
    assert job.logs(0, "out", tail=2) == "b\nc\n"
    assert job.logs(0, grep="[ab]") == "a\nb\n"
    assert job.logs(0, grep="[ab]", tail=1) == "b\n"
    assert job.logs(0, tail=0) == ""
    assert job.logs(0, grep="a", tail=0) == ""
    assert job.logs(1) == ""
    assert job.logs(tail=1) == "[rank 0] c\n[rank 0] oh\n[rank 2] y\n"


def test_metrics_as_a_frame_or_as_columns(fake: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.rank(0).records({"t": 1.0, "k": "log", "step": 0, "v": {"loss": 0.5}})
    frame = owner(fake).metrics
    assert frame.to_dict("list") == {"rank": [0], "step": [0], "t": [1.0], "loss": [0.5]}
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert owner(fake).metrics == {"rank": [0], "step": [0], "t": [1.0], "loss": [0.5]}


def test_results_values_and_bringing_them(fake: FakeJob) -> None:
    job = owner(fake)
    fake.running()
    leave(fake, 0, accuracy=0.9, **{VALUE: 5})
    fake.ended()
    assert dict(job.result()) == {"accuracy": 0.9, VALUE: 5}
    assert job.result() is job.result(0)
    assert job.value == 5
    namespace: dict[str, Any] = {"kept": 1}
    brought = job.bring(namespace)
    assert namespace == {"kept": 1, "accuracy": 0.9}
    assert (brought.names, brought.left) == (("accuracy",), ())
    assert str(brought) == "brought accuracy"


def test_collecting_all_ranks_gives_lists(home: Path) -> None:
    with FakeJob(Home(home), options=Options(ranks=2, collect="all")) as fake:
        fake.running()
        leave(fake, 0, x=[0], only=1, **{VALUE: "a"})
        leave(fake, 1, x=[1], **{VALUE: "b"})
        fake.ended()
        job = owner(fake)
        namespace: dict[str, Any] = {}
        job.bring(namespace)
        assert namespace == {"x": [[0], [1]], "only": [1, None]}
        assert job.values() == ["a", "b"]


def test_results_that_are_not_there(fake: FakeJob) -> None:
    job = owner(fake)
    fake.running()
    with pytest.raises(UserError, match="no results yet") as caught:
        job.result()
    assert "job.wait()" in caught.value.hint
    with pytest.raises(UserError, match="has no rank 3"):
        job.result(3)
    leave(fake, 0, x=1)
    fake.ended()
    with pytest.raises(UserError, match=r"rank 1 of job .* sent no results"):
        job.result(1)


def test_results_after_a_failure_raise_it(fake: FakeJob) -> None:
    fake.running().rank(1).failed(ValueError("no good"))
    fake.ended("failed", first_failure=1)
    with pytest.raises(ValueError, match="no good"):
        owner(fake).result()


def test_damaged_results_are_refused(fake: FakeJob) -> None:
    fake.running()
    leave(fake, 0, x=1)
    fake.ended()
    fake.paths.result(0).write_bytes(b"\x80")
    with pytest.raises(DamagedJob):
        owner(fake).result()


def notes_of(error: BaseException | None) -> list[str]:
    return list(getattr(error, "__notes__", ()))


class Odd(Exception):
    """Takes other arguments than its text."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{where}: {code}")
        self.code = code


def test_the_first_failure_comes_with_its_own_type_and_the_others_as_notes(fake: FakeJob) -> None:
    fake.running()
    error = Odd(7, "here")
    marshal.dump_exception(error, None, fake.paths.error(2))
    fake.rank(2).failed(error)
    fake.now += 1
    fake.rank(1).failed(RuntimeError("connection closed\nby peer"))
    fake.rank(0).interrupted()
    fake.ended("failed", first_failure=2)
    job = owner(fake)
    with pytest.raises(Odd, match="here: 7") as caught:
        job.raise_for_state()
    assert caught.value.code == 7
    assert notes_of(caught.value) == [
        "rank 2 failed first, on node0.example:\nTraceback:\nOdd: here: 7",
        "rank 1 failed too: RuntimeError: connection closed",
        "1 other rank was stopped because of this",
    ]
    assert job.exception() is caught.value


def test_a_thousand_failures_make_a_few_notes(home: Path) -> None:
    with FakeJob(Home(home), ranks=50) as fake:
        fake.running()
        for rank in range(50):
            fake.rank(rank).failed(ValueError("x" * 1000))
        fake.ended("failed", first_failure=0)
        notes = notes_of(owner(fake).exception())
    assert len(notes) == 10
    assert notes[-1] == "41 more ranks failed too"
    assert max(map(len, notes[1:])) < 240


def test_advice_for_a_file_that_another_rank_has_made(home: Path) -> None:
    with FakeJob(Home(home), ranks=2) as fake:
        fake.running()
        fake.rank(1).failed(FileExistsError(17, "File exists", "out"))
        fake.ended("failed", first_failure=1)
        error = owner(fake).exception()
    assert isinstance(error, FileExistsError)
    (note,) = [one for one in notes_of(error) if failures.is_advice(one)]
    assert note.endswith("give makedirs or mkdir exist_ok=True, or make it under `if td.is_main:`")


def test_advice_for_a_name_that_stayed_in_the_notebook() -> None:
    error, names = NameError("name 'lock' is not defined"), {"lock": 1}
    (note,) = failures._left_in_notebook(error, "", names, ())
    assert failures.is_advice(note) and note.endswith("take it along with --include lock")
    (note,) = failures._left_in_notebook(error, "", names, ("lock",))
    assert failures.is_advice(note)
    assert note == "lock was left behind with --exclude: create it in the cell before the line that uses it"
    assert failures._left_in_notebook(error, "", {}, ()) == []


def test_a_killed_rank_is_told_in_words(fake: FakeJob) -> None:
    fake.running().rank(1).exited(-9)
    fake.rank(0).interrupted()
    fake.rank(2).interrupted()
    fake.ended("failed", first_failure=1)
    error = owner(fake).exception()
    assert isinstance(error, RankFailed)
    assert error.rank == 1
    assert error.message == "rank 1 on node0.example was killed (SIGKILL)"
    assert f"%dist logs {fake.spec.job} --rank 1" in error.hint
    assert notes_of(error) == ["2 other ranks were stopped because of this"]


def test_ranks_that_never_started_say_what_the_launcher_said(fake: FakeJob) -> None:
    node = fake.paths.node("node0")
    node.root.mkdir()
    node.launcher_log.write_text("OSError: no more sockets\n")
    fake.ended("failed", "the ranks could not be started")
    error = owner(fake).exception()
    assert isinstance(error, LaunchError)
    assert "the ranks could not be started\nOSError: no more sockets" in error.message


@pytest.mark.parametrize(
    ("state", "kind"),
    [("cancelled", JobCancelled), ("timed_out", JobTimedOut), ("lost", JobLost), ("failed", LaunchError)],
)
def test_every_end_has_its_exception(fake: FakeJob, state: str, kind: type[BaseException]) -> None:
    fake.running()
    job = owner(fake)
    assert job.exception() is None
    job.raise_for_state()
    stalled = Finding("rank-stuck", "warning", 1, "", "rank 1 has not entered all_reduce #7", "", "look at it", ())
    fake.ended(state, "this is why", findings=[stalled])
    with pytest.raises(kind, match="this is why") as caught:
        job.raise_for_state()
    assert stalled.advice in notes_of(caught.value)


def test_attaching_by_name_and_what_is_not_there(fake: FakeJob) -> None:
    assert attach("a name").paths == fake.paths
    assert attach(fake.spec.job).spec == fake.spec
    with pytest.raises(JobNotFound, match="did you mean a name"):
        attach("a nam")
    fake.paths.manifest.write_text("{")
    with pytest.raises(DamagedJob):
        attach("a name")


def test_attaching_to_an_orphan_starts_a_driver(fake: FakeJob) -> None:
    fake.running().drive(DEAD)
    pool = Attaching()
    attach(fake.spec.job, pool=pool)
    assert pool.attached == 1
