"""A machine that behaves badly: full and read-only disks, damaged files, killed processes, strange clocks and hosts.

What the user sees is asserted: the words, the exception, that nothing was started, lost or left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.driver.run import Driver
from jupyter_torchdist.launchers import registry
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.protocol.process import ProcessId, job_token_of, processes_of_job
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.protocol.state import JobState
from jupyter_torchdist.store import catalog, journal, liveness
from jupyter_torchdist.testing import FakeJob
from tests.leaks import processes_of_runtime, wait_until
from tests.notebook import Cell, Notebook

PATIENCE = 60.0

Mount = Callable[..., None]

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")

WAIT_FOR = """
def wait_for(path):
    import os, time
    while not os.path.exists(path):
        time.sleep(0.01)
"""


def refusal(cell: Cell, kind: str) -> str:
    """The words of an error of ours, which come without a stack of ours."""
    assert cell.error is not None, cell.text
    assert cell.error.name == kind, cell.text
    assert "Traceback" not in cell.error.traceback
    return cell.error.traceback


def newest(home: Path) -> JobPaths:
    return Home(home).job(catalog.jobs(Home(home))[0].job)


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.fixture
def mount(home: Path) -> Iterator[Mount]:
    """Mount a tmpfs of ``size`` on the data directory; call again with ``remount,ro``."""
    home.mkdir()

    def mount(options: str) -> None:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(home)], capture_output=True)
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.decode()}")

    yield mount
    subprocess.run(["umount", "-l", str(home)], capture_output=True)


def fill(directory: Path) -> Path:
    """A file that takes all the room there is."""
    path = directory / "everything-else"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


# ---- disks


@needs_root
def test_a_full_disk_at_submit(home: Path, mount: Mount, kernel: Notebook) -> None:
    """Another file system than everything else is on, too."""
    mount("size=4m,mode=755")
    kernel.run("import numpy as np\nbig = np.arange(1_000_000.0)\nsmall = [1]")
    words = refusal(kernel.try_run("%%distribute --ranks 2\nprint(big.sum())"), "StoreError")
    assert "is full: 8.0 MB needed, " in words and "free" in words
    assert "`%dist rm JOB`" in words and "$TORCHDIST_HOME" in words
    rest = fill(home)
    words = refusal(kernel.try_run("%%distribute --ranks 2\nprint(small)"), "StoreError")
    assert f"the disk under {home}" in words and "is full" in words
    assert catalog.jobs() == [] and [name for name in entries(home / "jobs") if name.startswith(".")] == []
    assert [name for name in entries(home / "blobs") if name.endswith(".tmp")] == []
    rest.unlink()
    kernel.run("%%distribute --ranks 2\nsmall.append(2)")
    assert kernel.value("small") == [1, 2]


PRINTS = """%%distribute --ranks 2 --watch text
import os
import re
line = 'x' * 1000
while os.statvfs({home!r}).f_bavail:
    print(line)
for number in range(500):
    print(line, flush=number == 499)
