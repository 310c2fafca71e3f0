"""``torchdist run`` and the verbs, as a shell sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.connect import connect_agent
from jupyter_torchdist.protocol.process import processes_of_job
from jupyter_torchdist.store import catalog
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
    assert wait_until(lambda: not processes_of_job(job), 10)


def test_doctor_finds_this_machine_well(torchdist: Run) -> None:
    done = torchdist("doctor")
    lines = [line for line in done.stdout.splitlines() if line.startswith("PROBLEM")]
    assert done.returncode == 0
    assert all("shared memory" in line for line in lines), done.stdout
    assert "is safe to fork" in done.stdout


def test_stop_ends_the_warm_processes(own_runtime: Path, torchdist: Run) -> None:
    with connect_agent(sys.executable):  # an idle agent ends by itself, on a busy machine between two commands
        assert torchdist("run", "--ranks", "1", "script.py").returncode == 0
        assert "warm process" in torchdist("nodes").stdout
        assert "ended 1 warm process" in torchdist("stop").stdout
        assert wait_until(lambda: "no warm processes" in torchdist("nodes").stdout, 60)


def test_output_that_nobody_reads_on_is_no_error(torchdist: Run, tmp_path: Path) -> None:
    job = torchdist("run", "--ranks", "1", "--background", "script.py").stdout.strip()
    command = f"{sys.executable} -m jupyter_torchdist show {job} | true"
    done = subprocess.run(["bash", "-c", command], env=environ(), cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    torchdist("attach", job)
