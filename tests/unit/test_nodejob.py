"""One job on a node: what its launcher and ranks write, how they ended, and that nothing is left after the end.

The launcher here is a small program that makes the process trees a job may make; all else is real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.node import nodejob
from jupyter_torchdist.node.nodejob import NodeJob
from jupyter_torchdist.protocol.eventreader import EventReader
from jupyter_torchdist.protocol.events import Event
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.protocol.process import JOB_TOKEN, ProcessId, job_token, processes_of_job
from jupyter_torchdist.ranks.eventfile import EventFile
from tests.leaks import wait_until

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.ranks.eventfile import EventFile

node = JobPaths(Path(sys.argv[1])).node("node0")
launcher = EventFile(node.launcher_events)

def begin():
    launcher.write("launcher.started", process=ProcessId.mine().to_json(), attempt=1)

def rank(number, life):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        events = EventFile(node.rank_events(number), number)
        events.write("rank.started", process=ProcessId.mine().to_json(), local_rank=number)
        life(events)
        os._exit(0)
    return pid

def sleep(*_):
    while True:
        time.sleep(60)

def run(*words, **options):
    return subprocess.Popen([sys.executable, "-c", "import signal, time\\n" + words[0]], **options)
"""


@dataclass
class Tree:
    """A job's directory, and the launcher that the test started in it."""

    paths: JobPaths
    started: list[subprocess.Popen[bytes]]

    @property
    def token(self) -> str:
        return job_token(self.paths.job, "node0")

    def launch(self, program: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + program, str(self.paths.root)],
            env={**os.environ, JOB_TOKEN: self.token},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def job(self, ranks: tuple[int, ...] = (0, 1), **options: Any) -> NodeJob:
        return NodeJob(self.paths, "node0", ranks, **options)

    def events(self) -> list[Event]:
        return EventReader(self.paths.node("node0").agent_events, None).read()

    def exits(self) -> dict[int | None, tuple[Any, ...]]:
        told = [event for event in self.events() if event.kind == "rank.exited"]
        assert len({event.rank for event in told}) == len(told), "an exit was told twice"
        return {event.rank: (event.data["state"], event.data["code"], event.data["why"]) for event in told}

    def alive(self) -> list[ProcessId]:
        leaders = [ProcessId.of(process.pid) for process in self.started]
        return processes_of_job(self.token, leaders)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(JobPaths(tmp_path / f"tree-{os.getpid()}-{time.monotonic_ns()}"), [])
    tree.paths.node("node0").root.mkdir(parents=True)
    yield tree
    for process in tree.alive():
        process.signal(signal.SIGKILL)
    for popen in tree.started:
        popen.kill()
        popen.wait()


def follow(job: NodeJob, until: Callable[[], bool], timeout: float = 20.0) -> None:
    """Poll as the agent does until a condition holds."""

    def turn() -> bool:
        job.poll(time.monotonic())
        return until()

    assert wait_until(turn, timeout), f"the job is {job.state}"


def begun(job: NodeJob, ranks: int) -> None:
    """One poll may see the ranks and not yet their launcher, whose file it read before."""
    follow(job, lambda: len(job.processes) == ranks and job.state == "running")


def ended(job: NodeJob) -> None:
    follow(job, lambda: job.state == "ended")


# -- nothing is left

