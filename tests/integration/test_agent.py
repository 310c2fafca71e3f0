"""A real agent over its socket: there is one, it answers its own user, it survives nonsense, and it leaves nothing."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.node.shipping import replica
from jupyter_torchdist.protocol import version
from jupyter_torchdist.protocol.errors import ChannelError, LaunchError
from jupyter_torchdist.protocol.events import parse_lines
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.protocol.plan import NodePlan, Plan
from jupyter_torchdist.protocol.process import ProcessId, job_token, processes_of_job, stat_fields
from jupyter_torchdist.protocol.version import agent_directory, source_digest
from jupyter_torchdist.protocol.wire import frames
from jupyter_torchdist.protocol.wire.assignment import Assignment
from jupyter_torchdist.protocol.wire.channel import Channel
from jupyter_torchdist.protocol.wire.connect import connect_agent
from jupyter_torchdist.protocol.world import World
from jupyter_torchdist.ranks.eventfile import EventFile
from tests.leaks import command_of, processes_of_runtime, wait_until


class Peer:
    """A connection to the agent, as a driver has one."""

    def __init__(self) -> None:
        fd = connect_agent(sys.executable).detach()
        self.channel = Channel(fd, fd)
        self.got: list[dict[str, Any]] = []

    def say(self, kind: str, **data: Any) -> None:
        self.channel.send({"type": kind, **data})

    def wait_for(self, kind: str, timeout: float = 30.0) -> dict[str, Any]:
        """The next message of that kind; ``EOFError`` when the agent closes the channel first."""
        deadline = time.monotonic() + timeout
        while True:
            for index, message in enumerate(self.got):
                if message["type"] == kind:
                    return self.got.pop(index)
            assert time.monotonic() < deadline, f"no {kind!r} but {self.got}"
            self.got += [header for header, _ in self.channel.receive()]
            time.sleep(0.005)

    def hello(self) -> dict[str, Any]:
        self.say("hello", process=ProcessId.mine().to_json())
        return self.wait_for("welcome")

    def agent(self) -> ProcessId:
        return ProcessId.from_json(self.hello()["process"])

    def warm_processes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.hello()["warm"]
        return found

    def closed(self, timeout: float = 10.0) -> bool:
        def ended() -> bool:
            try:
                self.channel.receive()
            except EOFError:
                return True
            return False

        return wait_until(ended, timeout)


@pytest.fixture
def directory(own_runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The agent's; the same for all of a test, even while somebody edits the sources that usually name it."""
    directory = own_runtime / "agent"
    monkeypatch.setattr("jupyter_torchdist.protocol.wire.connect.agent_directory", lambda: directory)
    return directory


@pytest.fixture
def connect(directory: Path) -> Iterator[Callable[[], Peer]]:
    """Open connections to an agent of this test's own; at the end it is told to go, and all are closed."""
    del directory
    peers: list[Peer] = []

    def connect() -> Peer:
        peers.append(Peer())
        return peers[-1]

    yield connect
    for peer in peers:
        with contextlib.suppress(ChannelError):
            peer.say("stop_warm")
        peer.channel.close()


def assignment(root: Path, *, fresh: bool = False, python: str = sys.executable) -> Assignment:
    plan = Plan(root.name, 1, "gloo", (NodePlan("node0", (0,)),), fresh, None, None, 5.0)
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    world = World(environ, "/", tuple(sys.path), 0o77, {}, python)
    return Assignment(str(root), str(root.parent), "node0", plan, world, fresh=fresh)


def order(root: Path, **given: Any) -> tuple[dict[str, Any], bytes]:
    """The frame that starts a job."""
    made = assignment(root, **given)
    return {"type": "start", "job": root.name, "order": made.order(), "shared": True}, made.plan.text


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    paths = JobPaths(tmp_path / f"agent-{os.getpid()}-{time.monotonic_ns()}")
    paths.nodes.mkdir(parents=True)
    return paths


# -- one agent


