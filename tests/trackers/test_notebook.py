"""A tracked cell in a real kernel: what stands under it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.paths import home
from jupyter_torchdist.store import catalog, tracking
from tests.leaks import wait_until
from tests.notebook import Notebook


def test_the_page_of_the_run_stands_under_the_cell_and_in_show(
    new_notebook: Callable[..., Notebook], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    notebook = new_notebook(forked=False)
    gate = tmp_path / "gate"
    notebook.run(f"lr, gate, directory = 0.1, {str(gate)!r}, {str(tmp_path / 'logs')!r}")
    notebook.run("%env TENSORBOARD_LOGGING_DIR=$directory")
    cell = "import os, time\nimport jupyter_torchdist as td\ntd.log(loss=lr)\n"
    cell += "while not os.path.exists(gate):\n    time.sleep(0.02)\n"
    notebook.run(f"%%distribute --ranks 2 --track tensorboard --background\n{cell}")
    assert wait_until(lambda: len(catalog.jobs()) == 1)
    job = catalog.jobs()[0].job
    paths = home().job(job)
    assert wait_until(lambda: bool(tracking.of(paths, "tensorboard").link)), tracking.lines(paths)
    gate.touch()
    line = f"tensorboard: {tmp_path / 'logs' / job}"
    assert line in str(notebook.run(f"%dist attach {job}"))
    assert wait_until(lambda: tracking.of(paths, "tensorboard").closed)
    assert line in str(notebook.run(f"%dist show {job}"))
    assert line in str(notebook.run(f"%dist track {job}"))
