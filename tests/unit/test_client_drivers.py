"""The pool of drivers, with interpreters that do what a driver may do: work, die, say something, take no notice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client import drivers
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.protocol.errors import LaunchError
from jupyter_torchdist.protocol.paths import Home, JobPaths

WRITES = """
import json, os, sys
line = sys.stdin.readline()
if line:
    line = json.loads(line)
    with open(line["file"] + ".part", "w") as file:
        json.dump({"pid": os.getpid(), "cwd": os.getcwd(), "sid": os.getsid(0), "environ": dict(os.environ)}, file)
    os.rename(line["file"] + ".part", line["file"])
    sys.stdin.read()
"""

Made = Callable[[str], DriverPool]


@pytest.fixture
def pool_of(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.setattr(drivers, "REFILL_DELAY", 0.0)
    pools = []

    def make(program: str) -> DriverPool:
        pools.append(DriverPool(("-c", program)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    return Home(tmp_path).job("a-job")


def give(pool: DriverPool, job: JobPaths, file: Path) -> dict[str, Any]:
    from jupyter_torchdist.protocol import codec

    pool.hand(job, {"file": str(file)}, file.exists)
    return dict(codec.loads(file.read_bytes()))


def spare_of(pool: DriverPool) -> subprocess.Popen[bytes]:
    deadline = time.monotonic() + 20
    while (spare := pool.spare) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return spare.process


def test_the_spare_takes_the_job_and_another_takes_its_place(pool_of: Made, job: JobPaths, tmp_path: Path) -> None:
    pool = pool_of(WRITES)
    pool.warm()
    pool.warm()
    first = spare_of(pool)
    told = give(pool, job, tmp_path / "told")
    assert told["pid"] == first.pid
    second = spare_of(pool)
    assert second.pid != first.pid
    assert give(pool, job, tmp_path / "told again")["pid"] == second.pid


def test_a_driver_stands_apart_from_this_process(
    pool_of: Made, job: JobPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "of the kernel")
    before = dict(os.environ)
    told = give(pool_of(WRITES), job, tmp_path / "told")
    assert told["cwd"] == "/"
    assert told["sid"] == told["pid"]
    # A warm process is keyed by variables that act at import, so a spare driver needs the kernel's.
    assert told["environ"]["OMP_PROC_BIND"] == "of the kernel"
    assert told["environ"]["TORCHDIST_HOME"] == os.environ["TORCHDIST_HOME"]
    assert dict(os.environ) == before


def test_a_dead_spare_is_replaced_in_silence(pool_of: Made, job: JobPaths, tmp_path: Path) -> None:
    pool = pool_of(WRITES)
    pool.warm()
    spare = spare_of(pool)
    spare.kill()
    spare.wait()
    assert give(pool, job, tmp_path / "told")["pid"] != spare.pid


def test_a_driver_that_dies_says_why(pool_of: Made, job: JobPaths) -> None:
    pool = pool_of("import sys; sys.stdin.readline(); sys.exit('the agent has no feet')")
    with pytest.raises(LaunchError, match="a-job died before") as caught:
        pool.hand(job, {}, lambda: False)
    assert "the agent has no feet" in caught.value.hint


def test_a_driver_that_cannot_start_says_why(pool_of: Made, job: JobPaths) -> None:
    with pytest.raises(LaunchError) as caught:
        pool_of("import a_module_that_is_missing").hand(job, {}, lambda: False)
    assert "ModuleNotFoundError" in caught.value.hint


def test_a_driver_that_takes_no_notice_is_ended(pool_of: Made, job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "TAKING", 0.05)
    with pytest.raises(LaunchError, match="did not take the job"):
        pool_of("import time; time.sleep(60)").hand(job, {}, lambda: False)


def test_no_interpreter_no_driver(pool_of: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchError, match="no driver could be started"):
        pool_of(WRITES).warm()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(LaunchError, match=r"sys\.executable"):
        pool_of(WRITES).warm()


def test_closing_ends_the_spare_and_keeps_the_jobs(pool_of: Made, job: JobPaths, tmp_path: Path) -> None:
    pool = pool_of("import sys, time\n" + WRITES.replace("sys.stdin.read()", "time.sleep(1)"))
    give(pool, job, tmp_path / "told")
    driver = pool.running[0].process
    spare = spare_of(pool)
    pool.close()
    pool.close()
    pool.warm()
    assert spare.poll() is not None
    assert pool.spare is None
    os.waitpid(driver.pid, 0)  # it was alive; nobody else takes its status any more


def test_the_spare_ends_with_its_kernel(home: Path, tmp_path: Path) -> None:
    program = (
        "import time\nfrom jupyter_torchdist.client.drivers import DriverPool\n"
        f"pool = DriverPool(('-c', {WRITES!r}))\npool.warm()\nprint(pool.spare.process.pid, flush=True)\ntime.sleep(60)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    spare = int(kernel.stdout.readline())
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{spare}").exists():
        assert time.monotonic() < deadline, "the spare outlived its kernel"
        time.sleep(0.01)


def test_many_threads_warm_one_spare(pool_of: Made) -> None:
    pool = pool_of(WRITES)
    threads = [threading.Thread(target=pool.warm) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spare = spare_of(pool)
    pool.warm()
    assert spare_of(pool) is spare


def test_one_pool_a_process_and_a_new_one_after_it_was_closed(home: Path) -> None:
    first = drivers.pool()
    assert drivers.pool() is first
    first.close()
    assert drivers.pool() is not first
    drivers.pool().close()