def test_five_that_connect_at_once_find_one_agent(connect: Callable[[], Peer], own_runtime: Path) -> None:
    found: list[ProcessId] = []
    start = threading.Barrier(5)

    def one() -> None:
        start.wait()
        found.append(connect().agent())

    threads = [threading.Thread(target=one) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 5
    assert len(set(found)) == 1
    assert wait_until(lambda: processes_of_runtime(own_runtime) == [found[0].pid])


def test_what_it_makes_is_private(connect: Callable[[], Peer], directory: Path) -> None:
    connect().hello()
    modes = {path.name: path.lstat().st_mode & 0o777 for path in directory.iterdir()}
    assert directory.stat().st_mode & 0o777 == 0o700
    assert modes["agent.sock"] == 0o600
    assert set(modes.values()) == {0o600}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a moment")
def test_another_user_is_refused_though_the_file_system_lets_him(
    connect: Callable[[], Peer], directory: Path, own_runtime: Path
) -> None:
    peer = connect()
    agent = peer.agent()
    for path, mode in ((own_runtime, 0o755), (directory, 0o755), (directory / "agent.sock", 0o666)):
        path.chmod(mode)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setuid(65534)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.settimeout(10)
        try:
            stranger.connect(str(directory / "agent.sock"))
            stranger.sendall(frames.encode({"type": "hello", "process": ProcessId.mine().to_json()}))
            os._exit(0 if stranger.recv(1) == b"" else 1)
        except (ConnectionResetError, BrokenPipeError):
            os._exit(0)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert peer.agent() == agent


def test_an_agent_that_cannot_start_is_said_at_once(own_runtime: Path) -> None:
    del own_runtime
    started = time.monotonic()
    with pytest.raises(LaunchError, match="agent does not answer") as caught:
        connect_agent(shutil.which("false") or "/bin/false")
    assert "agent.log" in caught.value.hint
    assert time.monotonic() - started < 15


def test_a_directory_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHDIST_RUNTIME_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(LaunchError, match="cannot be used") as caught:
        connect_agent(sys.executable)
    assert "TORCHDIST_RUNTIME_DIR" in caught.value.hint


def test_a_path_too_long_for_a_socket_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHDIST_RUNTIME_DIR", str(tmp_path / ("x" * 120)))
    with pytest.raises(LaunchError, match="too long"):
        connect_agent(sys.executable)


def test_another_state_of_the_sources_gets_another_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "jupyter_torchdist"
    shutil.copytree(Path(version.__file__).parent.parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(version, "__file__", str(package / "protocol" / "version.py"))
    digest, directory = source_digest(), agent_directory()
    assert source_digest() == digest
    os.utime(package / "kernel" / "magic.py", (1, 1))  # runs in no agent
    assert source_digest() == digest
    os.utime(package / "node" / "agent.py", (1, 1))
    assert source_digest() != digest
    assert agent_directory() != directory
    monkeypatch.setattr(sys, "executable", "/another/python")
    assert agent_directory().parent == directory.parent


# -- its life


def test_idle_it_ends_with_its_warm_processes(connect: Callable[[], Peer], directory: Path, own_runtime: Path) -> None:
    peer = connect()
    agent = peer.agent()
    peer.say("warm", python=sys.executable, environ=dict(os.environ))
    assert wait_until(lambda: len(peer.warm_processes()) == 1)
    time_of_last_connection = time.monotonic()
    peer.channel.close()
    assert wait_until(lambda: not agent.alive() and processes_of_runtime(own_runtime) == [])
    assert time.monotonic() - time_of_last_connection > 1.5
    left = {path.name for path in directory.iterdir()}
    assert left <= {"agent.lock", "agent.log", "zygote.log"}


def test_a_warm_process_is_there_for_the_next_connection(connect: Callable[[], Peer]) -> None:
    first = connect()
    first.say("warm", python=sys.executable, environ=dict(os.environ))
    assert wait_until(lambda: [warm["ready"] for warm in first.warm_processes()] == [True])
    first.say("warm", python=sys.executable, environ={**os.environ, "OF_NO_MATTER": "1"})
    second = connect()
    first.channel.close()
    (warm,) = second.warm_processes()
    assert warm["ready"] and warm["python"] == sys.executable
    assert "zygote" in command_of(warm["pid"])


def test_an_agent_that_is_killed_leaves_no_zygote(connect: Callable[[], Peer], own_runtime: Path) -> None:
    peer = connect()
    agent = peer.agent()
    peer.say("warm", python=sys.executable, environ=dict(os.environ))
    assert wait_until(lambda: [warm["ready"] for warm in peer.warm_processes()] == [True])
    assert agent.signal(signal.SIGKILL)
    assert peer.closed()
    assert wait_until(lambda: processes_of_runtime(own_runtime) == [])
    heir = connect().agent()  # the dead one's socket and lock are no hindrance
    assert heir != agent


def test_stop_ends_it_at_once(connect: Callable[[], Peer], own_runtime: Path) -> None:
    peer = connect()
    peer.hello()
    peer.say("stop_warm")
    assert peer.closed()
    assert wait_until(lambda: processes_of_runtime(own_runtime) == [])


# -- nonsense

MESSAGES: list[dict[str, Any]] = [
    {"type": "nonsense"},
    {"type": "stop"},  # a method of the agent that is no message
    {"type": "readable"},
    {"type": ["hello"]},
    {},
    {"type": "hello"},
    {"type": "hello", "process": {"pid": 1}},
    {"type": "start", "shared": True},
    {"type": "start", "job": "j", "shared": True, "order": {}},
    {"type": "follow", "job": "../../etc", "shared": False},
    {"type": "prepare", "job": "../x", "files": {}, "blobs": []},
    {"type": "blob", "digest": "ab", "offset": 7, "last": True},
    {"type": "end", "job": []},
]


def test_nonsense_closes_its_channel_and_no_other(connect: Callable[[], Peer]) -> None:
    good = connect()
    agent = good.agent()
    for message in MESSAGES:
        bad = connect()
        bad.channel.send(message)
        assert bad.closed(), message
    raw = connect_agent(sys.executable)
    raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    raw.settimeout(10)
    assert raw.recv(100) == b""
    raw.close()
    assert good.agent() == agent


def test_a_job_that_cannot_be_started_is_refused(connect: Callable[[], Peer], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    peer = connect()
    agent = peer.agent()
    peer.channel.send(*order(tmp_path / "file" / "job"))
    refused = peer.wait_for("refused")
    assert refused["job"] == "job"
    assert "Not a directory" in refused["reason"]
    assert peer.agent() == agent


@pytest.mark.parametrize("fresh", [False, True])
def test_an_interpreter_that_is_not_there_is_refused(connect: Callable[[], Peer], job: JobPaths, fresh: bool) -> None:
    peer = connect()
    peer.channel.send(*order(job.root, fresh=fresh, python="/nonexistent/python"))
    assert "/nonexistent/python" in peer.wait_for("refused")["reason"]
    assert peer.wait_for("ended")["job"] == job.job
    peer.say("forget", job=job.job)
    assert peer.hello()["jobs"] == []


# -- a job that is ended while it is being started


def test_ended_while_its_warm_process_starts(connect: Callable[[], Peer], job: JobPaths) -> None:
    peer = connect()
    peer.channel.send(*order(job.root))
    peer.say("end", job=job.job, grace=1.0)
    assert peer.wait_for("ended", 10)["job"] == job.job
    peer.say("forget", job=job.job)
    assert wait_until(lambda: [warm["ready"] for warm in peer.warm_processes()] == [True])
    assert not job.node("node0").launcher_events.exists()
    assert processes_of_job(job_token(job.job, "node0")) == []


def test_ended_while_its_launcher_is_forked(connect: Callable[[], Peer], job: JobPaths) -> None:
    peer = connect()
    peer.say("warm", python=sys.executable, environ=dict(assignment(job.root).world.environ))
    assert wait_until(lambda: [warm["ready"] for warm in peer.warm_processes()] == [True])
    for number in range(5):
        paths = JobPaths(job.root.parent / f"{job.job}-{number}")
        paths.nodes.mkdir(parents=True)
        start = frames.encode(*order(paths.root))
        end = frames.encode({"type": "end", "job": paths.job, "grace": 0.0})
        os.write(peer.channel.write_fd, start + end)
        assert peer.wait_for("ended", 10)["job"] == paths.job
        assert processes_of_job(job_token(paths.job, "node0")) == []
        peer.say("forget", job=paths.job)
    assert peer.hello()["jobs"] == []
    (warm,) = peer.warm_processes()
    assert wait_until(lambda: zombies(warm["pid"]) == []), "a launcher that ended waits for the next job to be reaped"


def zombies(parent: int) -> list[int]:
    """Its children that have ended and that it has not reaped."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            fields = stat_fields(pid)
            found += [pid] if fields[0] == "Z" and int(fields[1]) == parent else []
    return found


def test_a_warm_process_that_is_stopped_does_not_hold_up_an_end(connect: Callable[[], Peer], job: JobPaths) -> None:
    peer = connect()
    peer.say("warm", python=sys.executable, environ=dict(assignment(job.root).world.environ))
    assert wait_until(lambda: [warm["ready"] for warm in peer.warm_processes()] == [True])
    zygote = ProcessId.of(peer.warm_processes()[0]["pid"])
    assert zygote.signal(signal.SIGSTOP)
    peer.channel.send(*order(job.root))
    peer.say("end", job=job.job, grace=0.0)
    try:
        assert peer.wait_for("ended", 10)["job"] == job.job
    finally:
        zygote.signal(signal.SIGCONT)
    # What it forks now is too late, and is ended as it comes.
    token = job_token(job.job, "node0")
    assert wait_until(lambda: processes_of_job(token) == [])
    assert peer.hello()["jobs"] == []


# -- a node without the driver's disk


def test_blobs_that_are_missing_are_asked_for_and_checked(
    connect: Callable[[], Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDIST_SCRATCH", str(tmp_path / "scratch"))
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of b"test"
    peer = connect()
    peer.say("prepare", job="j", files={"spec.json": "{}"}, blobs=[digest])
    assert peer.wait_for("missing")["blobs"] == [digest]
    for data, right in ((b"tost", False), (b"test", True)):
        peer.channel.send({"type": "blob", "digest": digest, "offset": 0, "last": True}, data)
        assert peer.wait_for("stored")["right"] is right
    peer.say("prepare", job="j", files={}, blobs=[digest])
    assert peer.wait_for("missing")["blobs"] == []
    assert (replica.replica_blobs(tmp_path / "scratch") / digest).read_bytes() == b"test"


def test_what_a_dead_agent_left_is_ended_by_the_next(connect: Callable[[], Peer], job: JobPaths) -> None:
    """Adopted: a launcher that outlived its agent, here one that sleeps."""
    peer = connect()
    peer.hello()
    node = job.node("node0")
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    assert wait_until(lambda: os.getsid(pid) == pid)
    launcher = ProcessId.of(pid)
    node.root.mkdir()
    events = EventFile(node.launcher_events)
    events.write("launcher.started", process=launcher.to_json(), attempt=1)
    events.close()
    follow = {"job_root": str(job.root), "node": "node0", "ranks": [0], "attempt": 1, "shared": True, "offsets": {}}
    peer.say("follow", job=job.job, **follow)
    assert peer.wait_for("grown")["file"].startswith("nodes/node0/")
    assert peer.hello()["jobs"] == [job.job]
    peer.say("end", job=job.job, grace=0.0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (-signal.SIGKILL, -signal.SIGTERM)
    assert peer.wait_for("ended")["attempt"] == 1
    assert not launcher.alive()
    peer.say("forget", job=job.job)


def test_a_job_of_which_nothing_is_known_is_over(connect: Callable[[], Peer], job: JobPaths) -> None:
    peer = connect()
    follow = {"job_root": str(job.root), "node": "node0", "ranks": [0], "attempt": 1, "shared": True, "offsets": {}}
    peer.say("follow", job=job.job, **follow)
    assert peer.wait_for("ended", 10)["job"] == job.job
    peer.say("forget", job=job.job)


@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_dead_agent_had_not_started_is_started(connect: Callable[[], Peer], job: JobPaths, fresh: bool) -> None:
    files = job.node("node0")
    files.root.mkdir()
    with contextlib.closing(EventFile(files.agent_events)) as dead:
        dead.write("node.up", agent=ProcessId.mine().to_json())
    peer = connect()
    peer.channel.send(*order(job.root, fresh=fresh))
    assert wait_until(files.launcher_events.exists)
    peer.say("end", job=job.job, grace=0.0)
    assert peer.wait_for("ended")["job"] == job.job
    peer.say("forget", job=job.job)


def test_a_driver_without_the_order_hears_that_nothing_was_started(connect: Callable[[], Peer], job: JobPaths) -> None:
    peer = connect()
    order = {"job": job.job, "job_root": str(job.root), "node": "node0", "ranks": [0], "attempt": 1}
    peer.say("follow", **order, shared=True, offsets={})
    assert peer.wait_for("ended")["job"] == job.job
    events = parse_lines(job.node("node0").agent_events.read_bytes()).events
    assert [event.data["error"] for event in events if event.kind == "node.ended"] == [
        "the agent was killed before it had started the ranks\n"
    ]


def test_at_its_limit_of_descriptors_it_neither_dies_nor_spins(connect: Callable[[], Peer]) -> None:
    peer = connect()
    agent = peer.agent()
    used = len(os.listdir(f"/proc/{agent.pid}/fd"))
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (used, used + 100))
    turned_away = [connect_agent(sys.executable) for _ in range(3)]
    for one in turned_away:
        one.settimeout(10)
        assert one.recv(1) == b""
        one.close()
    began = sum(map(int, stat_fields(agent.pid)[11:13]))
    time.sleep(1.0)
    assert sum(map(int, stat_fields(agent.pid)[11:13])) - began < 0.5 * os.sysconf("SC_CLK_TCK"), "it spins"
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (used + 100, used + 100))
    assert connect().agent() == agent
