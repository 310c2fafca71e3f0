"""``torchdist run`` beside torchrun: what a script sees, and how it ends."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.store import catalog

FACTS = """\
import json, os, sys

if os.environ["RANK"] == "0":
    names = ("__name__", "__doc__", "__package__", "__file__", "__annotations__", "__cached__")
    seen = {name: globals().get(name, "absent") for name in names}
    loader = globals()["__loader__"]
    seen["__loader__"] = type(loader).__name__, loader.name, loader.path
    seen["__spec__"] = str(type(__spec__))
    seen["argv"], seen["path"] = sys.argv, sys.path[0]
    alike = ("ROLE_", "LOCAL_", "GROUP_", "RANK", "WORLD_", "TORCH", "NCCL")
    seen["environment"] = {name: value for name, value in os.environ.items() if name.startswith(alike)}
    print(json.dumps(seen))
"""

DIFFER = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
"""docs/coming-from/torchrun-options.md says why."""

RECORDS = {"TORCH_FR_DUMP_TEMP_FILE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_WARN_ENABLE_DEBUG_INFO"}
"""They tell torch and NCCL to write into the job's directory."""


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def torchdist(home: Path, tmp_path: Path) -> Run:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jupyter_torchdist", "run", *words]
        return subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=100)

    return run


def torchrun(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=100)


def facts(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(re.sub(r"^\[rank 0\] ", "", done.stdout))
    seen["environment"] = {
        name: value
        for name, value in seen["environment"].items()
        if name not in DIFFER | RECORDS and not name.startswith("TORCHDIST")
    }
    return seen


@pytest.mark.parametrize("program", [["facts.py", "sub/x"], ["sub/../facts.py"], ["-m", "facts", "a"]])
def test_a_script_sees_what_it_sees_under_torchrun(torchdist: Run, tmp_path: Path, program: list[str]) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "facts.py").write_text(FACTS)
    (tmp_path / "sub" / "facts.py").write_text(FACTS)
    same = ["--nproc_per_node=2", *program]
    expected = facts(torchrun(tmp_path, "--standalone", *same))
    assert facts(torchdist("--standalone", *same)) == expected
    assert facts(torchdist("--start-method=spawn", *same)) == expected


def test_names_and_ports_of_torchruns_options_reach_the_ranks(torchdist: Run, tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "import os\nprint(*(os.environ[name] for name in ('ROLE_NAME', 'TORCHELASTIC_RUN_ID', 'MASTER_PORT')))\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nproc-per-node", "2", "--role", "trainer", "--rdzv-id", "7", "--master_port", str(port)]
    for more in ([], ["--fresh"]):
        done = torchdist(*words, *more, "--local-ranks-filter", "1", "--", "named.py")
        assert (done.returncode, done.stdout) == (0, f"[rank 1] trainer 7 {port}\n"), done.stderr


@pytest.mark.parametrize("more", [[], ["--fresh"]])
@pytest.mark.parametrize("program", [["leaves.py"], ["-m", "leaves"]])
def test_sys_exit_with_a_text_prints_it_and_nothing_else(
    torchdist: Run, tmp_path: Path, program: list[str], more: list[str]
) -> None:
    (tmp_path / "leaves.py").write_text('import sys\nsys.exit("bye")\n')
    done = torchdist("--ranks", "1", *more, *program)
    assert done.returncode == 1 and "[rank 0] bye\n" in done.stderr
    assert "Traceback" not in done.stderr and 'leaves.py"' not in done.stderr
    assert "exit code" not in done.stderr


@pytest.mark.parametrize(("left", "code", "exited"), [("3", 1, 3), ("256", 0, 0), ("0", 0, 0), ("None", 0, 0)])
def test_sys_exit_with_a_number_is_the_ranks_exit_code(
    torchdist: Run, tmp_path: Path, left: str, code: int, exited: int
) -> None:
    """torchrun's own is 1 whichever it was."""
    (tmp_path / "leaves.py").write_text(f"import sys\nsys.exit({left})\n")
    done = torchdist("--ranks", "1", "leaves.py")
    assert done.returncode == code and "Traceback" not in done.stderr
    (summary,) = catalog.jobs()
    events = (Path(os.environ["TORCHDIST_HOME"]) / "jobs" / summary.job / "journal.jsonl").read_text()
    assert [json.loads(line)["code"] for line in events.splitlines() if '"rank.exited"' in line] == [exited]


def test_a_parser_of_arguments_that_refuses_prints_its_own_words(torchdist: Run, tmp_path: Path) -> None:
    (tmp_path / "parses.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = torchdist("--ranks", "1", "parses.py", "--lr", "1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "[rank 0] parses.py: error: unrecognized arguments: --lr 1\n" in done.stderr
