"""Ranks are asked before they are ended; who cannot answer is not waited for for long."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.node import asking
from jupyter_torchdist.node.stacks import touch
from jupyter_torchdist.protocol.paths import NodePaths

Start = Callable[[str], "subprocess.Popen[str]"]

ANSWERS = """
import signal
from jupyter_torchdist.protocol.process import STACKS_SIGNAL
signal.signal(STACKS_SIGNAL, lambda *_: {})
"""

BUSY = """
import random, signal, threading
from pathlib import Path
from jupyter_torchdist.protocol.paths import NodePaths
from jupyter_torchdist.ranks import bootstrap
from jupyter_torchdist.ranks.streams.recording import Recording
files = NodePaths(Path({root!r}))
bootstrap.show_stacks_in(files.stacks(0))
Recording(files, 0).listen(Path({root!r}), lambda: None)
def deep(n):
    return n and deep(n - 1)
def work():
    while True:
        deep(random.randrange(5, 800))
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
"""
"""A rank whose main thread waits, and whose other threads enter and leave functions all the time."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that does this, and then waits."""
    started: list[subprocess.Popen[str]] = []

    def begin(source: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", source + "\nprint('.', flush=True)\nwhile True: signal.pause()"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == ".\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_those_that_handle_the_signal_are_asked(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal would kill a rank that has no handler yet."""
    monkeypatch.setattr(asking, "PATIENCE", 60.0)
    files = NodePaths(tmp_path)
    answers = ANSWERS.format(f"open({str(files.recorder(4))!r}, 'a').write('.')")
    processes = [start(answers), start("import signal")]
    pids = {place: process.pid for place, process in enumerate(processes)}
    asking.ask(files, (4, 5), pids, lambda: {process.pid for process in processes if process.poll() is None})
    assert files.recorder(4).read_text() == "."
    assert [process.poll() for process in processes] == [None, None]


def test_one_that_does_not_answer_is_left_after_a_while(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PATIENCE", 0.05)
    mute = start(ANSWERS.format("None"))
    asking.ask(NodePaths(tmp_path), (0,), {0: mute.pid}, lambda: {mute.pid})
    assert mute.poll() is None


def test_one_that_ends_meanwhile_is_not_waited_for(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PATIENCE", 60.0)
    ends = start(ANSWERS.format("__import__('os')._exit(3)"))
    asking.ask(NodePaths(tmp_path), (0,), {0: ends.pid}, lambda: {ends.pid} if ends.poll() is None else set())
    assert ends.poll() == 3


def test_one_whose_threads_run_survives_each_question(start: Start, tmp_path: Path) -> None:
    """A signal's handler would read frames that end meanwhile: one question in a hundred would kill the process."""
    busy = start(BUSY.format(root=str(tmp_path)))
    files = NodePaths(tmp_path)
    for asked in range(1, 101):
        touch(files.stacks(0))
        while not files.recorder(0).exists() or files.recorder(0).read_bytes().count(b"\n") < asked:
            assert busy.poll() is None, f"it died at question {asked}"
            time.sleep(0.002)
    assert files.stacks(0).read_text().count("in deep") > 100
