"""Command lines of torchrun with ``torchdist run`` in its place: restarts, commands, files of output, input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.store import catalog

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Run:
    def run(*words: str, env: Any = None, **options: Any) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **(env or {})}
        command = [sys.executable, "-m", "jupyter_torchdist", "run", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False, **options
        )

    return run


def test_ranks_are_started_again_after_a_failure(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os\nimport torch.distributed as dist\n"
        "count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('start', count, os.environ['TORCHELASTIC_MAX_RESTARTS'], flush=True)\n"
        "dist.barrier()\n"
        "if count < 2 and os.environ['RANK'] == '1':\n    raise ValueError('for once')\n"
        "dist.barrier()\nprint('end', flush=True)\n"
    )
    done = run("--max-restarts=3", "--nproc-per-node=2", "s.py")
    assert done.returncode == 0, done.stderr
    expected = [f"[rank {rank}] start {count} 3" for rank in (0, 1) for count in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted([*expected, "[rank 0] end", "[rank 1] end"])
    assert "ValueError: for once; all ranks are started again (2 of 3)" in done.stderr
    done = run("--max-restarts=1", "--nproc-per-node=2", "s.py")
    assert done.returncode == 1
    assert "(1 of 1)" in done.stderr


def test_ranks_that_die_at_the_same_step_twice_are_not_started_once_more(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os, signal\nimport jupyter_torchdist as td\nimport torch.distributed as dist\n"
        "count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('start', count, flush=True)\n"
        "for step in range(3 if count == 0 else 6):\n    td.log(loss=1.0, step=step)\n"
        "dist.barrier()\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()\n"
    )
    done = run("--max-restarts=5", "--nproc-per-node=2", "s.py")
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] start {count}" for rank in (0, 1) for count in range(3)]
    assert "was killed (SIGKILL)" in done.stderr
    assert "attempt 3 ended at step 5, as attempt 2 did, by the same fault." in done.stderr
    assert "so the ranks were not started again: mend the cause, then run the cell again" in done.stderr


def test_any_command_is_a_rank(run: Run) -> None:
    done = run("--nproc-per-node", "2", "--no-python", "sh", "-c", "echo $RANK/$LOCAL_RANK/$WORLD_SIZE")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[rank 0] 0/0/2", "[rank 1] 1/1/2"])
    assert run("--nproc-per-node=1", "--no-python", "sh", "-c", "exit 3").returncode == 1
    killed = run("--nproc-per-node=1", "--no-python", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 1
    assert "SIGKILL" in killed.stderr
    missing = run("--nproc-per-node=1", "--no-python", "no-such-command")
    assert missing.returncode == 2
    assert "no-such-command is no command that can be found" in missing.stderr


def test_output_goes_where_torchrun_puts_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)\n"
        "if os.environ['RANK'] == '1':\n    raise SystemExit(1)\n"
    )
    words = ["--nproc-per-node=2", "--log-dir", "logs", "--rdzv-id", "7", "--redirects", "0:1", "--tee", "1:2"]
    done = run(*words, "--duplicate-stdout-filters", "out 1", "--log-line-prefix-template", "<${rank}> ", "s.py")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["<1> out 1"]
    assert {"<0> err 0", "<1> err 1"} <= set(done.stderr.splitlines())
    (folder,) = (tmp_path / "logs").glob("7_*")
    found = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.log")}
    assert found["attempt_0/0/stdout.log"] == "out 0\n"
    assert "err 1\n" in found["attempt_0/1/stderr.log"]
    assert found["attempt_0/filtered_stdout.log"] == "<1> out 1\n"
    assert set(found) == {"attempt_0/0/stdout.log", "attempt_0/1/stderr.log", "attempt_0/filtered_stdout.log"}
    refused = run(*words, "--background", "s.py")
    assert refused.returncode == 2
    assert "leave out --background" in refused.stderr


def test_standard_input_is_the_shells(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import sys\nprint(sys.stdin.read().split())\n")
    assert run("--nproc-per-node=1", "s.py", input="a b\nc\n").stdout == "[rank 0] ['a', 'b', 'c']\n"
    (tmp_path / "asks.py").write_text("print('hello', input())\n")
    assert run("--nproc-per-node=1", "asks.py", input="you\n").stdout == "[rank 0] hello you\n"
    (tmp_path / "data").write_text("x y\n")
    with open(tmp_path / "data") as file:
        done = run("--nproc-per-node=2", "s.py", stdin=file)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] ['x', 'y']", "[rank 1] ['x', 'y']"]
    assert run("--nproc-per-node=1", "--no-python", "cat", input="through\n").stdout == "[rank 0] through\n"


def test_a_rank_of_its_own_gpu_and_the_variables_of_torchrun(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import os\nprint(os.environ['LOCAL_RANK'], os.environ['RANK'])\n")
    done = run("--virtual-local-rank", "s.py", env={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "trainer"})
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 0", "[rank 1] 0 1"]


def test_programs_that_cannot_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "broken.py").write_text("x = 1\nif x\n    pass\n")
    (tmp_path / "folder").mkdir()
    for words, message in (
        (["trian.py"], "trian.py does not exist\n  → in "),
        (["folder"], "folder is a directory without __main__.py"),
        (["broken.py"], "broken.py, line 2: expected ':'"),
    ):
        done = run("--nproc-per-node=1", *words)
        assert done.returncode == 2
        assert message in done.stderr
    assert catalog.jobs() == []
    (tmp_path / "folder" / "__main__.py").write_text("import sys\nprint(sys.argv, sys.path[0].endswith('folder'))\n")
    assert run("--nproc-per-node=1", "folder", "x").stdout == "[rank 0] ['folder', 'x'] True\n"


def test_several_machines_are_left_to_torchrun(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import os\nprint('rank', os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    done = run(
        "--nnodes=1:2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--rdzv-conf=join_timeout=60,last_call_timeout=1",
        "s.py",
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 1" in done.stdout
    assert "--nnodes 1:2: torchrun itself runs this, without a job" in done.stderr
    refused = run("--nnodes=2", "--strategy", "fsdp", "s.py")
    assert refused.returncode == 2
    assert "torchrun itself, which has no --strategy" in refused.stderr
    assert catalog.jobs() == []
