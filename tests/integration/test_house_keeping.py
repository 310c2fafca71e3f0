"""What is left, who may read it, and every verb: as a person at a notebook or a shell sees it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.process import ProcessId, processes_of_job
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store import catalog, journal, liveness
from jupyter_torchdist.store.blobs import BlobStore
from jupyter_torchdist.testing import FakeJob
from tests.leaks import open_files, processes_of_runtime, wait_until
from tests.notebook import Cell, Notebook

PATIENCE = 60.0
OLD = time.time() - 30 * 86400

HOLDS = """%%distribute --ranks 2 --background --name {name} --grace 1s
import time, torch, torch.distributed as dist
dist.all_reduce(torch.ones(1))
print('asleep')
while True:
    time.sleep(0.02)
"""


def refusal(cell: Cell, kind: str) -> str:
    """The words of an error of ours, which come without a stack of ours."""
    assert cell.error is not None, cell.text
    assert cell.error.name == kind, cell.text
    assert "Traceback" not in cell.error.traceback
    return cell.error.traceback


def newest() -> str:
    return catalog.jobs()[0].job


def asleep(home: Path, job: str) -> bool:
    outs = Home(home).job(job).nodes.glob("*/*.out")
    return sum(out.read_text().count("asleep") for out in outs) == 2


# ---- what a running job exposes


def listeners(pids: set[int]) -> dict[str, str]:
    """``/proc/net/tcp`` and ``tcp6``: the addresses (hexadecimal) on which one of ``pids`` listens, by inode."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    found = {fields[9]: fields[1] for fields in rows if len(fields) > 9 and fields[3] == "0A"}
    held = {link[8:-1] for pid in pids for link in open_files(pid) if link.startswith("socket:")}
    return {inode: address for inode, address in found.items() if inode in held}


def too_open(*roots: Path) -> list[str]:
    """What anybody but its owner may touch."""
    paths = [path for root in roots for path in (root, *root.rglob("*"))]
    modes = {path: path.lstat().st_mode for path in paths if path.exists()}
    assert len(modes) > 20
    return [
        f"{stat.filemode(mode)} {path}"
        for path, mode in modes.items()
        if mode & 0o077 or (stat.S_ISREG(mode) and mode & 0o111)
    ]


def test_no_open_port_and_no_open_file(home: Path, own_runtime: Path, new_notebook: Callable[[], Notebook]) -> None:
    kernel = new_notebook()
    kernel.run("import os, numpy as np\nold = os.umask(0)\nbig = np.arange(100_000.0)")
    kernel.run("%%distribute --ranks 2 --watch off --collect all\nbigger = big + 1")
    kernel.run("%%distribute --ranks 2 --watch off --background\nprint(big.sum()); 1 / 0")
    kernel.run("_.wait()")
    kernel.run(HOLDS.format(name="held"))
    job = newest()
    assert wait_until(lambda: asleep(home, job), PATIENCE)
    pids = {process.pid for process in processes_of_job(job)} | {*processes_of_runtime(own_runtime)} - {kernel.pid}
    found = listeners(pids)
    assert found, "the store of the job listens somewhere"
    assert {address.split(":")[0] for address in found.values()} == {"0100007F"}, found
    assert too_open(home, own_runtime) == []
    assert "cancelled" in kernel.run("%dist cancel held").stdout
    assert too_open(home, own_runtime) == []
    assert listeners({*processes_of_runtime(own_runtime)} - {kernel.pid}) == {}


# ---- user code in the data directory

VANDAL = """%%distribute --ranks 2 --watch off --name vandal
import os, pathlib, torch.distributed as dist
home = pathlib.Path(os.environ["TORCHDIST_HOME"])
(job,) = home.glob("jobs/[0-9]*")
dist.barrier()
if dist.get_rank() == 0:
    for place in ("jobs/my notes", "jobs/2026", "jobs/-x", "blobs/mine"):
        (home / place).mkdir()
    for place in ("jobs/notes.txt", "blobs/notes.txt", "jobs/2026/journal.jsonl", "requests"):
        (home / place).write_bytes(b"\\xff" * 5000)
    (job / "requests" / "a.json").write_bytes(b"\\xff")
    (job / "requests" / "b.json").mkdir()
    (job / "driver.json").write_text("[]")
    (job / "nodes" / "mine").mkdir()
    (job / "nodes" / "mine" / "rank-00000.events").write_text("none")
    for name in ("rank-00000.events", "rank-00001.events", "launcher.events", "agent.events"):
        with open(job / "nodes" / "node0" / name, "ab") as file:
            for line in (b"\\xff\\xfe", b"[" * 100_000, b"{}", b'{"kind": "rank.exited", "rank": {}, "t": []}',
                         b'{"kind": "rank.failed", "rank": 0, "t": 1, "error": 5}',
                         b'{"kind": "launcher.started", "t": 1, "process": {"pid": 1}}',
                         b'{"kind": "launcher.child", "t": 1, "pid": "x", "code": null}'):
                file.write(line + b"\\n")
dist.barrier()
value = 5
"""


