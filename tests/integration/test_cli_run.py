"""``torchdist run`` and the verbs, as a shell sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.process import processes_of_job
from jupyter_torchdist.protocol.wire.connect import connect_agent
from jupyter_torchdist.store import catalog
from jupyter_torchdist.verbs.waiting import ECHO
from tests.leaks import wait_until

SCRIPT = """\
import os, sys
import helper
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], helper.value, __name__)
"""


@pytest.fixture
def torchdist(home: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a directory that holds ``script.py`` and ``helper.py``."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("value = 42\n")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jupyter_torchdist", *words]
        return subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=100)

    return run


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_script_on_two_ranks(torchdist: Run) -> None:
    done = torchdist("run", "--ranks", "2", "script.py", "--", "--lr", "1")
    assert (done.returncode, done.stderr) == (0, "")
    expected = [f"[rank {rank}] rank {rank} of 2 ['--lr', '1'] 42 __main__" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_module_on_two_ranks(torchdist: Run) -> None:
    done = torchdist("run", "--ranks", "2", "-m", "script", "a")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[rank 1] rank 1 of 2 ['a'] 42 __main__" in done.stdout


def test_a_failing_script_shows_its_own_lines(torchdist: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    raise KeyError('gone')\n\nf()\n")
    done = torchdist("run", "--ranks", "1", "bad.py")
    assert done.returncode == 1
    assert "bad.py" in done.stderr and "line 2, in f" in done.stderr and "KeyError: 'gone'" in done.stderr
    assert "runpy" not in done.stderr


def test_words_that_make_no_sense_are_2(torchdist: Run) -> None:
    done = torchdist("run", "--rank", "2", "script.py")
    assert done.returncode == 2 and "did you mean --ranks?" in done.stderr
    assert torchdist("run", "--ranks", "2", "nowhere.py").returncode == 2
    assert catalog.jobs() == []


def test_ctrl_c_stops_the_ranks(home: Path, tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import time\nprint('asleep', flush=True)\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "2", "sleep.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "asleep" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    (summary,) = catalog.jobs()
    assert summary.state == "cancelled" and not processes_of_job(summary.job)


HANDLES = """\
import os, signal, sys, time

def save(number, frame):
    print("saved on", signal.Signals(number).name, flush=True)
    time.sleep(0.5)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("asleep", flush=True)
time.sleep(100)
"""

STUBBORN = """\
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("asleep", flush=True)
while True:
    time.sleep(1)
"""


def begun(tmp_path: Path, source: str, *options: str) -> subprocess.Popen[str]:
    """``torchdist run`` on two ranks that have both begun."""
    (tmp_path / "sleep.py").write_text(source)
    command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "2", *options, "sleep.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert all("asleep" in process.stdout.readline() for _ in range(2))
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_end_ends_the_job_with_its_grace(home: Path, tmp_path: Path, number: signal.Signals) -> None:
    """As torchrun: the ranks hear of it, all is gone afterwards, the exit code is 1."""
    process = begun(tmp_path, HANDLES, "--grace", "60")
    process.send_signal(number)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 1
    assert sorted(out.splitlines()) == ["[rank 0] saved on SIGTERM", "[rank 1] saved on SIGTERM"]
    assert f"{number.name}: the ranks get SIGTERM, and what runs after 60 s is killed" in err
    (summary,) = catalog.jobs()
    assert summary.final and not processes_of_job(summary.job)


def test_who_does_not_end_is_killed_after_the_grace_or_at_the_second_signal(home: Path, tmp_path: Path) -> None:
    process = begun(tmp_path, STUBBORN, "--grace", "1")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=50)
    assert process.returncode == 1
    process = begun(tmp_path, STUBBORN, "--grace", "1h")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None and "SIGTERM" in process.stderr.readline()
    time.sleep(1.1 * ECHO)  # sooner it is the same one
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=50)
    assert process.returncode == 1
    assert [summary.state for summary in catalog.jobs()] == ["cancelled", "cancelled"]
    assert not any(processes_of_job(summary.job) for summary in catalog.jobs())


def test_a_job_whose_reader_is_gone_ends(home: Path, tmp_path: Path) -> None:
    process = begun(tmp_path, "import time\nfor _ in range(100):\n    print('asleep', flush=True)\n    time.sleep(1)\n")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 1
    job = catalog.jobs()[0].job
    assert wait_until(lambda: catalog.jobs()[0].state == "cancelled", 60) and not processes_of_job(job)
    assert process.stderr is not None
    process.stderr.close()


def test_a_background_job_says_how_to_reach_it(torchdist: Run) -> None:
    done = torchdist("run", "--ranks", "1", "--detach", "script.py")
    job = done.stdout.strip()
    assert f"`torchdist attach {job}` follows it, `torchdist cancel {job}` ends it" in done.stderr
    assert torchdist("attach", job).returncode == 0


def test_a_background_job_is_followed_and_cancelled(torchdist: Run, tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import time\nprint('asleep')\ntime.sleep(100)\n")
    job = torchdist("run", "--ranks", "1", "--background", "sleep.py").stdout.strip()
    command = [sys.executable, "-m", "jupyter_torchdist", "attach", job]
    process = subprocess.Popen(command, cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "[rank 0] asleep\n"
    assert f"{job}): ■ cancelled" in torchdist("cancel", job).stdout
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_ctrl_c_while_attached_leaves_the_job_alone(torchdist: Run, tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import time\nprint('asleep')\ntime.sleep(100)\n")
    job = torchdist("run", "--ranks", "1", "--background", "sleep.py").stdout.strip()
    command = [sys.executable, "-m", "jupyter_torchdist", "attach", job]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert "goes on" in words
    assert catalog.jobs()[0].state == "running"
    assert torchdist("cancel", job, "--kill").returncode == 0
    assert wait_until(lambda: not processes_of_job(job))


def test_doctor_finds_this_machine_well(torchdist: Run) -> None:
    done = torchdist("doctor")
    lines = [line for line in done.stdout.splitlines() if line.startswith(("fault ", "warning "))]
    assert done.returncode == 0
    assert all("shared memory" in line for line in lines), done.stdout
    assert "is safe to fork" in done.stdout


def test_stop_ends_the_warm_processes(own_runtime: Path, torchdist: Run) -> None:
    with connect_agent(sys.executable):  # an idle agent ends by itself, on a busy machine between two commands
        assert torchdist("run", "--ranks", "1", "script.py").returncode == 0
        assert "warm process" in torchdist("nodes").stdout
        assert "ended 1 warm process" in torchdist("stop").stdout
        assert wait_until(lambda: "no warm processes" in torchdist("nodes").stdout)


def test_output_that_nobody_reads_on_is_no_error(torchdist: Run, tmp_path: Path) -> None:
    job = torchdist("run", "--ranks", "1", "--background", "script.py").stdout.strip()
    command = f"{sys.executable} -m jupyter_torchdist show {job} | true"
    done = subprocess.run(["bash", "-c", command], env=environ(), cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    torchdist("attach", job)
