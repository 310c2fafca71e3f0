"""Fixtures of every test: a data directory of its own, warm processes a session, a check that nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from tests.frugal import without_grammars

without_grammars()  # before anything imports jsonschema

from jupyter_torchdist.protocol.process import processes_of_job
from tests.kernels import ForkServer
from tests.leaks import Snapshot, command_of, processes_of_runtime, wait_until
from tests.notebook import Notebook

for _number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_number, signal.SIG_DFL)  # ``nohup`` and a shell's background ignore them, and children inherit that

FAILED = pytest.StashKey[bool]()
"""Whether a test has failed by itself, before any fixture looked at what it left."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def end_jobs(home: Path) -> None:
    """Kill what runs of the jobs there: a test that failed half way has not ended them, which is no second failure."""

    def ended() -> bool:
        running = [process for job in home.glob("jobs/[!.]*") for process in processes_of_job(job.name)]
        for process in running:
            process.signal(signal.SIGKILL)
        return not running

    wait_until(ended)


@pytest.hookimpl(trylast=True)  # once their order is made random
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What may take long comes first with each worker, which has a slice of the list: nothing is left for the end."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    count, long = len(items), sorted(filter(_patience, items), key=_patience, reverse=True)
    rest = [item for item in items if not _patience(item)]
    items.clear()
    for number in range(workers):
        own = long[number::workers]
        share = max(0, (count - len(items)) // (workers - number) - len(own))
        items += own + rest[:share]
        del rest[:share]
    items += rest


def _patience(item: pytest.Item) -> float:
    """Seconds, of a test that was given a time of its own; else 0."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0


def _private_runtime() -> Iterator[Path]:
    """A short path (a socket's may have 107 bytes), and in the end nothing that still runs in it."""
    directory = Path(tempfile.mkdtemp(prefix="td-", dir="/tmp"))
    yield directory
    gone = wait_until(lambda: not processes_of_runtime(directory))
    left = {} if gone else {pid: command_of(pid) for pid in processes_of_runtime(directory)}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    rmtree(directory, ignore_errors=True)
    assert not left, f"still there 20 s after their last connection: {left}"


@pytest.fixture(scope="session")
def shared_runtime() -> Iterator[Path]:
    """``TORCHDIST_RUNTIME_DIR`` of all tests of a session: agent and zygote stay warm from one to the next."""
    for directory in _private_runtime():
        yield directory
        if module := sys.modules.get("jupyter_torchdist.client.drivers"):
            module.pool().close()  # the driver zygote of this process, for tests that submit without a kernel


@pytest.fixture(scope="session")
def lasting() -> set[int]:
    """Processes that stay until the session's end, and whose own come and go."""
    return set()


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, shared_runtime: Path, lasting: set[int], tmp_path: Path) -> Iterator[Path]:
    """``TORCHDIST_HOME`` of this test. Fails the test that leaves a process, thread, socket or variable behind."""
    before = Snapshot.take(shared_runtime, lasting)
    directory = tmp_path / "torchdist-home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDIST_HOME", str(directory))
        patch.setenv("TORCHDIST_RUNTIME_DIR", str(shared_runtime))
        patch.setenv("TORCHDIST_SCRATCH", str(shared_runtime / "scratch"))
        patch.setenv("TORCHDIST_QUEUE", str(shared_runtime / "queue"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared_runtime / "inductor"))  # else torch sets it, for good
        yield directory
    if request.node.stash.get(FAILED, False):
        end_jobs(directory)
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = Snapshot.take(shared_runtime, lasting).left_since(before)
        return not left

    assert wait_until(nothing_left), "the test left behind:\n  " + "\n  ".join(left)


@pytest.fixture
def own_runtime(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``TORCHDIST_RUNTIME_DIR`` for this test alone, for tests that kill agents; empty of processes afterwards.

    Its zygotes live shortly: they import what every rank needs and no more.
    """
    for directory in _private_runtime():
        monkeypatch.setenv("TORCHDIST_RUNTIME_DIR", str(directory))
        monkeypatch.setenv("TORCHDIST_SUCCESSORS", "0")
        yield directory


@pytest.fixture(scope="session")
def kernels() -> Iterator[ForkServer]:
    """Where kernels come from."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def new_notebook(kernels: ForkServer, home: Path, tmp_path: Path) -> Iterator[Callable[..., Notebook]]:
    """Start as many kernels as the test needs, each with the extension loaded; all end with the test.

    ``forked=False`` for tests that look at a kernel's own process: its environment, control group or start.
    """
    opened: list[Notebook] = []

    def start(*, forked: bool = True) -> Notebook:
        opened.append(Notebook(tmp_path, server=kernels if forked else None))
        return opened[-1].load()

    yield start
    for notebook in opened:
        notebook.close()


@pytest.fixture
def kernel(new_notebook: Callable[[], Notebook]) -> Notebook:
    """A real IPython kernel with the extension loaded."""
    return new_notebook()