open({mark!r} + os.environ['RANK'], 'w').close()
wait_for({go!r})
print('and on')
{end}
"""


@needs_root
def test_a_disk_that_fills_up_while_ranks_print(home: Path, tmp_path: Path, mount: Mount, kernel: Notebook) -> None:
    mount("size=6m,mode=700")
    kernel.run(WAIT_FOR)
    ballast = home / "ballast"
    ballast.write_bytes(bytes(1_000_000))
    code = PRINTS.format(home=str(home), mark=str(tmp_path / "full-"), go=str(tmp_path / "go"), end="value = 5")
    cell = kernel.start(code)
    assert wait_until(lambda: len(list(tmp_path.glob("full-*"))) == 2, PATIENCE)
    ballast.unlink()
    (tmp_path / "go").touch()
    kernel.finish(cell)
    assert cell.error is None, cell.text[-3000:]
    assert kernel.value("value") == 5
    assert "[rank 0] and on" in cell.text and "[rank 1] and on" in cell.text
    assert re.search(r"rank 0: the disk was full, \d+ printed lines lost", cell.text)
    state = journal.state(newest(home))
    assert state.state == "succeeded" and all(rank.dropped >= 500 - 64 for rank in state.ranks.values())


@needs_root
@pytest.mark.parametrize("end", ["value = 5", "raise LookupError('y' * 9000)"])
def test_a_disk_that_stays_full(home: Path, tmp_path: Path, mount: Mount, kernel: Notebook, end: str) -> None:
    """The events and the journal have room of their own: the job ends, and says why."""
    mount("size=6m,mode=700")
    kernel.run(WAIT_FOR)
    (tmp_path / "go").touch()
    cell = kernel.try_run(PRINTS.format(home=str(home), mark=str(tmp_path / "full-"), go=str(tmp_path / "go"), end=end))
    assert cell.error is not None
    words = cell.error.traceback
    if "raise" in end:
        assert cell.error.name == "LookupError" and "y" * 9000 in words
    else:
        assert cell.error.name == "StoreError"
        assert "OSError" not in words and "jupyter_torchdist/" not in words  # no stack of ours
        assert "the results of rank 0 cannot be written" in words and "No space left on device" in words
        assert "set $TORCHDIST_HOME to a directory on a larger disk; the values are lost" in words
    which = "[01]" if "raise" in end else "0"  # the first that raises has the other one stopped
    assert re.search(rf"rank {which}: the disk was full, \d+ printed lines lost", cell.text)
    state = journal.state(newest(home))
    assert (state.state, len(state.ranks)) == ("failed", 2)
    assert not processes_of_job(newest(home).job)
    assert "failed" in kernel.run("%dist").stdout
    assert "removed" in kernel.run(f"%dist rm {state.job}").stdout
    kernel.run("%%distribute --ranks 2 --watch off\nvalue = 6")
    assert kernel.value("value") == 6


@needs_root
def test_a_driver_stays_until_its_last_line_is_written(home: Path, mount: Mount) -> None:
    """Where the file system keeps no room for the journal, as on NFS: here there is none left to be kept."""
    mount("size=1m,mode=700")
    job = FakeJob(Home(home))
    job.close()
    rest = fill(home)
    driver = Driver(job.paths, registry.launcher, None)
    for number in range(100):
        driver._say("job.note", text=f"{number} " + "x" * 200)
    assert 0 < len(journal.state(job.paths).notes) < 100
    freeing = threading.Timer(0.5, rest.unlink)
    freeing.start()
    driver._unwritten.close(job.paths.root)
    freeing.join()
    notes = journal.state(job.paths).notes
    assert [int(note.split()[0]) for note in notes] == list(range(100))


@needs_root
def test_a_disk_without_inodes(home: Path, mount: Mount, tmp_path: Path) -> None:
    """Wherever the last file is made: the words name inodes, no stack of ours is shown, and nothing hangs."""
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "2", str(script)]
    for inodes in (2, 5, 9, 14, 16, 17, 18, 22, 26, 31, 40):
        mount(f"nr_inodes={inodes},size=50m,mode=700")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in done.stderr and 'File "' not in done.stderr, (inodes, done.stderr)
        if done.returncode == 0:
            assert sorted(done.stdout.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
        else:
            assert "no free inodes" in done.stderr, (inodes, done.stderr)
        subprocess.run(["umount", "-l", str(home)], check=True)


SHARED_MEMORY_IS_FULL = """
mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 77
head -c 1M /dev/zero >/dev/shm/everything-else 2>/dev/null
exec "$@"
"""


@needs_root
def test_full_shared_memory(own_runtime: Path, home: Path, tmp_path: Path) -> None:
    """In a mount namespace. The engine's semaphores are files there; the system's error names no place."""
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "2", str(script)]
    full = ["unshare", "--mount", "sh", "-c", SHARED_MEMORY_IS_FULL, "sh", *command]
    done = subprocess.run(full, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no disk can be mounted here: {done.stderr}")
    words = "/dev/shm is full: remove files there, or start the container with --shm-size=1g or more"
    assert done.returncode == 1 and f"launcher's log\n{words}\n" in done.stderr, done.stderr
    assert done.stderr.count("No space left") == 0 and "Traceback" not in done.stderr


@needs_root
def test_a_read_only_data_directory(home: Path, mount: Mount, kernel: Notebook) -> None:
    mount("size=6m,mode=700")
    kernel.run("%%distribute --ranks 1 --name kept --watch off\nprint('hello')")
    mount("remount,ro")
    words = refusal(kernel.try_run("%%distribute --ranks 2\npass"), "StoreError")
    assert f"the data directory {home}" in words and "cannot be written: Read-only file system" in words
    assert "make it writable, or set $TORCHDIST_HOME to another directory" in words
    assert "kept" in kernel.run("%dist").stdout
    assert kernel.run("%dist logs kept").stdout == "[rank 0] hello\n"
    refusal(kernel.try_run("%dist rm kept"), "StoreError")
    refusal(kernel.try_run("%dist rerun kept"), "StoreError")
    assert len(catalog.jobs()) == 1


# ---- damage


def test_a_job_directory_damaged_by_hand(home: Path, kernel: Notebook) -> None:
    kernel.run("import numpy as np\nbig = np.arange(100_000.0)")
    kernel.run("%%distribute --ranks 2 --name hurt --watch off\nprint('sum', big.sum())")
    paths = newest(home)
    sound = {path: path.read_bytes() for path in (paths.journal, paths.summary, paths.spec, paths.manifest)}
    count = len(sound[paths.journal].splitlines())

    def restore() -> None:
        for path, data in sound.items():
            path.write_bytes(data)
        forget(home)

    paths.summary.unlink()
    paths.journal.write_bytes(sound[paths.journal][:-40])  # cut within its last line
    forget(home)
    driver = liveness.driver_of(paths)
    assert driver is not None and wait_until(lambda: not driver.process.alive(), PATIENCE)
    assert "orphaned" in kernel.run("%dist").stdout
    kernel.run("job = %dist attach hurt\n")
    assert kernel.value("job.wait(30).state") == "succeeded"
    restore()
    lines = sound[paths.journal].splitlines(keepends=True)
    odd = [b"\x00\xff" * 50, b'{"kind": 5}', b"[]", b'{"kind":"rank.ready","rank":"x","t":"y"}', b"[" * 100_000]
    garbage = b"\n".join([*odd, b""])
    paths.journal.write_bytes(b"".join([garbage, *lines[: count // 2], garbage, *lines[count // 2 :], garbage]))
    paths.summary.write_bytes(b"\x00" * 100)
    forget(home)
    assert "succeeded" in kernel.run("%dist show hurt").stdout
    restore()
    for path in (paths.spec, paths.manifest):
        for data in (None, b"", b"\xff\xfe garbage", b"{}", b"[1, 2]"):
            path.unlink() if data is None else path.write_bytes(data)
            forget(home)
            assert "succeeded" in kernel.run("%dist").stdout
            words = refusal(kernel.try_run(f"%dist rerun {paths.job}"), "DamagedJob")
            assert path.name in words and "run the cell again" in words
            path.write_bytes(sound[path])
    blob = max((home / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    flipped = bytearray(blob.read_bytes())
    times = blob.stat()
    flipped[len(flipped) // 2] ^= 4
    blob.write_bytes(flipped)
    os.utime(blob, ns=(times.st_atime_ns, times.st_mtime_ns))
    words = refusal(kernel.try_run("%dist rerun hurt"), "DamagedJob")
    assert blob.name in words and "has changed since it was written" in words
    blob.unlink()
    assert "is missing" in refusal(kernel.try_run("%dist rerun hurt"), "DamagedJob")
    assert len(catalog.jobs()) == 1 and not [name for name in entries(home / "jobs") if name.startswith(".")]
    again = kernel.run("%%distribute --ranks 2 --watch text\nprint('sum', big.sum())")
    assert "[rank 1] sum 4999950000.0" in again.text
    paths.spec.unlink()
    assert "removed" in kernel.run(f"%dist rm {paths.job}").stdout


def forget(home: Path) -> None:
    """Without the cache, which would know the job as it was."""
    for path in home.glob("catalog-*"):
        path.unlink()


# ---- many at once, too many


def test_two_kernels_launch_at_once(new_notebook: Callable[[], Notebook]) -> None:
    one, two = new_notebook(), new_notebook()
    for number, notebook in enumerate((one, two)):
        notebook.run(f"mine = {number + 1}")
    code = (
        "%%distribute --ranks 2 --watch text\nimport torch, torch.distributed as dist\n"
        "total = torch.tensor(float(mine))\ndist.all_reduce(total)\nprint('total', total.item())\ntotal.item()"
    )
    cells = [notebook.start(code) for notebook in (one, two)]
    for number, (notebook, cell) in enumerate(zip((one, two), cells, strict=True)):
        notebook.finish(cell)
        assert cell.error is None and (cell.result or {})["text/plain"] == str(2.0 * (number + 1)), cell.text
        assert notebook.value("total.item()") == 2.0 * (number + 1)
        assert cell.stdout.count("total") == 2
    assert [summary.state for summary in catalog.jobs()] == ["succeeded", "succeeded"]


def test_more_ranks_than_cores(kernel: Notebook) -> None:
    cores = len(os.sched_getaffinity(0))
    words = refusal(kernel.try_run(f"%%distribute --ranks {100 * cores}\npass"), "ResourceError")
    assert f"{100 * cores} ranks on {cores} cores" in words and "are too many: 100 ranks would share one core" in words
    assert f"ask for at most --ranks {32 * cores} here" in words
    assert catalog.jobs() == []
    cell = kernel.run(
        "%%distribute --ranks 8 --watch text\nimport torch, torch.distributed as dist\none = torch.ones(1)\n"
        "dist.all_reduce(one)\nprint('sum', one.item())\none.item()"
    )
    assert (cell.result or {})["text/plain"] == "8.0" and cell.stdout.count("sum 8.0") == 8


# ---- killed processes

STEPS = """%%distribute --ranks 2 --watch text --grace 1s
import os, time
print('begun', flush=True)
wait_for({go!r})
value = {value}
value
"""


class Victims:
    """The processes behind the job that runs."""

    def __init__(self, home: Path, runtime: Path) -> None:
        self.home, self.runtime = home, runtime

    def of(self, victim: str) -> ProcessId:
        paths = newest(self.home)
        if victim == "driver":
            driver = liveness.driver_of(paths)
            assert driver is not None
            return driver.process
        if victim == "agent":
            (file,) = self.runtime.glob("agent-*/agent.json")
            return ProcessId.from_json(codec.loads(file.read_bytes())["process"])
        if victim == "zygote":
            return self._zygote()
        kind, rank = ("launcher.started", None) if victim == "launcher" else ("rank.started", 1)
        events = journal.read(paths)[0]
        return next(ProcessId.from_json(e.data["process"]) for e in events if (e.kind, e.rank) == (kind, rank))

    def _zygote(self) -> ProcessId:
        with contextlib.suppress(StopIteration):
            return ProcessId.of(next(pid for pid in processes_of_runtime(self.runtime) if is_zygote(pid)))
        raise AssertionError("no zygote")

    def kill(self, *victims: str) -> list[ProcessId]:
        found = [self.of(victim) for victim in victims]
        for process in found:
            assert process.signal(signal.SIGKILL)
        return found


def is_zygote(pid: int) -> bool:
    return b"node\0zygote" in Path(f"/proc/{pid}/cmdline").read_bytes() and not job_token_of(pid)


@pytest.mark.timeout(240)
def test_whoever_is_killed_in_the_middle_of_a_job(
    own_runtime: Path, home: Path, tmp_path: Path, new_notebook: Callable[[], Notebook]
) -> None:
    kernel = new_notebook()
    victims = Victims(home, own_runtime)
    kernel.run(WAIT_FOR)

    def run(value: int, *killed: str, go: bool = True) -> tuple[Cell, JobState]:
        mark = tmp_path / f"go-{value}"
        cell = kernel.start(STEPS.format(go=str(mark), value=value))
        kernel.wait_for(cell, "[rank 0] begun")
        kernel.wait_for(cell, "[rank 1] begun")
        gone = victims.kill(*killed)
        assert wait_until(lambda: not any(process.alive() for process in gone), PATIENCE)
        if go:
            mark.touch()
        kernel.finish(cell)
        paths = newest(home)
        assert wait_until(lambda: not processes_of_job(paths.job), PATIENCE)
        return cell, journal.state(paths)

    for number, killed in enumerate([("driver",), ("agent",), ("zygote",), (), ("agent", "driver")]):
        cell, state = run(number, *killed)
        assert state.state == "succeeded", f"{killed}: {cell.text}"
        assert cell.error is None and (cell.result or {})["text/plain"] == str(number), f"{killed}: {cell.text}"
        assert kernel.value("value") == number
    cell, state = run(100, "launcher", go=False)
    words = refusal(cell, "LaunchError")
    assert state.state == "failed" and "the launcher of the ranks was killed, and the ranks were ended" in words
    cell, state = run(101, "rank", go=False)
    words = refusal(cell, "RankFailed")
    assert (state.state, state.first_failure) == ("failed", 1)
    assert f"rank 1 on {state.ranks[1].host} was killed (SIGKILL)" in words
    assert "1 other rank was stopped because of this" in words
    assert "`%dist logs" in words and "--rank 1` shows what it printed last" in words
    cell, state = run(102, "agent", "driver", "launcher", "rank", go=False)
    assert state.state == "failed" and "the launcher of the ranks was killed" in refusal(cell, "LaunchError")
    cell, state = run(103)
    assert kernel.value("value") == 103


# ---- file systems, hosts, clocks

NO_LOCKS = """
import errno, fcntl, os, socket, sqlite3