def test_a_cell_that_writes_into_the_data_directory(home: Path, kernel: Notebook) -> None:
    kernel.run(VANDAL)
    assert kernel.value("value") == 5
    listed = kernel.run("%dist").stdout
    assert "vandal" in listed and "succeeded" in listed
    assert "succeeded" in kernel.run("%dist show vandal").stdout
    kernel.run("%%distribute --ranks 2 --watch off\nvalue = 6")
    assert kernel.value("value") == 6
    before = sorted((home / "jobs").iterdir())
    gone = kernel.try_run(
        "%%distribute --ranks 2 --watch off\nimport os, pathlib, shutil, torch.distributed as dist\n"
        "if dist.get_rank() == 0:\n"
        "    job = os.environ['TORCHDIST_JOB'].split('@')[0]\n"
        "    shutil.rmtree(pathlib.Path(os.environ['TORCHDIST_HOME'], 'jobs', job))\n"
        "dist.barrier()\nvalue = 7"
    )
    words = refusal(gone, "JobLost")
    assert "the files of job" in words and "were deleted while it ran" in words
    assert sorted((home / "jobs").iterdir()) == before
    kernel.run("%%distribute --ranks 2 --watch off\nvalue = 8")
    assert kernel.value("value") == 8
    assert "removed" in kernel.run("%dist rm vandal").stdout
    assert "orphaned" in kernel.run("%dist").stdout  # the directory that has no job in it
    assert "is damaged" in refusal(kernel.try_run("%dist attach 2026"), "DamagedJob")
    assert "removed 2026" in kernel.run("%dist rm 2026").stdout
    kernel.run("%dist rm --older 0s")
    assert (home / "jobs" / "my notes").is_dir()


def test_a_data_directory_that_is_deleted_while_a_job_runs(home: Path, tmp_path: Path) -> None:
    """The job ends, because no request to end it could come any more. Nothing is made anew."""
    script = tmp_path / "train.py"
    script.write_text(HOLDS.partition("\n")[2])
    command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "2", str(script)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
        assert wait_until(lambda: bool(catalog.jobs()) and asleep(home, newest()), PATIENCE)
        job = newest()
        driver = liveness.driver_of(Home(home).job(job))
        assert driver and processes_of_job(job)
        assert wait_until(lambda: is_removed(home), PATIENCE)
        _, said = client.communicate(timeout=PATIENCE)
    assert client.returncode == 1
    assert f"the files of job {job} were deleted while it ran" in said and "Traceback" not in said
    assert wait_until(lambda: not driver.process.alive(), PATIENCE)
    assert not processes_of_job(job) and not home.exists()


def is_removed(directory: Path) -> bool:
    """False when a process made a file in it meanwhile."""
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


# ---- garbage


def test_garbage_is_collected_and_nothing_else(home: Path, kernel: Notebook) -> None:
    kernel.run("import numpy as np\nshared = np.arange(100_000.0)\nlonely = np.ones(200_000)")
    kernel.run("%%distribute --ranks 1 --watch off --name first\nprint(shared[0], lonely[0])")
    kernel.run("%%distribute --ranks 1 --watch off --name second\nprint(shared[0])")
    kernel.run(HOLDS.format(name="alive"))
    alive = newest()
    assert wait_until(lambda: asleep(home, alive), PATIENCE)
    assert "is running, so it is not removed" in refusal(kernel.try_run("%dist rm alive"), "StoreError")
    store = BlobStore(Home(home))
    fresh = store.put(b"being written now" * 1000)
    old = store.put(b"nobody's" * 1000)
    for path in (home / "blobs").iterdir():
        if path.name != fresh.digest:
            os.utime(path, (OLD, OLD))
    assert "removed 0 jobs and 1 blob" in kernel.run("%dist rm --older 1h").stdout
    assert not (home / "blobs" / old.digest).exists() and (home / "blobs" / fresh.digest).exists()
    assert "removed" in kernel.run("%dist rm first").stdout
    assert "removed 0 jobs and " in kernel.run("%dist rm --older 1h").stdout
    sizes = sorted(path.stat().st_size for path in (home / "blobs").iterdir())
    assert sizes[-1] == 800_000  # what second still needs; lonely's 1.6 MB are gone
    kernel.run("again = %dist rerun second\n")
    assert kernel.value("again.state.state") == "succeeded"
    text = kernel.run("%dist rm --keep-bytes 0").stdout
    assert text.startswith("removed 2 jobs and ")
    assert [summary.name for summary in catalog.jobs()] == ["alive"]
    assert "cancelled" in kernel.run("%dist cancel alive").stdout
    kernel.run("%%distribute --ranks 1 --watch off\nprint(shared[0])\nvalue = shared[5]")
    assert kernel.value("float(value)") == 5.0


