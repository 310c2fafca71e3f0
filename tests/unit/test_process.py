"""Who a process is: names that no other process can take over, and the marks by which a job's processes are found."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import LaunchError
from jupyter_torchdist.protocol.process import (
    JOB_TOKEN,
    JOB_TOKEN_LENGTH,
    ProcessId,
    _boot_session,
    _own_start,
    _started,
    boot_id,
    check_ranks,
    descendants,
    exit_in_words,
    job_token,
    job_token_of,
    processes_of_job,
    session_of,
    signal_name,
    start_ticks,
)
from tests.leaks import wait_until

SLEEP = "import time; time.sleep(60)"

Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a Python program in a session of its own; all of the session is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def spawn(program: str = SLEEP, *words: str, environ: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            env={**os.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield spawn
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


# -- identity


def test_a_process_is_alive_until_it_is_reaped_or_a_zombie(spawn: Spawn) -> None:
    process = spawn()
    identity = ProcessId.of(process.pid)
    assert identity.here
    assert identity.alive()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not identity.alive()
    assert start_ticks(process.pid) == 0
    process.wait()
    assert not identity.alive()


def test_another_process_of_the_same_number_is_not_it(spawn: Spawn) -> None:
    """As after a reuse of the pid: the number is alive, the start differs."""
    process = spawn()
    old = replace(ProcessId.of(process.pid), ticks=start_ticks(process.pid) - 1)
    assert not old.alive()
    assert not old.signal(signal.SIGKILL)
    assert process.poll() is None
    with pytest.raises(ProcessLookupError):
        old.open()


@pytest.mark.parametrize("change", [{"boot": "another"}, {"namespace": "pid:[1]"}, {"pid": 0}, {"ticks": 0}])
def test_what_is_elsewhere_or_nobody_is_never_signalled(change: dict[str, object], spawn: Spawn) -> None:
    process = spawn()
    identity = replace(ProcessId.of(process.pid), **change)  # type: ignore[arg-type]
    assert not identity.alive()
    assert not identity.signal(signal.SIGKILL)
    assert process.poll() is None


def test_a_failed_open_leaves_no_descriptor(spawn: Spawn) -> None:
    process = spawn()
    gone = replace(ProcessId.of(process.pid), ticks=1)
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        assert not gone.signal(signal.SIGKILL)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_signal_reaches_it(spawn: Spawn) -> None:
    process = spawn()
    assert ProcessId.of(process.pid).signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_an_identity_survives_its_journey() -> None:
    mine = ProcessId.mine()
    assert ProcessId.from_json(codec.loads(codec.dumps(mine.to_json()))) == mine
    assert mine.boot == boot_id() != ""


def test_the_namespace_is_that_of_the_process_not_of_its_parent() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ProcessId.mine().pid == os.getpid() and ProcessId.mine().alive() else 1)
    assert os.waitpid(pid, 0)[1] == 0


# -- where there is no /proc

IDENTITY = ProcessId.__module__


@pytest.fixture
def without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the identity of a process is concerned."""
    monkeypatch.setattr(f"{IDENTITY}.PROC", False)
    monkeypatch.setattr(f"{IDENTITY}._DEVIATION", 1)
    monkeypatch.setattr(f"{IDENTITY}.boot_id", _boot_session)
    monkeypatch.setattr(f"{IDENTITY}.pid_namespace", str)
    monkeypatch.delattr(os, "pidfd_open")
    _own_start.cache_clear()


