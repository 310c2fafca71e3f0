"""What a cell starts ends with its job, however it hides: nothing is ever found by a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_torchdist.protocol.process import ProcessId
from tests.leaks import wait_until
from tests.notebook import Notebook

WAYS = {
    "a child": "sleep 300",
    "a child that hears no hang-up": "nohup sleep 300",
    "a session of its own": "setsid sleep 300",
    "a clean environment": "env -i sleep 300",
    "a session of its own and a clean environment": "env -i setsid sleep 300",
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_cell_leaves_behind_is_ended(way: str, kernel: Notebook, tmp_path: Path) -> None:
    """Each is an orphan: the shell that started it is gone long before the job's end."""
    pid = tmp_path / "pid"
    kernel.run(
        "%%distribute --ranks 1\n"
        "import subprocess, os\n"
        f"subprocess.run(['sh', '-c', '{WAYS[way]} >/dev/null 2>&1 & echo $! > {pid}'], check=True)\n"
    )
    number = int(pid.read_text())
    assert wait_until(lambda: not ProcessId.of(number).alive()), f"process {number} is still there"