HOME = os.path.realpath(os.environ["TORCHDIST_HOME"])

def below(path):
    return os.path.realpath(os.fsdecode(path)).startswith(HOME)

def refusing(call):
    def refuse(file, *args, **kwargs):
        fd = file if isinstance(file, int) else file.fileno()
        if below(os.readlink(f"/proc/self/fd/{fd}")):
            raise OSError(errno.ENOLCK, "No locks available")
        return call(file, *args, **kwargs)
    return refuse

fcntl.flock, fcntl.lockf = refusing(fcntl.flock), refusing(fcntl.lockf)

class Socket(socket.socket):
    def bind(self, address):
        if self.family == socket.AF_UNIX and below(address):
            raise OSError(errno.EPERM, "Operation not permitted")
        super().bind(address)

socket.socket = Socket
connect = sqlite3.connect

def refuse(database, *args, **kwargs):
    if below(database):
        raise sqlite3.OperationalError("locking protocol")
    return connect(database, *args, **kwargs)

sqlite3.connect = refuse
open(os.path.join(os.path.dirname(__file__), f"loaded-{os.getpid()}"), "w").close()
"""


def test_a_home_without_locks_and_sockets(
    own_runtime: Path,
    home: Path,
    tmp_path: Path,
    new_notebook: Callable[..., Notebook],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on many network file systems; every process of ours loads the refusals when it starts."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(NO_LOCKS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]))
    kernel = new_notebook(forked=False)
    for number in range(2):
        kernel.run(f"%%distribute --ranks 2 --watch off\nvalue = {number}")
        assert kernel.value("value") == number
    assert kernel.run("%dist").stdout.count("succeeded") == 2
    assert sum(path.stat().st_size for path in home.glob("catalog-*")) == 0
    assert "removed" in kernel.run(f"%dist rm {newest(home).job}").stdout
    kernel.run("%dist rm --older 0s")
    assert "no jobs yet" in kernel.run("%dist").stdout
    assert len(list(hook.glob("loaded-*"))) >= 4  # kernel, driver, agent, zygote


FAR = ProcessId("far.example", "another-boot", "a-namespace", os.getpid(), 5)


def test_two_hosts_share_a_home(home: Path, kernel: Notebook) -> None:
    """A job of another host is shown, and left alone."""
    now = time.time()
    fresh = FakeJob(Home(home), now=now, options=Options(ranks=2, name="fresh"))
    silent = FakeJob(Home(home), now=now - 86400, options=Options(ranks=2, name="silent"))
    for job, beat in ((fresh, now), (silent, now - 3600)):
        job.running()
        job.drive(FAR, beat)
        job.close()
    listed = kernel.run("%dist").stdout
    rows = {line.split()[1]: line for line in listed.splitlines()[1:]}
    assert " running " in rows["fresh"] and " unreachable " in rows["silent"]
    for name, state in (("fresh", "running"), ("silent", "unreachable")):
        words = refusal(kernel.try_run(f"%dist rm {name}"), "StoreError")
        assert f"is {state}, so it is not removed" in words
        assert "running" in kernel.run(f"%dist show {name}").stdout
    assert "removed 0 jobs" in kernel.run("%dist rm --older 0s --keep-bytes 0").stdout
    cell = kernel.start("%dist attach silent")
    kernel.wait_for(cell, "2 ranks")
    time.sleep(1.2)  # two looks at whether its driver lives
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.status == "ok" and "goes on" in cell.text
    kinds = [event.kind for event in journal.read(silent.paths)[0]]
    assert kinds.count("job.driver") == 2  # ours was not added
    assert len(catalog.jobs()) == 2


def test_a_clock_that_was_set_back(home: Path, kernel: Notebook) -> None:
    ahead = time.time() + 86400
    ended = FakeJob(Home(home), now=ahead, options=Options(ranks=1, name="ended"))
    ended.running()
    ended.now -= 2 * 86400  # set back while it ran
    ended.ended()
    alive = FakeJob(Home(home), now=ahead, options=Options(ranks=1, name="alive"))
    alive.running().close()
    untaken = FakeJob(Home(home), now=ahead, options=Options(ranks=1, name="untaken"))
    untaken.close()
    far = FakeJob(Home(home), now=ahead, options=Options(ranks=1, name="far"))
    far.running().drive(FAR, ahead).close()
    listed = kernel.run("%dist").stdout
    rows = {line.split()[1]: line for line in listed.splitlines()[1:]}
    assert re.search(r" succeeded +1 +just now +0\.00 s ", rows["ended"])
    assert " running " in rows["alive"] and " running " in rows["far"] and " orphaned " in rows["untaken"]
    assert "succeeded" in kernel.run("%dist show ended").stdout
    assert "removed 1 job " in kernel.run("%dist rm --older 1h").stdout
    assert {summary.name for summary in catalog.jobs()} == {"alive", "untaken", "far"}
    kernel.run("%%distribute --ranks 1 --watch off\nvalue = 1")
    assert kernel.value("value") == 1
    error = kernel.try_run(SET_BACK).error
    assert error is not None and error.name == "JobTimedOut", error
    assert "ran longer than --timeout 1" in error.traceback


SET_BACK = """%%distribute --ranks 1 --timeout 1s --grace 1s --watch off
import time
time.time = lambda: 5.0
while True:
    time.sleep(0.01)
