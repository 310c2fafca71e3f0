"""What real processes take of the processor and of memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from jupyter_torchdist.node.loads import BUSY, MOVES, SHARE, Load, Loads, Seldom, _moved
from jupyter_torchdist.protocol.process import ProcessId, parse_stat, stat_fields
from tests.leaks import wait_until

MB = 1_000_000

TOUCH = "def touch(size):\n    data = bytearray(size)\n    data[::4096] = bytes(len(data[::4096]))\n    return data\n"
SLEEP = "print('ready', flush=True)\nimport time\ntime.sleep(60)\n"

Spawn = Callable[[str], ProcessId]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """A Python program in a session of its own that has said a line; all of the session is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def spawn(program: str) -> ProcessId:
        words = [sys.executable, "-c", "import os\n" + TOUCH + program]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True))
        stdout = started[-1].stdout
        assert stdout is not None
        assert stdout.readline() == "ready\n"
        return ProcessId.of(started[-1].pid)

    yield spawn
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def looks(rank: ProcessId, until: Callable[[Load], bool]) -> Load:
    """The first look at which ``until`` holds; its clock has each look rest from the one before."""
    loads, begun = Loads(), time.monotonic()
    last: list[Load] = []

    def look() -> bool:
        ahead = 60.0 * len(last)
        last.append(loads.look([rank], time.monotonic() - begun + ahead)[rank])
        return until(last[-1])

    assert wait_until(look), last[-1]
    return last[-1]


def test_memory_is_what_was_touched(spawn: Spawn) -> None:
    empty, full = spawn(SLEEP), spawn("data = touch(300_000_000)\n" + SLEEP)
    found = Loads().look([empty, full], 0.0)
    assert found[empty].memory < 30 * MB
    assert 300 * MB < found[full].memory < 340 * MB


def test_shared_memory_counts(spawn: Spawn) -> None:
    rank = spawn("import mmap\nshared = mmap.mmap(-1, 100_000_000)\nshared[:] = bytes(len(shared))\n" + SLEEP)
    assert Loads().look([rank], 0.0)[rank].memory > 100 * MB


def test_a_forked_child_counts_with_what_only_it_has(spawn: Spawn) -> None:
    fork = "data = touch(200_000_000)\nif os.fork() == 0:\n    own = touch(100_000_000)\n"
    rank = spawn(fork + "    print('ready', flush=True)\nimport time\ntime.sleep(60)\n")
    load = looks(rank, lambda load: load.memory > 290 * MB)
    assert load.memory < 340 * MB, "data that both have was counted twice"
    assert len(load.pids) == 2


def test_a_child_that_left_the_session_counts_too(spawn: Spawn) -> None:
    left = "    os.setsid()\n    os.write(says, b'.')\n    signal.pause()\n"
    leave = f"hears, says = os.pipe()\nchild = os.fork()\nif child == 0:\n{left}"
    # Ready where nothing but the child's end comes after an interrupt.
    wait = "try:\n    os.read(hears, 1)\n" + "    print('ready', flush=True)\n    signal.pause()\n"
    heeds = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
    rank = spawn(heeds + leave + wait + "finally:\n    os.kill(child, signal.SIGKILL)\n")
    try:
        (child,) = Loads().look([rank], 0.0)[rank].pids - {rank.pid}
    finally:
        rank.signal(signal.SIGINT)
    assert wait_until(lambda: not ProcessId.of(child).alive())


def test_who_computes_shows_it_and_who_sleeps_does_not(spawn: Spawn) -> None:
    """In ticks of the processes themselves, as a busy machine may give them any part of a core."""
    fork = "if os.fork() == 0:\n    print('ready', flush=True)\n    while True:\n        pass\n"
    busy, idle = spawn(fork + "while True:\n    pass\n"), spawn(SLEEP)
    both, loads = Loads().look([busy], 0.0)[busy], Loads()
    earlier = _ticks(both)
    first = loads.look([busy, idle], 0.0)
    assert (first[busy].cpu, first[busy].works) == (None, None)
    assert first[busy].pids == both.pids
    assert len(both.pids) == 2
    later = _ticks(both)
    assert wait_until(lambda: _ticks(both) >= later + 50)
    found = loads.look([busy, idle], 0.5)
    grown = 100 * (_ticks(both) - earlier) / os.sysconf("SC_CLK_TCK") / 0.5
    assert 90 <= (found[busy].cpu or 0) <= grown
    assert found[idle].cpu == 0.0
    assert (found[busy].works, found[idle].works) == (True, False)


def test_who_reads_works(spawn: Spawn) -> None:
    """By what was read: it takes hardly any of the processor."""
    rank = spawn(
        "import time\nprint('ready', flush=True)\n"
        "while True:\n    time.sleep(0.01)\n    open('/dev/zero', 'rb').read(1_000_000)\n"
    )
    loads = Loads()
    loads.look([rank], 0.0)
    begun = _moved(rank.pid)
    assert wait_until(lambda: _moved(rank.pid) > begun + 200 * MOVES)
    found = loads.look([rank], 100.0)[rank]
    assert found.works and (found.cpu or 0) < BUSY


def _ticks(load: Load) -> int:
    return sum(int(fields[11]) + int(fields[12]) for fields in map(stat_fields, load.pids))


def test_ranks_that_go_meanwhile(spawn: Spawn) -> None:
    one, other = spawn(SLEEP), spawn(SLEEP)
    loads = Loads()
    assert loads.look([one, other], 0.0).keys() == {one, other}
    one.signal(signal.SIGKILL)
    assert wait_until(lambda: not one.alive())
    assert loads.look([one, other], 2.0).keys() == {other}
    stranger = ProcessId(other.host, other.boot, other.namespace, other.pid, other.ticks - 1)
    assert loads.look([stranger], 4.0) == {}


def test_a_name_that_looks_like_the_end_of_the_name(spawn: Spawn) -> None:
    odd = spawn("open('/proc/self/comm', 'w').write('a) b (c')\n" + SLEEP)
    assert Loads().look([odd], 0.0)[odd].pids == {odd.pid}


def test_a_line_of_a_million_bytes() -> None:
    rest = b"S 1 2 3 " + b" ".join(b"%d" % number for number in range(48))
    line = b"7 (" + b"a) b (c " * 125_000 + b") " + rest
    assert parse_stat(line) == rest.decode().split()
    for nothing in (b"", b"7 (half of a na"):
        with pytest.raises(OSError, match="stat"):
            parse_stat(nothing)


def test_what_is_dear_rests_for_as_long_as_it_cost() -> None:
    seldom = Seldom()
    assert seldom.due(10.0)
    before = time.thread_time()
    with seldom.spending(10.0):
        began = time.thread_time()
        while time.thread_time() < began + 0.02:
            pass
    spent = time.thread_time() - before
    assert not seldom.due(10.0 + 0.019 / SHARE)
    assert seldom.due(10.0 + spent / SHARE + 0.001)