@pytest.mark.parametrize("zone", ["UTC0", "Asia/Kolkata"])
def test_ps_knows_when_a_process_started(spawn: Spawn, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    before = time.time()
    child = spawn()
    assert before - 2 <= _started(child.pid) <= time.time() + 2


@pytest.mark.usefixtures("without_proc")
def test_ps_knows_who_lives(spawn: Spawn) -> None:
    child = spawn()
    identity = ProcessId.of(child.pid)
    assert (identity.boot, identity.namespace) == ("", "")
    assert identity.here and identity.alive()
    changes: list[dict[str, Any]] = [{"ticks": identity.ticks - 5}, {"ticks": 0}, {"host": "far"}, {"boot": "another"}]
    for change in changes:
        other = replace(identity, **change)
        assert not other.alive() and not other.signal(signal.SIGKILL)
    assert child.poll() is None
    assert identity.signal(signal.SIGTERM)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not identity.alive()
    assert child.wait() == -signal.SIGTERM
    assert not identity.alive() and not identity.signal(signal.SIGKILL)


@pytest.mark.usefixtures("without_proc")
def test_without_ps_nobody_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{IDENTITY}._PS", "/nowhere/ps")
    assert start_ticks(os.getpid()) == 0
    assert not ProcessId.mine().alive()


@pytest.mark.usefixtures("without_proc")
def test_ps_is_asked_once_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ProcessId.mine()
    assert mine.alive()
    monkeypatch.setattr(f"{IDENTITY}._PS", "/nowhere/ps")
    assert ProcessId.mine() == mine


@pytest.mark.usefixtures("without_proc")
def test_ranks_need_proc() -> None:
    with pytest.raises(LaunchError, match=r"ranks on this machine .* need Linux, ") as caught:
        check_ranks()
    assert "--hosts" in caught.value.hint


def test_this_system_is_no_mac() -> None:
    assert _boot_session() == ""
    check_ranks()


# -- the marks of a job

STAMP = """
import os, subprocess, sys
from jupyter_torchdist.node.assignment import stamp_job_token
fork = os.fork()
if fork:
    os.waitpid(fork, 0)
    sys.exit()
stamp_job_token(sys.argv[1])
os.environ["TORCHDIST_JOB"] = sys.argv[1]
os.environ["X" * 5000] = "an environment that has moved since"
child = os.fork()
if child == 0:
    {child}
os.write(1, f"{{os.getpid()}} {{child}}\\n".encode())
os.waitpid(child, 0)
"""
FORKED = "import time; time.sleep(60)"
EXECED = "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)'])"
CLEANED = "os.execve(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)'], {})"

PLACEHOLDER = {JOB_TOKEN: " " * JOB_TOKEN_LENGTH}


@pytest.mark.parametrize(("child", "marked"), [(FORKED, True), (EXECED, True), (CLEANED, False)])
def test_a_stamped_token_is_seen_of_what_it_forks_and_executes(child: str, marked: bool, spawn: Spawn) -> None:
    token = job_token(f"job-{os.getpid()}-{marked}", "node0")
    parent = spawn(STAMP.format(child=child), token, environ=PLACEHOLDER)
    stamped, its_child = (int(word) for word in said(parent).split())
    expected = {stamped, its_child} if marked else {stamped}
    for words in (token, token.partition("@")[0]):  # in the middle of an exec a process has no environment
        assert wait_until(lambda words=words: {p.pid for p in processes_of_job(words)} == expected)  # type: ignore[misc]
    assert job_token_of(parent.pid) == ""  # its parent, the zygote, keeps its placeholder


def test_a_process_without_a_placeholder_is_left_as_it_is(spawn: Spawn) -> None:
    program = (
        f"from jupyter_torchdist.node.assignment import stamp_job_token as s; s('x'); print(1, flush=True); {SLEEP}"
    )
    process = spawn(program)
    assert said(process) == "1"
    assert job_token_of(process.pid) == ""


def test_a_token_has_always_the_same_length() -> None:
    assert len(job_token("j", "n")) == len(job_token("j" * 300, "n")) == JOB_TOKEN_LENGTH


def test_only_the_variable_of_that_very_name_counts(spawn: Spawn) -> None:
    decoy = spawn(environ={f"MY_{JOB_TOKEN}": "decoy@node0"})
    both = spawn(environ={f"MY_{JOB_TOKEN}": "decoy@node0", JOB_TOKEN: "real@node0"})
    assert wait_until(lambda: job_token_of(both.pid) == "real@node0")  # empty while the program is being loaded
    assert job_token_of(decoy.pid) == ""


def test_the_session_of_a_leader_is_of_the_job(spawn: Spawn) -> None:
    leader = spawn(f"import os; p = os.fork(); p and print(p, flush=True)\n{SLEEP}")
    child = int(said(leader))
    identity = ProcessId.of(leader.pid)
    nobody = job_token("nobody", "node0")
    assert {p.pid for p in processes_of_job(nobody, [identity])} == {leader.pid, child}
    assert session_of(child) == leader.pid
    leader.kill()
    leader.wait()
    assert {p.pid for p in processes_of_job(nobody, [identity])} == {child}


def test_the_session_of_a_stranger_that_took_the_number_is_not(spawn: Spawn) -> None:
    stranger = spawn()
    old = replace(ProcessId.of(stranger.pid), ticks=start_ticks(stranger.pid) - 1)
    assert processes_of_job(job_token("nobody", "node0"), [old]) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a process another user's")
def test_another_users_process_is_left_out_and_does_not_hurt(spawn: Spawn) -> None:
    leader = spawn("import os\nprint(os.fork(), flush=True)\n" + SLEEP)
    said(leader)
    identity = ProcessId.of(leader.pid)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setuid(65534)
        left = processes_of_job(job_token("nobody", "node0"), [identity])
        os._exit(0 if left == [] and identity.alive() and not identity.signal(signal.SIGTERM) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert leader.poll() is None


def test_descendants_nearest_first(spawn: Spawn) -> None:
    program = f"import os; a = os.fork() or os.fork(); print(os.getpid(), flush=True)\n{SLEEP}"
    root = spawn(program)
    assert root.stdout is not None
    wait_until(lambda: len(descendants(root.pid)) == 2, 10)
    child, grandchild = descendants(root.pid)
    assert descendants(child) == [grandchild]
    assert descendants(grandchild) == []


# -- in words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed (SIGKILL)"),
        (-11, "was killed (SIGSEGV: a crash in native code)"),
        (-250, "was killed (signal 250)"),
        (1, "ended with exit code 1"),
        (127, "ended with exit code 127 (a command that was not found)"),
        (137, "ended with exit code 137 (SIGKILL)"),
    ],
)
def test_exits_in_words(code: int, words: str) -> None:
    assert exit_in_words(code) == words


def test_signals_have_the_names_of_linux() -> None:
    assert [signal_name(number) for number in range(1, 32)] == [signal.Signals(number).name for number in range(1, 32)]
    assert signal_name(0) == "signal 0"


def test_every_signal_has_words() -> None:
    for number in signal.valid_signals():
        assert re.fullmatch(r"was killed \((SIG[A-Z0-9]+(: .+)?|signal \d+)\)", exit_in_words(-int(number)))


def test_no_process_is_ever_found_by_a_name() -> None:
    package = Path(__file__).parents[2] / "jupyter_torchdist"
    words = re.compile(r"\b(pkill|pgrep|killall|psutil\.process_iter|cmdline)\b")
    found = [file.name for file in package.rglob("*.py") if words.search(file.read_text(encoding="utf-8"))]
    assert found == ["examine.py"], "which shows the command that holds a GPU"