"""


# ---- memory


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory cgroup (version 1 or 2) below this process's own, with a limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group, limit = Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        elif number == "0":
            group, limit = Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"
        else:
            continue
        made = group / f"torchdist-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        if (made / limit).exists():
            break
        made.rmdir()
    else:
        pytest.skip("no memory cgroup can be made here")
    (made / limit).write_text("1500000000")
    yield made
    assert wait_until(lambda: not (made / "cgroup.procs").read_text(), PATIENCE)
    made.rmdir()


@needs_root
def test_the_out_of_memory_killer_is_named(
    memory_group: Path, own_runtime: Path, home: Path, new_notebook: Callable[..., Notebook]
) -> None:
    (memory_group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        kernel = new_notebook(forked=False)  # and whatever it starts
    finally:
        (memory_group.parent / "cgroup.procs").write_text(str(os.getpid()))
    cell = kernel.try_run(
        "%%distribute --ranks 2 --watch text --grace 1s\nimport os, time\n"
        "held = b'x' * 3_000_000_000 if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    words = refusal(cell, "RankFailed")
    assert "rank 1 on " in words and " was killed (SIGKILL); " in words
    assert "out-of-memory killer" in words or "the memory limit of this cgroup was reached" in words
    assert not processes_of_job(newest(home).job)