TREES = {
    "ranks that sleep": "begin(); rank(0, sleep); rank(1, sleep); sleep()",
    "a launcher and ranks that ignore SIGTERM": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def deaf(events):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep()
begin(); rank(0, deaf); rank(1, deaf); sleep()""",
    "children in sessions of their own": """
def parent(events):
    run("time.sleep(60)", start_new_session=True)
    run("time.sleep(60)", start_new_session=True)
    sleep()
begin(); rank(0, parent); rank(1, parent); sleep()""",
    "children in sessions of their own that ignore SIGTERM": """
def parent(events):
    run("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", start_new_session=True)
    sleep()
begin(); rank(0, parent); rank(1, parent); sleep()""",
    "orphans that cleaned their environment": """
def parent(events):
    if os.fork() == 0:
        run("time.sleep(60)", env={})
        os._exit(0)
    os.wait()
    sleep()
begin(); rank(0, parent); rank(1, parent); sleep()""",
    "daemons of a rank that has ended": """
def parent(events):
    if os.fork() == 0:
        os.setsid()
        run("time.sleep(60)")
        os._exit(0)
    os.wait()
begin(); rank(0, parent); rank(1, parent); os.wait(); os.wait()""",
    "a tree that grows while it is felled": """
def parent(events):
    def again(*_):
        run("time.sleep(60)", start_new_session=True)
    signal.signal(signal.SIGTERM, again)
    sleep()
begin(); rank(0, parent); rank(1, parent); sleep()""",
}


@pytest.mark.parametrize("case", TREES)
def test_after_the_end_nothing_is_alive(case: str, tree: Tree) -> None:
    job = tree.job()
    launcher = tree.launch(TREES[case])
    begun(job, 2)
    job.end(0.2, time.monotonic())
    ended(job)
    assert tree.alive() == []
    assert launcher.wait() in (0, -signal.SIGTERM, -signal.SIGKILL)
    assert [event.kind for event in tree.events()][-1] == "node.ended"
    job.close()


def test_an_end_can_be_made_shorter_and_not_longer(tree: Tree) -> None:
    job = tree.job()
    tree.launch(TREES["a launcher and ranks that ignore SIGTERM"])
    begun(job, 2)
    job.end(3600.0, time.monotonic())
    job.poll(time.monotonic())
    assert job.state == "ending"
    job.end(0.0, time.monotonic())
    job.end(3600.0, time.monotonic())
    ended(job)
    assert tree.alive() == []
    job.close()


def test_the_launcher_is_killed(tree: Tree) -> None:
    job = tree.job()
    launcher = tree.launch(TREES["ranks that sleep"])
    begun(job, 2)
    launcher.kill()
    launcher.wait()
    ended(job)
    assert tree.alive() == []
    assert tree.exits() == {0: ("stopped", -9, "was stopped"), 1: ("stopped", -9, "was stopped")}
    job.close()


def test_a_process_hears_sigterm_once(tree: Tree, tmp_path: Path) -> None:
    """A handler that saves a checkpoint must not be called every few milliseconds."""
    heard, ready = tmp_path / "heard", tmp_path / "ready"
    program = f"""
def parent(events):
    fd = os.open({str(heard)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    signal.signal(signal.SIGTERM, lambda *_: os.write(fd, b"x"))
    open({str(ready)!r}, "w").close()
    sleep()
begin(); rank(0, parent); sleep()"""
    job = tree.job((0,))
    launcher = tree.launch(program)
    follow(job, lambda: job.processes.keys() == {0} and ready.exists())
    launcher.kill()
    launcher.wait()
    ended(job)
    assert heard.read_bytes() == b"x"
    job.close()


def test_ended_before_its_launcher_came(tree: Tree) -> None:
    """A zygote that was asked for a launcher may fork it at any moment: the end waits for the answer."""
    job = tree.job()
    job.expected = True
    job.end(0.0, 10.0)
    for now in (10.0, 10.5, 11.9):
        job.poll(now)
        assert job.state == "ending"
    job.expected = False
    job.poll(12.0)
    assert job.state == "ended"
    job.close()


def test_a_zygote_that_never_answers_is_not_waited_for(tree: Tree) -> None:
    job = tree.job()
    job.expected = True
    job.end(1.0, 10.0)
    job.poll(11.0 + nodejob.ANSWER_SECONDS + 0.1)
    assert job.state == "ended"
    job.close()


def test_what_cannot_be_killed_is_named(tree: Tree) -> None:
    nobody = replace(ProcessId.mine(), pid=4711, ticks=1)
    job = tree.job()
    job.end(0.0, 10.0)
    job.poll(11.0, lambda: [nobody])
    assert job.state == "ending"
    job.poll(10.0 + nodejob.UNKILLABLE_SECONDS + 1, lambda: [nobody])
    assert job.state == "ended"
    assert "process 4711 does not end" in tree.events()[-1].data["error"]
    job.close()


def test_strays_end_with_the_job(tree: Tree) -> None:
    """What left its session and cleaned its environment is known to the agent alone: as its orphan."""
    stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    identity = ProcessId.of(stray.pid)
    job = tree.job()
    job.end(0.0, time.monotonic())
    assert wait_until(lambda: not job.poll(time.monotonic(), lambda: [identity] if identity.alive() else []))
    assert job.state == "ended"
    assert stray.wait() == -signal.SIGKILL
    job.close()


# -- how ranks ended


class Script:
    """Writes what a launcher and its ranks would write; no processes."""

    def __init__(self, tree: Tree, ranks: int = 2) -> None:
        node = tree.paths.node("node0")
        self.launcher = EventFile(node.launcher_events)
        self.ranks = [EventFile(node.rank_events(number), number) for number in range(ranks)]

    def started(self, *ranks: int) -> None:
        for number in ranks:
            gone = replace(ProcessId.mine(), pid=1000 + number, ticks=1)
            self.ranks[number].write("rank.started", process=gone.to_json(), local_rank=number)

    def exited(self, rank: int, code: int, stopped: bool | None = None) -> None:
        self.launcher.write("launcher.child", pid=1000 + rank, code=code, why="", stopped=stopped)

    def close(self) -> None:
        for file in (self.launcher, *self.ranks):
            file.close()


@pytest.fixture
def script(tree: Tree) -> Iterator[Script]:
    script = Script(tree)
    yield script
    script.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, ("done", 0, "exited with code 0 before its code had ended")),  # os._exit(0)
        (3, ("failed", 3, "ended with exit code 3")),
        (-11, ("killed", -11, "was killed (SIGSEGV: a crash in native code)")),
        (-9, ("killed", -9, "was killed (SIGKILL)")),
        (-15, ("killed", -15, "was killed (SIGTERM)")),
    ],
)
def test_an_exit_in_words(code: int, expected: tuple[Any, ...], tree: Tree, script: Script) -> None:
    job = tree.job()
    script.started(0)
    script.exited(0, code)
    assert job.poll(1.0)
    assert tree.exits() == {0: expected}
    job.close()


def test_a_good_end(tree: Tree, script: Script) -> None:
    job = tree.job()
    script.started(0)
    script.ranks[0].write("rank.done")
    script.exited(0, 0)
    job.poll(1.0)
    assert tree.exits() == {0: ("done", 0, "")}
    job.close()


def test_an_exit_may_be_known_before_whose_it_is(tree: Tree, script: Script) -> None:
    job = tree.job()
    script.exited(0, 3)
    job.poll(1.0)
    assert tree.exits() == {}
    script.started(0)
    job.poll(2.0)
    assert tree.exits()[0][:2] == ("failed", 3)
    job.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_killed_rank_is_not_stopped_because_its_peer_failed_first(
    order: tuple[int, int], tree: Tree, script: Script
) -> None:
    """Rank 1 is killed; rank 0 sees its connection break and says so before anybody reaped rank 1."""
    job = tree.job()
    script.started(0, 1)
    script.ranks[0].write("rank.failed", error={})
    job.poll(1.0)
    codes = {0: 1, 1: -9}
    for rank in order:
        script.exited(rank, codes[rank])
    job.poll(1.02)
    assert tree.exits()[1][:2] == ("killed", -9)
    job.close()


@pytest.mark.parametrize("stopped", [True, False])
def test_what_the_launcher_says_of_a_rank_that_ended_counts(tree: Tree, script: Script, stopped: bool) -> None:
    """On a busy machine it may come to say so seconds after the peer failed."""
    job = tree.job()
    script.started(0, 1)
    script.ranks[0].write("rank.failed", error={})
    job.poll(1.0)
    script.exited(1, -9, stopped)
    job.poll(1.0 if stopped else 1.0 + 2 * nodejob.ENGINE_KILL_SECONDS)
    assert tree.exits()[1][:2] == ("stopped" if stopped else "killed", -9)
    job.close()


def test_what_the_engine_ends_after_a_failure_was_stopped(tree: Tree, script: Script) -> None:
    job = tree.job()
    script.started(0, 1)
    script.exited(0, 1)
    job.poll(1.0)
    script.exited(1, -15)
    job.poll(1.1)
    assert tree.exits()[1] == ("stopped", -15, "was stopped")
    job.close()


def test_what_the_engine_kills_at_last_was_stopped(tree: Tree, script: Script) -> None:
    job = tree.job()
    script.started(0, 1)
    script.exited(0, 1)
    job.poll(1.0)
    script.exited(1, -9)
    job.poll(1.0 + nodejob.ENGINE_KILL_SECONDS)
    assert tree.exits()[1] == ("stopped", -9, "was stopped")
    job.close()


def test_what_is_killed_at_the_end_was_stopped(tree: Tree, script: Script) -> None:
    job = tree.job()
    script.started(0)
    job.poll(1.0)
    job.end(5.0, 1.0)
    script.exited(0, -9)
    job.poll(1.1)
    assert tree.exits() == {0: ("stopped", -9, "was stopped")}
    job.close()


@pytest.mark.parametrize(
    "event",
    [
        ("launcher.started", {}),
        ("launcher.started", {"process": 7}),
        ("launcher.started", {"process": {"pid": "x"}}),
        ("launcher.child", {"pid": "x", "code": None}),
    ],
)
def test_what_user_code_writes_into_the_directory_ends_nothing(
    event: tuple[str, dict[str, Any]], tree: Tree, script: Script
) -> None:
    job = tree.job()
    script.launcher.write(event[0], **event[1])
    script.ranks[0].write("rank.started", process=None)
    with open(tree.paths.node("node0").rank_events(1), "ab") as file:
        file.write(b'{"kind": []}\n[1]\nnull\n\xff\xfe\n')
    job.poll(1.0)
    script.started(0)
    script.exited(0, 0)
    job.poll(2.0)
    assert tree.exits()[0][0] == "done"
    assert job.state == "starting"
    job.close()


# -- taking up, starting again


def test_another_agent_takes_up_what_the_files_say(tree: Tree) -> None:
    job = tree.job()
    launcher = tree.launch(TREES["ranks that sleep"])
    begun(job, 2)
    job.close()
    heir = tree.job(adopt=True)
    heir.poll(time.monotonic())
    assert heir.state == "running"
    assert heir.launcher == ProcessId.of(launcher.pid)
    assert heir.processes == job.processes
    heir.end(0.0, time.monotonic())
    ended(heir)
    assert tree.alive() == []
    heir.close()


def test_a_second_attempt_does_not_read_the_first_ones_events(tree: Tree, script: Script) -> None:
    script.started(0, 1)
    script.exited(0, 1)
    job = tree.job(attempt=2)
    job.poll(1.0)
    assert (job.processes, job.codes, job.failed) == ({}, {}, False)
    script.launcher.write("launcher.started", process=ProcessId.mine().to_json(), attempt=1)  # late
    job.poll(2.0)
    assert job.state == "starting"
    job.close()


def test_a_launcher_that_died_at_once(tree: Tree) -> None:
    job = tree.job()
    job.launcher = replace(ProcessId.mine(), pid=4711, ticks=0)
    ended(job)
    assert tree.exits() == {}
    job.close()


# -- whether ranks make progress


def quiet(job: NodeJob, now: float) -> dict[int, tuple[float, float]]:
    """Of each rank that is alive: seconds without progress, and without progress and work."""
    return {rank: (progress, work) for rank, progress, work in job.quiet(now)}


def test_ranks_that_neither_write_nor_compute_make_no_progress(tree: Tree) -> None:
    job = tree.job()
    tree.launch(TREES["ranks that sleep"])
    begun(job, 2)
    now = time.monotonic()
    assert all(progress < 5 for progress, _ in quiet(job, now).values())
    assert quiet(job, now + 0.5) == {}, "it was told a moment ago"
    job.measured(dict.fromkeys((0, 1), False))
    assert all(progress >= work >= 8 for progress, work in quiet(job, now + 9).values())
    assert sorted(quiet(job, now + 20)) == [0, 1]
    job.end(0.0, time.monotonic())
    ended(job)
    assert quiet(job, now + 30) == {}
    job.close()


# -- signals


def test_an_interrupt_goes_to_ranks_and_not_to_their_launcher(tree: Tree, tmp_path: Path) -> None:
    heard, ready = tmp_path / "heard", tmp_path / "ready"
    job = tree.job((0,))
    tree.launch(f"""
def listening(events):
    signal.signal(signal.SIGINT, lambda *_: open({str(heard)!r}, "w").close())
    open({str(ready)!r}, "w").close()
    sleep()
signal.signal(signal.SIGINT, signal.default_int_handler)
begin(); rank(0, listening); sleep()""")
    follow(job, lambda: job.processes.keys() == {0} and ready.exists())
    job.signal(signal.SIGINT)
    assert wait_until(heard.exists)
    assert job.launcher is not None and job.launcher.alive()
    job.end(0.0, time.monotonic())
    ended(job)
    job.close()


def test_closed_with_its_files(tree: Tree) -> None:
    job = tree.job()
    job.close(remove=True)
    assert not tree.paths.root.exists()