# ---- verbs


def test_every_verb_in_a_notebook(home: Path, kernel: Notebook) -> None:
    for job, name in (("20260102-030405-aaaaaa", "one"), ("20260102-030405-aabbbb", "two")):
        FakeJob(Home(home), job=job, options=Options(ranks=2, name=name)).running().ended()
    help_text = kernel.run("%dist --help").stdout
    verbs = ["jobs", "show", "logs", "attach", "cancel", "rerun", "rm", "nodes", "doctor", "plan", "stop"]
    assert all(verb in help_text for verb in verbs)
    for verb in verbs:
        assert f"%dist {verb}" in kernel.run(f"%dist {verb} --help").stdout
    words = refusal(kernel.try_run("%dist shwo one"), "OptionError")
    assert "%dist has no verb 'shwo'" in words and "did you mean show?" in words
    assert "there are run, jobs, show, logs" in refusal(kernel.try_run("%dist xyzzy"), "OptionError")
    for verb in ("show", "logs", "attach", "cancel", "rerun", "rm"):
        words = refusal(kernel.try_run(f"%dist {verb} 20991231"), "JobNotFound")
        assert "there is no job '20991231' in" in words and "`%dist` lists the jobs" in words
        words = refusal(kernel.try_run(f"%dist {verb} 20260102-030405-aa"), "JobNotFound")
        assert "2 jobs begin with '20260102-030405-aa'" in words and "give more of the id" in words
        words = refusal(kernel.try_run(f"%dist {verb} ../../etc"), "JobNotFound")
        if verb != "rm":
            assert "required: JOB" in refusal(kernel.try_run(f"%dist {verb}"), "OptionError")
    assert "did you mean 20260102-030405-aaaaaa?" in refusal(
        kernel.try_run("%dist show 20260102-030405-aaaaab"), "JobNotFound"
    )
    assert "rm: which jobs?" in refusal(kernel.try_run("%dist rm"), "UserError")
    assert "expected a time such as" in refusal(kernel.try_run("%dist rm --older soon"), "OptionError")
    assert "expected a size such as 500M" in refusal(kernel.try_run("%dist rm --keep-bytes much"), "OptionError")
    assert "not a regular expression" in refusal(kernel.try_run("%dist logs one --grep ["), "OptionError")
    assert "has no rank 7" in refusal(kernel.try_run("%dist logs one --rank 7"), "UserError")
    assert "close the quotation mark" in refusal(kernel.try_run("%dist show 'one"), "OptionError")
    kernel.run("listed = %dist jobs --json\nshown = %dist show one --json\nlines = %dist logs one --json")
    assert kernel.value("listed['jobs'][0]['name']") in ("one", "two")
    assert kernel.value("shown['state']['state']") == "succeeded" and kernel.value("isinstance(lines, list)")
    assert "there is no option --rank" in refusal(kernel.try_run("%dist plan --rank 2"), "OptionError")
    plan = kernel.run("%dist plan --ranks 3 --timeout 2h").stdout
    assert "3 ranks, backend gloo" in plan and "timeout: 2 h 00 min" in plan
    assert len(catalog.jobs()) == 2
    assert kernel.run("%dist rm one 20260102-030405-aab").stdout.count("removed") == 2


