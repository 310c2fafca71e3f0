"""The pool of warm processes: which job gets which, how many there are, what becomes of jobs whose zygote dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.node import warm
from jupyter_torchdist.node.assignment import import_environment
from jupyter_torchdist.node.warm import WarmPool, base_environment, key_of, start_fresh
from jupyter_torchdist.protocol.plan import NodePlan, Plan
from jupyter_torchdist.protocol.process import job_token_of
from jupyter_torchdist.protocol.wire.assignment import Assignment
from jupyter_torchdist.protocol.wire.channel import Channel
from jupyter_torchdist.protocol.world import World
from tests.leaks import environ_of, wait_until

SILENT = "#!/bin/sh\nexec sleep 60\n"
DEAD = "#!/bin/sh\nexit 1\n"


class Pool:
    """A pool over programs that stand for interpreters, and what it reports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.readable: dict[Channel, Any] = {}
        self.forked: list[tuple[str, int, int]] = []
        self.failed: list[str] = []
        self.pool = WarmPool(
            directory / "zygote.log",
            self.readable.__setitem__,
            lambda channel: self.readable.pop(channel, None),
            lambda *told: self.forked.append(told),
            lambda assignment: self.failed.append(assignment.job),
        )

    def python(self, name: str, text: str) -> str:
        path = self.directory / name
        path.write_text(text)
        path.chmod(0o700)
        return str(path)

    def told(self) -> list[str]:
        """Jobs that failed, after a look at the channels."""
        for callback in list(self.readable.values()):
            callback()
        return self.failed

    def close(self) -> None:
        processes = [zygote.process for zygote in self.pool.zygotes.values()]
        self.pool.close()
        for process in processes:
            process.wait()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path)
    yield pool
    pool.close()


def assignment(job: str, python: str, environ: dict[str, str] | None = None) -> Assignment:
    plan = Plan(job, 1, "gloo", (NodePlan("node0", (0,)),), False, None, None, 5.0)
    return Assignment("/nonexistent", "/", "node0", plan, World(environ or {}, "/", (), 0o77, {}, python))


def test_what_acts_at_import_decides_and_nothing_else() -> None:
    base = {"HOME": "/h", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "2"}
    assert key_of("p", base) == key_of("p", {**base, "HOME": "/other", "EXTRA": "1"})
    assert key_of("p", base) != key_of("q", base)
    for name in ("OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONPATH", "TORCH_LOGS", "MKL_NUM_THREADS"):
        assert key_of("p", base) != key_of("p", {**base, name: "x"})
    assert "TORCHDIST_HOME" not in import_environment({"TORCHDIST_HOME": "/h"})


def test_a_secret_of_the_notebook_is_not_in_the_zygotes_environment() -> None:
    assert "API_KEY" not in base_environment({"API_KEY": "s", "PATH": "/bin"})


def test_equal_jobs_share_one(pool: Pool) -> None:
    python = pool.python("python", SILENT)
    first = pool.pool.warm(python, {"A": "1"})
    assert pool.pool.warm(python, {"A": "2"}) is first
    assert pool.pool.warm(python, {"OMP_NUM_THREADS": "2"}) is not first


def test_there_are_never_many(pool: Pool) -> None:
    python = pool.python("python", SILENT)
    started = [pool.pool.warm(python, {"OMP_NUM_THREADS": str(n)}) for n in range(warm.MOST)]
    started[0].used += 1000
    extra = pool.pool.warm(python, {"OMP_NUM_THREADS": "99"})
    left = list(pool.pool.zygotes.values())
    assert len(left) == warm.MOST
    assert started[0] in left and extra in left and started[1] not in left
    assert started[1].process.wait(10) < 0


def test_one_that_jobs_wait_for_is_kept(pool: Pool) -> None:
    python = pool.python("python", SILENT)
    for n in range(warm.MOST + 2):
        pool.pool.launch(assignment(f"j{n}", python, {"OMP_NUM_THREADS": str(n)}))
    assert len(pool.pool.zygotes) == warm.MOST + 2
    assert pool.failed == []


def test_a_zygote_that_dies_gives_its_jobs_back(pool: Pool) -> None:
    pool.pool.launch(assignment("j1", pool.python("python", DEAD)))
    assert wait_until(lambda: pool.told() == ["j1"])
    assert pool.pool.zygotes == {}
    assert pool.readable == {}


def test_an_interpreter_that_is_not_there(pool: Pool) -> None:
    with pytest.raises(OSError, match="nonexistent"):
        pool.pool.launch(assignment("j1", "/nonexistent/python"))
    assert pool.pool.zygotes == {}


def test_a_job_is_withdrawn_only_while_it_waits(pool: Pool) -> None:
    python = pool.python("python", SILENT)
    pool.pool.launch(assignment("j1", python))
    assert pool.pool.withdraw("j1")
    assert not pool.pool.withdraw("j1")
    zygote = pool.pool.warm(python, {})
    pool.pool._on_message(zygote, {"type": "ready", "pid": zygote.process.pid})
    pool.pool.launch(assignment("j2", python))
    assert not pool.pool.withdraw("j2")
    pool.pool._on_message(zygote, {"type": "forked", "job": "j2", "pid": 1, "ticks": 2})
    assert pool.forked == [("j2", 1, 2)]


def test_a_library_that_starts_threads_is_left_out_from_then_on(pool: Pool) -> None:
    python = pool.python("python", SILENT)
    zygote = pool.pool.warm(python, {})
    pool.pool._on_message(zygote, {"type": "unsafe", "library": "sklearn"})
    args = pool.pool.warm(python, {"OMP_NUM_THREADS": "2"}).process.args
    assert isinstance(args, list)
    assert args[-1] == "sklearn"


def test_idle_ones_retire(pool: Pool) -> None:
    python = pool.python("python", SILENT)
    zygote = pool.pool.warm(python, {})
    pool.pool.retire(zygote.used + warm.IDLE_SECONDS - 1)
    assert len(pool.pool.zygotes) == 1
    pool.pool.retire(zygote.used + warm.IDLE_SECONDS + 1)
    assert pool.pool.zygotes == {}
    assert zygote.process.wait(10) < 0


def test_a_fresh_launcher_reads_its_assignment_from_memory(pool: Pool, tmp_path: Path) -> None:
    """However large the environment: the agent must not wait for an interpreter to start and read a pipe."""
    python = pool.python("python", f"#!/bin/sh\nsleep 0.1\nhead -n 1 > {tmp_path}/given\nexec sleep 60\n")
    job = assignment("j1", python, {"LARGE": "x" * 1_000_000, "PATH": os.environ["PATH"]})
    process = start_fresh(job, tmp_path / "launcher.log")
    assert wait_until(lambda: (tmp_path / "given").exists() and (tmp_path / "given").stat().st_size > 1_000_000)
    # Between one program and the next a process has no environment to be read.
    assert wait_until(lambda: job_token_of(process.pid) == "j1@node0")
    assert "LARGE" not in environ_of(process.pid)
    process.kill()
    process.wait()
