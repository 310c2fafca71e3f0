"""DESIGN section 6, risk 1: in a process forked from a warm one everything works that works in a new one.

The processes are made as for a job: a zygote imports, a fork of it imports more, a fork of that the libraries of
the notebook, forks of that are the ranks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.protocol.process import ProcessId
from tests.leaks import wait_until
from tests.notebook import Notebook

PROGRAM = """
import json, os, signal, sys, traceback
from jupyter_torchdist.node import zygote

tasks, forks, abreast, limit = json.load(sys.stdin)
done = zygote.preload(zygote.PRELOAD)
assert not {"torch.distributed.fsdp", "torch.distributed.tensor"} & set(sys.modules), "a first job would wait for them"
successor = os.fork()
if successor:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(successor, 0)[1]))
done += zygote.preload(zygote.PRELOAD_LATER)
successor = os.fork()
if successor:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(successor, 0)[1]))
libraries = ("pandas", "scipy.stats", "sklearn.linear_model", "sklearn.svm")
done += zygote.preload(libraries)  # each import is followed by a look for threads, which a fork would lose
assert {"torch", "numpy", *zygote.PRELOAD_LATER, *libraries} <= set(done), done
import torch
assert not torch.cuda.is_initialized()
assert not [fd for fd in os.listdir("/proc/self/fd") if "nvidia" in os.path.realpath(f"/proc/self/fd/{fd}")]
assert "IPython" not in sys.modules

def rank(task):
    launcher = os.fork()
    if launcher:
        return os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    signal.alarm(limit)  # a hang ends as a death by SIGALRM
    exec(task, {"__name__": "__main__"})
    return 0

def start(task):
    pid = os.fork()
    if pid:
        return pid
    try:
        os._exit(abs(rank(task)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)

queue, running, wrong = list(tasks.items()) * forks, {}, 0
while queue or running:
    while queue and len(running) < abreast:
        name, task = queue.pop(0)
        running[start(task)] = name
    pid, status = os.wait()
    name, code = running.pop(pid), os.waitstatus_to_exitcode(status)
    if code:
        wrong += 1
        print(f"a rank with {name} ended with {code} (14: it hung)", file=sys.stderr)
os._exit(min(wrong, 99))
"""

MATMUL = """
import torch
a = torch.ones(300, 300)
assert (a @ a).sum().item() == 300.0**3
"""

NUMPY = """
import numpy, os
a = numpy.ones((300, 300))
assert (a @ a).sum() == 300.0**3
assert abs(numpy.linalg.det(numpy.eye(200)) - 1) < 1e-9
"""

LIBRARIES = """
import numpy, pandas, scipy.linalg
from sklearn.linear_model import LogisticRegression
assert scipy.linalg.inv(numpy.eye(150)).sum() == 150
x = numpy.random.default_rng(0).normal(size=(400, 20))
assert LogisticRegression().fit(x, x[:, 0] > 0).score(x, x[:, 0] > 0) > 0.9
assert pandas.DataFrame(x).groupby(x[:, 0] > 0).mean().shape == (2, 20)
"""

DATA_LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(64.0).reshape(64, 1))
loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
assert sum(batch.sum().item() for batch, in loader) == 2016.0
"""

TRAINING = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    loss = model(torch.randn(256, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert loss.isfinite()
"""

COMPILE = """
import torch
f = torch.compile(lambda x: (x @ x).relu() * 2 + 1)
x = torch.full((32, 32), 0.5)
assert torch.allclose(f(x), (x @ x).relu() * 2 + 1)
"""

EAGER = COMPILE.replace("torch.compile(", "torch.compile(backend='aot_eager', model=")

TASKS = {
    "matmul": MATMUL,
    "numpy": NUMPY,
    "libraries": LIBRARIES,
    "DataLoader": DATA_LOADER,
    "training": TRAINING,
    "all of it": MATMUL + NUMPY + DATA_LOADER + TRAINING + EAGER + DATA_LOADER + LIBRARIES,
}


def fork_ranks(
    tasks: dict[str, str], forks: int, cache: Path, *, abreast: int = 4, limit: int = 100, environ: Any = None
) -> None:
    """Run each task in so many forked ranks. Fails with what they said unless each ends well in ``limit`` seconds."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([tasks, forks, abreast, limit]).encode(),
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "2", **(environ or {})},
        capture_output=True,
        start_new_session=True,
    )
    ranks = len(tasks) * forks
    assert done.returncode == 0, f"{done.returncode} of {ranks} failed:\n{done.stderr.decode()[-3000:]}"


@pytest.mark.timeout(300)
def test_forked_ranks_work(tmp_path: Path) -> None:
    """What the processes before them import starts no thread that a fork would lose, and touches no device.

    One of them compiles; programs that try out the processor's vector units would take three times as long.
    """
    fork_ranks({"compile": COMPILE, **TASKS}, 1, tmp_path, environ={"TORCHINDUCTOR_VEC_ISA_OK": "0"})


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("task", TASKS)
def test_200_forked_ranks_work(task: str, tmp_path: Path) -> None:
    fork_ranks({task: TASKS[task]}, 200, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_200_forked_ranks_compile(tmp_path: Path) -> None:
    """All but the first find the compiled kernel on the disk."""
    fork_ranks({"compile": COMPILE}, 1, tmp_path, limit=300)
    fork_ranks({"compile": COMPILE}, 200, tmp_path, limit=300)


THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"


def test_a_library_that_starts_a_thread_is_refused(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(THREADED)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    program = (
        "from jupyter_torchdist.node import zygote as z\n"
        "assert z.preload(('json', 'not_installed', 'broken')) == ['json']\n"
        "assert z.preload(('json', 'threaded'), ('threaded',)) == ['json']\n"
        "try: z.preload(('threaded',))\n"
        "except z.ForkUnsafe as unsafe: assert str(unsafe) == 'threaded'\n"
        "else: raise SystemExit('not noticed')\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environ)
    assert done.returncode == 0, done.stderr.decode()


def test_a_successor_dies_with_the_zygote_while_it_imports(tmp_path: Path) -> None:
    """Nobody is there to tell it otherwise for as long as an import takes."""
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        f"open({str(tmp_path / 'pid')!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'pid')!r} + '.new', {str(tmp_path / 'pid')!r})\n"
        "time.sleep(60)\n"
    )
    program = (
        "import os, socket, sys\n"
        "from jupyter_torchdist.node import zygote\n"
        "zygote.PRELOAD, zygote.PRELOAD_LATER = (), ('slow',)\n"
        "zygote.main(int(sys.argv[1]))\n"
    )
    ours, theirs = socket.socketpair()
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with theirs:
        words = [sys.executable, "-c", program, str(theirs.fileno())]
        process = subprocess.Popen(words, env=environ, pass_fds=(theirs.fileno(),), start_new_session=True)
    assert wait_until((tmp_path / "pid").exists)
    successor = ProcessId.of(int((tmp_path / "pid").read_text()))
    assert successor.pid != process.pid and successor.alive()
    ours.close()  # the agent is gone
    assert process.wait(10) == 0
    assert wait_until(lambda: not successor.alive())


def test_libraries_of_the_notebook_are_there_in_later_jobs(kernel: Notebook) -> None:
    kernel.run("import sys, pandas")
    kernel.run("%%distribute --ranks 1 --watch off\nthere = pandas.DataFrame is not None")

    def imported() -> bool:
        kernel.run("%%distribute --ranks 1 --watch off\nimport sys\nearly = 'pandas' in sys.modules")
        return bool(kernel.value("early"))

    assert wait_until(imported)