@pytest.fixture
def torchdist(home: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """The command, in a directory with a script and a module."""
    (tmp_path / "ok.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\n")
    (tmp_path / "bad.py").write_text("raise ValueError('boom')\n")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jupyter_torchdist", *words]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)

    yield run
    run("stop")


@pytest.mark.timeout(240)
def test_the_command(torchdist: Callable[..., subprocess.CompletedProcess[str]], home: Path) -> None:
    """Exit codes: 0; 1 when the job or something of ours failed; 2 for words that make no sense."""
    done = torchdist("run", "--ranks", "1", "--name", "fine", "ok.py", "--", "--lr", "1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[rank 0] rank 0 ['--lr', '1']\n", "")
    module = torchdist("run", "--ranks", "1", "-m", "ok", "--", "-v")
    assert (module.returncode, module.stdout) == (0, "[rank 0] rank 0 ['-v']\n")
    failed = torchdist("run", "--ranks", "1", "--name", "wrong", "bad.py")
    assert failed.returncode == 1 and "ValueError: boom" in failed.stderr
    again = torchdist("rerun", "wrong")
    assert again.returncode == 1 and "ValueError: boom" in again.stderr
    assert torchdist("attach", "fine").returncode == 0
    assert torchdist("attach", "wrong").returncode == 1
    listed = json.loads(torchdist("jobs", "--json").stdout)["jobs"]
    assert [(job["name"], job["state"]) for job in listed] == [
        ("wrong", "failed"),
        ("wrong", "failed"),
        (None, "succeeded"),
        ("fine", "succeeded"),
    ]
    shown = json.loads(torchdist("show", "fine", "--json").stdout)
    assert shown["state"]["ranks"]["0"]["state"] == "done" and shown["spec"]["argv"] == ["ok.py", "--lr", "1"]
    assert torchdist("logs", "fine", "--rank", "0").stdout == "rank 0 ['--lr', '1']\n"
    assert "has ended already" in torchdist("cancel", "fine").stdout
    for words, code, said in [
        (("shwo",), 2, "did you mean show?"),
        (("show", "nothing"), 1, "JobNotFound: there is no job 'nothing'"),
        (("run",), 2, "run needs a script"),
        (("run", "--ranks", "none", "ok.py"), 2, "--ranks"),
        (("run", "--ranks", "1", "nowhere.py"), 2, "does not exist"),
        (("run", "--gpus", "99", "ok.py"), 1, "ResourceError"),
        (("rm", "--older", "soon"), 2, "expected a time"),
    ]:
        done = torchdist(*words)
        assert (done.returncode, done.stdout) == (code, ""), done
        assert said in done.stderr and "Traceback" not in done.stderr
    assert torchdist("rm", "fine").returncode == 0
    assert "removed 3 jobs" in torchdist("rm", "--older", "0s").stdout
    assert torchdist("--version").stdout.startswith("torchdist ")


def test_stop_ends_the_warm_processes(own_runtime: Path, home: Path, new_notebook: Callable[[], Notebook]) -> None:
    kernel = new_notebook()
    kernel.run("%%distribute --ranks 1 --watch off\nvalue = 1")
    before = [ProcessId.of(pid) for pid in processes_of_runtime(own_runtime)]
    warm = [process for process in before if process.pid != kernel.pid]
    assert len(warm) >= 3  # agent, zygote of ranks, zygote of drivers
    assert "ended 1 warm process" in kernel.run("%dist stop").stdout
    assert wait_until(lambda: not any(process.alive() for process in warm))
    assert "no warm processes" in kernel.run("%dist nodes").stdout
    kernel.run(HOLDS.format(name="busy"))
    job = newest()
    assert wait_until(lambda: asleep(home, job), PATIENCE)
    assert f"still running: {job}; their agent ends after them" in kernel.run("%dist stop").stdout
    assert journal.state(Home(home).job(job)).state == "running"
    assert "cancelled" in kernel.run("%dist cancel busy").stdout
    assert wait_until(lambda: not [pid for pid in processes_of_runtime(own_runtime) if pid != kernel.pid])
    kernel.run("%%distribute --ranks 1 --watch off\nvalue = 2")
    assert kernel.value("value") == 2


# ---- growth


def measure(kernel: Notebook, runtime: Path) -> tuple[int, int, int, int]:
    """Descriptors of the kernel and of the agent, threads of the kernel, processes of the runtime directory."""
    pids = processes_of_runtime(runtime)
    agent = next(pid for pid in pids if b"node\0agent" in Path(f"/proc/{pid}/cmdline").read_bytes())
    descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (kernel.pid, agent)]
    return descriptors[0], descriptors[1], len(os.listdir(f"/proc/{kernel.pid}/task")), len(pids)


@pytest.mark.timeout(240)
def test_30_jobs_leave_the_kernel_as_it_was(
    own_runtime: Path, home: Path, new_notebook: Callable[..., Notebook]
) -> None:
    kernel = new_notebook(forked=False)
    code = (
        "for number in range({}):\n    get_ipython().run_cell_magic('distribute', '--ranks 2 --watch compact',"
        " 'print(number)\\ntotal = number')\n"
    )
    kernel.run("import gc, numpy as np\nbig = np.ones(100_000)")
    kernel.run(code.format(5), 120)
    assert wait_until(lambda: measure(kernel, own_runtime)[3] >= 4, PATIENCE)
    time.sleep(1.0)
    before = measure(kernel, own_runtime)
    kernel.run(code.format(30), 300)
    assert kernel.value("total") == 29

    def grown() -> list[int]:
        return [now - then for now, then in zip(measure(kernel, own_runtime), before, strict=True)]

    wait_until(lambda: max(grown()) <= 0, 10)
    assert max(grown()) <= 0, (before, grown())
