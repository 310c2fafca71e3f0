"""A rank's life: prepared, run, ended well, failed, interrupted. Two real ranks each time."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.process import start_ticks
from tests.ranks import RankJob, Warm


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as process:
        yield process


def test_a_plain_cell(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm,
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "rank = dist.get_rank()\n"
        "print('rank', rank, 'of', dist.get_world_size())\n"
        "total = torch.tensor([scale * (rank + 1)])\n"
        "dist.all_reduce(total)\n"
        "total.item()\n",
        names={"scale": 10},
        bound=("torch", "dist", "rank", "total"),
    ).run()
    assert job.codes == {0: 0, 1: 0}, (job.err(0), job.err(1))
    for rank in (0, 1):
        assert job.out_text(rank) == f"rank {rank} of 2\n"
        assert job.err(rank) == ""
        assert [line["data"]["text/plain"] for line in job.display(rank)] == ["30"]
    assert job.kinds(0) == ["rank.started", "rank.ready", "rank.ending", "rank.result", "rank.done"]
    assert job.kinds(1) == ["rank.started", "rank.ready", "rank.ending", "rank.done"]
    values = job.values()
    assert values["rank"] == 0 and values["total"].tolist() == [30] and values["__torchdist_value__"] == 30
    assert {"torch", "dist"} <= set(job.event(0, "rank.result").data["names"])


def test_an_exception(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm,
        tmp_path,
        "import torch.distributed as dist\n"
        "def f(x):\n"
        "    return 1 / x\n"
        "rank = dist.get_rank()\n"
        "if rank == 1:\n"
        "    f(0)\n",
        bound=("dist", "f", "rank"),
    ).run()
    assert job.codes == {0: 0, 1: 1}
    error = job.error(1)
    assert (error.type, error.message) == ("ZeroDivisionError", "division by zero")
    assert error.frames == (("Cell In[12]", 7, "<module>", "f(0)"), ("Cell In[12]", 4, "f", "return 1 / x"))
    assert job.err(1) == error.text
    assert job.paths.error(1).exists()


def test_exits_that_are_no_failures(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm,
        tmp_path,
        "import sys, torch.distributed as dist\nrank = dist.get_rank()\nsys.exit(None if rank else 0)\n",
        bound=("sys", "dist", "rank"),
    ).run()
    assert job.codes == {0: 0, 1: 0}
    assert job.kinds(1)[-1] == "rank.done" and job.values()["rank"] == 0


@pytest.mark.parametrize(("status", "message"), [("3", "3"), ("'no data'", "no data")])
def test_an_exit_code_is_a_failure(warm: Warm, tmp_path: Path, status: str, message: str) -> None:
    job = RankJob(warm, tmp_path, f"x = 1\nimport sys\nsys.exit({status})\n", world=1, bound=("x",)).run()
    assert job.codes == {0: 1}
    assert (job.error(0).type, job.error(0).message) == ("SystemExit", message)
    assert job.values() == {"x": 1}


def test_an_interrupt(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm,
        tmp_path,
        "import time\ndone = [1]\nprint('here')\nwhile True:\n    done.append(1)\n    time.sleep(0.001)\n",
        bound=("time", "done"),
    ).start()
    for rank in (0, 1):
        job.until(lambda rank=rank: job.files.out(rank).exists() and "here" in job.out_text(rank))  # type: ignore[misc]
        os.kill(job.pid(rank), signal.SIGINT)
    job.wait()
    assert job.codes == {0: 0, 1: 0}
    assert job.kinds(0) == ["rank.started", "rank.ready", "rank.interrupted", "rank.result"]
    assert job.kinds(1) == ["rank.started", "rank.ready", "rank.interrupted"]
    assert len(job.values()["done"]) > 0
    assert "KeyboardInterrupt" in job.err(1)


def test_an_interrupt_the_code_handles_itself(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm,
        tmp_path,
        "import time\ntry:\n    print('here')\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    saved = True\n",
        world=1,
        bound=("saved",),
    ).start()
    job.until(lambda: job.files.out(0).exists() and "here" in job.out_text(0))
    os.kill(job.pid(0), signal.SIGINT)
    job.wait()
    assert job.kinds(0)[-2:] == ["rank.result", "rank.done"] and job.values() == {"saved": True}


def test_a_keyboard_interrupt_without_a_signal_is_a_failure(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(warm, tmp_path, "raise KeyboardInterrupt('mine')\n", world=1).run()
    assert job.codes == {0: 1}
    assert job.error(0).type == "KeyboardInterrupt"


def test_values_that_exist_come_back_after_a_failure(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(warm, tmp_path, "x = [1]\nraise ValueError('late')\ny = 2\n", world=1, bound=("x", "y")).run()
    assert job.kinds(0) == ["rank.started", "rank.ready", "rank.failed", "rank.result"]
    assert job.values() == {"x": [1]}


def test_what_user_code_leaves_running(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm,
        tmp_path,
        "import atexit, threading, time, tempfile\n"
        "seen = []\n"
        "folder = tempfile.TemporaryDirectory()\n"
        "atexit.register(print, 'at exit')\n"
        "def late():\n"
        "    time.sleep(0.2)\n"
        "    seen.append(1)\n"
        "threading.Thread(target=late).start()\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print(folder.name)\n",
        world=1,
        bound=("seen",),
    ).run()
    assert job.codes == {0: 0}, job.err(0)
    assert job.values()["seen"] == [1]
    folder, at_exit = job.out_text(0).splitlines()
    assert at_exit == "at exit" and not Path(folder).exists()


def test_a_failed_rank_does_not_wait_for_its_own_clean_up(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm,
        tmp_path,
        "import atexit, time, torch.utils.data as data, multiprocessing as mp\n"
        "atexit.register(time.sleep, 600)\n"
        "p = mp.Process(target=time.sleep, args=(600,), daemon=True)\n"
        "p.start()\n"
        "print(p.pid, flush=True)\n"
        "1 / 0\n",
        world=1,
    ).run()
    assert job.codes == {0: 1}
    job.until(lambda: start_ticks(int(job.out_text(0))) == 0)


def test_hard_ends(warm: Warm, tmp_path: Path) -> None:
    source = (
        "import os, ctypes, torch.distributed as dist\n"
        "dist.barrier()\n"  # else a rank may die to which the other one still connects
        "print('last words')\n"
        "os._exit(3) if dist.get_rank() else ctypes.string_at(0)\n"
    )
    job = RankJob(warm, tmp_path, source).run()
    assert job.codes == {0: -signal.SIGSEGV, 1: 3}
    # ``print`` writes its newline by itself; between the two the flusher may run, and then the newline may have 5 ms.
    assert job.out_text(0).rstrip("\n") == job.out_text(1).rstrip("\n") == "last words"
    assert "Segmentation fault" in job.err(0) and "Cell In[12]" in job.err(0)
    assert job.kinds(0) == ["rank.started", "rank.ready"]


def test_a_damaged_bundle_is_refused(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(warm, tmp_path, "print('never')\n", world=1, names={"x": 1})
    job.write()
    for blob in job.blobs.iterdir():
        blob.write_bytes(blob.read_bytes() + b"!")
    job.write = lambda: None  # type: ignore[method-assign]
    job.run()
    assert job.codes == {0: 1}
    assert job.error(0).type == "DamagedJob" and job.out_text(0) == ""


def test_fresh_interpreters(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm, tmp_path, "import os\nprint(__name__, os.environ['RANK'])\nx = 5\n", fresh=True, bound=("x",)
    ).run()
    assert job.codes == {0: 0, 1: 0}, job.err(0)
    assert job.out_text(1) == "__main__ 1\n" and job.values() == {"x": 5}


def test_environment_of_a_rank(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm,
        tmp_path,
        "import os, sys, torch, multiprocessing as mp, random, numpy\n"
        "facts = dict(threads=torch.get_num_threads(), argv=[*sys.argv], name=__name__, file='__file__' in globals(),\n"
        "  mpl=os.environ['MPLBACKEND'], process=mp.current_process().name, parent=mp.parent_process(),\n"
        "  torch=torch.rand(1).item(), main=sys.modules['__main__'].__dict__ is globals(), stdin=sys.stdin.read(),\n"
        "  random=random.random(), numpy=numpy.random.random(), leads=os.getsid(0) == os.getpid())\n",
        env={"OMP_NUM_THREADS": "3", "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
        bound=("facts",),
        collect="all",
    ).run()
    facts = [job.values(rank)["facts"] for rank in (0, 1)]
    for name in ("random", "numpy", "torch"):
        assert facts[0].pop(name) != facts[1].pop(name)
    assert facts[0] == facts[1] == {
        "threads": 3, "argv": [""], "name": "__main__", "file": False, "mpl": "Agg", "process": "MainProcess",
        "parent": None, "main": True, "stdin": "",
        "leads": True,
    }  # fmt: skip


@pytest.mark.parametrize("where", ["time.sleep(60)", "dist.barrier()", "while True: pass"])
def test_a_rank_that_is_stopped_leaves_what_exists(warm: Warm, tmp_path: Path, where: str) -> None:
    source = (
        "import time, torch.distributed as dist\n"
        "best = {'loss': 0.5}\n"
        "print('here')\n"
        f"time.sleep(60) if dist.get_rank() else 0\n"
        f"{where}\n"
    )
    job = RankJob(warm, tmp_path, source, bound=("best",)).start()
    for rank in (0, 1):
        job.until(lambda rank=rank: job.files.out(rank).exists() and "here" in job.out_text(rank))  # type: ignore[misc]
        os.kill(job.pid(rank), signal.SIGTERM)
    job.wait()
    assert job.codes == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
    assert job.kinds(0)[-1] == "rank.result" and job.values() == {"best": {"loss": 0.5}}


def test_an_interrupt_that_is_not_heard(warm: Warm, tmp_path: Path) -> None:
    source = (
        "import torch.distributed as dist\n"
        "seen = [1]\n"
        "print('here')\n"
        "dist.barrier() if dist.get_rank() == 0 else __import__('time').sleep(600)\n"
    )
    job = RankJob(warm, tmp_path, source, bound=("seen",)).start()
    for rank in (0, 1):
        job.until(lambda rank=rank: job.files.out(rank).exists() and "here" in job.out_text(rank))  # type: ignore[misc]
    os.kill(job.pid(0), signal.SIGINT)
    job.until(lambda: "rank.result" in job.kinds(0))
    assert job.values() == {"seen": [1]} and job.kinds(0)[-1] == "rank.result"
    for rank in (0, 1):
        os.kill(job.pid(rank), signal.SIGKILL)
    job.wait()


def test_an_interrupted_rank_does_not_wait_for_threads_and_children(warm: Warm, tmp_path: Path) -> None:
    source = (
        "import time, threading, multiprocessing as mp\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "child = mp.Process(target=time.sleep, args=(600,))\n"
        "child.start()\n"
        "print(child.pid)\n"
        "while True:\n"
        "    time.sleep(0.05)  # a signal just before a sleep does not end it\n"
    )
    job = RankJob(warm, tmp_path, source, world=1).start()
    job.until(lambda: job.files.out(0).exists() and job.out_text(0).endswith("\n"))
    os.kill(job.pid(0), signal.SIGINT)
    job.wait()
    assert job.codes == {0: 0} and "rank.interrupted" in job.kinds(0)
    job.until(lambda: start_ticks(int(job.out_text(0))) == 0)


def test_results_on_a_full_disk_are_a_failure_in_words(warm: Warm, tmp_path: Path) -> None:
    source = "import resource\nx = bytes(1 << 20)\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))\n"
    job = RankJob(warm, tmp_path, source, world=1, bound=("x",)).run()
    assert job.codes == {0: 1}
    assert job.error(0).type == "StoreError" and "cannot be written" in job.error(0).message
    assert job.error(0).frames == ()


def test_terminated_children_leave_the_rank_alone(warm: Warm, tmp_path: Path) -> None:
    source = (
        "import time, multiprocessing as mp\n"
        "codes = []\n"
        "for _ in range(5):\n"
        "    p = mp.Process(target=time.sleep, args=(60,))\n"
        "    p.start(); p.terminate(); p.join(); codes.append(p.exitcode)\n"
        "time.sleep(0.1)\n"
    )
    job = RankJob(warm, tmp_path, source, world=1, bound=("codes",)).run()
    assert job.codes == {0: 0} and job.values() == {"codes": [-15] * 5, "_": 4}


def test_an_executor_left_open(warm: Warm, tmp_path: Path) -> None:
    source = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2)\n"
        "seen = []\n"
        "for i in range(4): pool.submit(seen.append, i)\n"
    )
    job = RankJob(warm, tmp_path, source, world=1, bound=("seen",)).run()
    assert job.codes == {0: 0} and sorted(job.values()["seen"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("ends", ["", "raise ValueError('no')"])
def test_a_clock_above_the_cell_tells_its_time_at_the_end(warm: Warm, tmp_path: Path, ends: str) -> None:
    job = RankJob(warm, tmp_path, f"get_ipython().clock()\nprint('said')\n{ends}", world=1).run()
    assert re.search(r"^said\n.*Wall time: ", job.out_text(0), re.S)
