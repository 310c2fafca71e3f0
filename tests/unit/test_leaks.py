"""The check that every test passes through finds what a test would leave behind."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.process import JOB_TOKEN
from tests.leaks import Snapshot, command_of, wait_until


@pytest.fixture
def later() -> Iterator[ExitStack]:
    """Cleans up what the test leaves on purpose."""
    with ExitStack() as stack:
        yield stack


def found(before: Snapshot, runtime: Path) -> str:
    return "\n".join(Snapshot.take(runtime).left_since(before))


def _sleeps(pid: int) -> bool:
    """A process has no command line for a moment while it starts a program."""
    return wait_until(lambda: command_of(pid) == "sleep 100", 30)


def test_nothing_is_found_where_nothing_is_left(tmp_path: Path) -> None:
    assert found(Snapshot.take(tmp_path), tmp_path) == ""


def test_child(tmp_path: Path, later: ExitStack) -> None:
    before = Snapshot.take(tmp_path)
    child = later.enter_context(subprocess.Popen(["sleep", "100"]))
    later.callback(child.kill)
    assert _sleeps(child.pid)
    assert f"process {child.pid}: sleep 100" in found(before, tmp_path)


def test_process_that_left_the_family(tmp_path: Path, later: ExitStack) -> None:
    """A rank that was orphaned is found by the runtime directory it was started with."""
    before = Snapshot.take(tmp_path)
    environ = {**os.environ, "TORCHDIST_RUNTIME_DIR": str(tmp_path), JOB_TOKEN: "a-job"}
    done = subprocess.run(
        ["sh", "-c", "sleep 100 >&- 2>&- & echo $!"], env=environ, capture_output=True, text=True, check=True
    )
    orphan = int(done.stdout)
    later.callback(os.kill, orphan, 9)
    assert _sleeps(orphan)
    assert f"process {orphan}: sleep 100 a-job" in found(before, tmp_path)


def test_thread(tmp_path: Path, later: ExitStack) -> None:
    before = Snapshot.take(tmp_path)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left-over")
    thread.start()
    later.callback(thread.join)
    later.callback(end.set)
    assert found(before, tmp_path) == "thread left-over"


def test_listening_socket(tmp_path: Path, later: ExitStack) -> None:
    before = Snapshot.take(tmp_path)
    server = later.enter_context(socket.create_server(("127.0.0.1", 0)))
    assert found(before, tmp_path) == f"listening socket {os.fstat(server.fileno()).st_ino}"


def test_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Snapshot.take(tmp_path)
    monkeypatch.setenv("LEFT_OVER", "1")
    assert found(before, tmp_path) == "os.environ['LEFT_OVER'] was None and is '1'"
