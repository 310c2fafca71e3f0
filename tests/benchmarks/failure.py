"""How soon a failure is told, and everything over."""

from __future__ import annotations

import time
from collections.abc import Iterator

from jupyter_torchdist.protocol.process import processes_of_job
from tests.benchmarks.report import Row, median
from tests.benchmarks.stage import Stage, torchrun
from tests.notebook import Notebook

RUNS, BARE = 9, 5
BODY = """
if int(os.environ["RANK"]) == 1:
    time.sleep(0.3)
    stamp("raised")
    raise ValueError("on purpose")
dist.barrier()
"""
TITLE = "ValueError: on purpose"


def rows() -> Iterator[Row]:
    with Stage.open() as stage:
        script = stage.script("failing", 'import torch.distributed as dist\ndist.init_process_group("gloo")' + BODY)
        told, over = zip(*(bare(stage, script) for _ in range(BARE)), strict=True)
        with stage.notebook() as notebook:
            shown, gone = zip(*(ours(stage, notebook) for _ in range(RUNS)), strict=True)
    note = f"bare torchrun: {median(told):.2f} s to the traceback on its stderr, {median(over):.2f} s to its end"
    yield Row(
        "failure", "a rank raises → its traceback is in the notebook", median(shown), "s", 0.1, samples=shown, note=note
    )
    yield Row(
        "failure", "a rank raises → the cell has ended and every process of the job is gone", median(gone), "s", 0.7,
        samples=gone,
    )  # fmt: skip


def ours(stage: Stage, notebook: Notebook) -> tuple[float, float]:
    """Seconds from the ``raise`` to the traceback, and to the last process's end."""
    known = {path.name for path in stage.home.jobs.iterdir()}
    cell = notebook.try_run("%%distribute --ranks 2\nimport torch.distributed as dist" + BODY)
    (job,) = {path.name for path in stage.home.jobs.iterdir() if not path.name.startswith(".")} - known
    while processes_of_job(job):
        time.sleep(0.002)
    gone = time.monotonic()
    (raised,) = stage.stamps("raised")
    shown = cell.seen(TITLE)
    assert shown is not None, cell.text
    return shown - raised, max(gone, cell.ended) - raised


def bare(stage: Stage, script: object) -> tuple[float, float]:
    from pathlib import Path

    assert isinstance(script, Path)
    ran = torchrun(script)
    (raised,) = stage.stamps("raised")
    return ran.seen(TITLE) - raised, ran.ended - raised
