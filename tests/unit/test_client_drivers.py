"""The pool of drivers, with interpreters that do what a driver may do: work, die, say something, take no notice."""

from __future__ import annotations

import os
import signal
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
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import LaunchError
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.protocol.process import ProcessId, descendants, start_ticks
from jupyter_torchdist.protocol.world import World
from tests.leaks import wait_until

SERVES = """
import json, os, sys, time
from jupyter_torchdist.driver.zygote import forking, serve, Spares, wait_for_a_job

def drive(line):
    {}

serve(forking(drive))
"""
WITHOUT_FORKS = """
if sys.argv[1:] == ["--spare"]:
    wait_for_a_job(drive)
else:
    spares = Spares([sys.executable, "-c", sys.orig_argv[2], "--spare"])
    spares.keep()
    serve(spares, spares.keep)
"""
WRITES = SERVES.format("""
    told = line["world"]["environ"]["TOLD"]
    with open(told + ".part", "w") as file:
        json.dump({"pid": os.getpid(), "cwd": os.getcwd(), "sid": os.getsid(0), "environ": dict(os.environ)}, file)
    os.rename(told + ".part", told)
    time.sleep(1)
""")

Made = Callable[[str], DriverPool]


@pytest.fixture(params=["forks", "spares"])
def pool_of(home: Path, request: pytest.FixtureRequest) -> Iterator[Made]:
    """Drivers are started as on Linux, and as on macOS."""
    pools = []

    def make(program: str) -> DriverPool:
        if request.param == "spares":
            program = program.replace("serve(forking(drive))\n", WITHOUT_FORKS)
        pools.append(DriverPool(("-c", program)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    return Home(tmp_path).job("a-job")


def world(**environ: str) -> World:
    return World(environ, "/", (), 0o77, {}, sys.executable)


def give(pool: DriverPool, job: JobPaths, file: Path) -> dict[str, Any]:
    pool.hand(job, Path("/blobs"), world(TOLD=str(file)), file.exists)
    return dict(codec.loads(file.read_bytes()))


def hand(pool: DriverPool, job: JobPaths) -> None:
    """To a driver that will never take it."""
    pool.hand(job, Path("/blobs"), world(), lambda: False)


def process_of(pool: DriverPool) -> subprocess.Popen[bytes]:
    """The zygote's."""
    assert pool.zygote is not None
    return pool.zygote.started.process


def test_every_job_has_a_driver_of_its_own_from_one_zygote(pool_of: Made, job: JobPaths, tmp_path: Path) -> None:
    pool = pool_of(WRITES)
    pool.warm()
    zygote = process_of(pool)
    told = [give(pool, job, tmp_path / name) for name in ("first", "second", "third")]
    assert process_of(pool) is zygote
    assert len({zygote.pid, *(driver["pid"] for driver in told)}) == 4


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


def test_a_dead_zygote_is_replaced_in_silence(pool_of: Made, job: JobPaths, tmp_path: Path) -> None:
    pool = pool_of(WRITES)
    pool.warm()
    zygote = process_of(pool)
    zygote.kill()
    zygote.wait()
    give(pool, job, tmp_path / "told")
    assert process_of(pool).pid != zygote.pid


def test_a_zygote_that_dies_with_the_order_is_replaced_once(pool_of: Made, job: JobPaths, tmp_path: Path) -> None:
    died = str(tmp_path / "died")
    first_dies = f"import os\nif not os.path.exists({died!r}): open({died!r}, 'w'); input(); exit()\n"
    assert give(pool_of(first_dies + WRITES), job, tmp_path / "told")


def test_a_driver_that_dies_says_why(pool_of: Made, job: JobPaths) -> None:
    with pytest.raises(LaunchError, match="a-job ended before it started the job") as caught:
        hand(pool_of(SERVES.format("sys.exit('the agent has no feet')")), job)
    assert "the agent has no feet" in caught.value.hint


def test_a_driver_that_cannot_start_says_why(pool_of: Made, job: JobPaths) -> None:
    with pytest.raises(LaunchError) as caught:
        hand(pool_of("import a_module_that_is_missing"), job)
    assert "ModuleNotFoundError" in caught.value.hint


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", SERVES.format("time.sleep(60)")])
def test_a_driver_that_takes_no_notice_is_ended(
    pool_of: Made, job: JobPaths, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(drivers, "TAKING", 1.0)
    with pytest.raises(LaunchError, match="did not start the job within"):
        hand(pool_of(program), job)


def test_no_interpreter_no_driver(pool_of: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchError, match="no driver could be started"):
        pool_of(WRITES).warm()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(LaunchError, match=r"sys\.executable"):
        pool_of(WRITES).warm()


def test_closing_ends_the_zygote_and_keeps_the_drivers(pool_of: Made, job: JobPaths, tmp_path: Path) -> None:
    pool = pool_of(WRITES)
    driver = ProcessId.of(give(pool, job, tmp_path / "told")["pid"])
    zygote = process_of(pool)
    pool.close()
    pool.close()
    pool.warm()
    assert zygote.poll() is not None
    assert pool.zygote is None
    assert driver.alive()


def test_the_zygote_ends_with_its_kernel(home: Path, tmp_path: Path) -> None:
    program = (
        "import time\nfrom jupyter_torchdist.client.drivers import DriverPool\n"
        f"pool = DriverPool(('-c', {WRITES!r}))\npool.warm()\n"
        "print(pool.zygote.started.process.pid, flush=True)\ntime.sleep(60)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    zygote = int(kernel.stdout.readline())
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{zygote}").exists():
        assert time.monotonic() < deadline, "the zygote outlived its kernel"
        time.sleep(0.01)


@pytest.mark.parametrize("pool_of", ["spares"], indirect=True)
def test_a_spare_driver_that_was_killed_is_replaced(pool_of: Made, job: JobPaths, tmp_path: Path) -> None:
    pool = pool_of(WRITES)
    pool.warm()
    zygote = process_of(pool)
    assert wait_until(lambda: len(descendants(zygote.pid)) == 1)
    (spare,) = descendants(zygote.pid)
    os.kill(spare, signal.SIGKILL)
    assert wait_until(lambda: not start_ticks(spare))
    assert give(pool, job, tmp_path / "told")["pid"] != spare


def test_many_threads_warm_one_zygote(pool_of: Made) -> None:
    pool = pool_of(WRITES)
    threads = [threading.Thread(target=pool.warm) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    zygote = process_of(pool)
    pool.warm()
    assert process_of(pool) is zygote


def test_one_pool_a_process_and_a_new_one_after_it_was_closed(home: Path) -> None:
    first = drivers.pool()
    assert drivers.pool() is first
    first.close()
    assert drivers.pool() is not first
    drivers.pool().close()
