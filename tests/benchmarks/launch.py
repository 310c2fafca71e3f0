"""How long until ranks run, and until a trivial job's result is in the notebook."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from jupyter_torchdist.protocol.process import descendants
from tests.benchmarks.report import Row, median
from tests.benchmarks.stage import STAMP, TWO_ON_CPUS, Ranks, Stage, torchrun
from tests.notebook import Notebook

CELL = """%%distribute RANKS
stamp("first")
import torch.distributed as dist
assert dist.is_initialized()
answer = 42
"""
SCRIPT = """
import json, torch
import torch.distributed as dist
JOIN
stamp("first")
if dist.get_rank() == 0:
    pathlib.Path("answer.json").write_text(json.dumps(42))
dist.destroy_process_group()
"""
ACCELERATE = """
import torch, torch.distributed as dist
from accelerate import notebook_launcher

def ranks():
    dist.init_process_group("gloo")
    stamp("first")
    dist.destroy_process_group()
"""
ROUNDS, WARM, FORKS = 5, 5, 3


def rows(ranks: Ranks = TWO_ON_CPUS, rounds: int = ROUNDS, *, forking: bool = True) -> Iterator[Row]:
    """``forking``: beside accelerate's launcher, too."""
    warm, whole, launches, wholes, forked, cold = [], [], [], [], [], []
    with Stage.open(ranks) as stage, stage.notebook() as notebook:
        for _ in range(rounds):  # in turn, so that a busy moment of the machine meets both sides
            for sample in (one(stage, notebook) for _ in range(WARM)):
                warm.append(sample[0])
                whole.append(sample[1])
            launched, ended = bare(stage)
            launches.append(launched)
            wholes.append(ended)
            forked += accelerate(stage) if forking else []
            cold.append(from_nothing(ranks))
    yield Row(
        "launch", f"warm launch: cell start → first line on the last of {ranks.count} ranks, process group up",
        median(warm), "s", 1 / 20, median(launches), "bare torchrun", samples=tuple(warm),
    )  # fmt: skip
    if forked:
        yield Row(
            "launch", "…beside a fork of the kernel (an aim)", median(warm), "s", 1.0, median(forked),
            "accelerate.notebook_launcher", samples=tuple(forked),
        )  # fmt: skip
    yield Row(
        "launch", "cold launch: no process of ours is there yet", median(cold), "s", 0.9, median(launches),
        "bare torchrun", samples=tuple(cold),
    )  # fmt: skip
    yield Row(
        "launch", "whole warm trivial job: cell start → result in the notebook", median(whole), "s", 1 / 12,
        median(wholes), "bare torchrun, result through a file", samples=tuple(whole),
    )  # fmt: skip


def one(stage: Stage, notebook: Notebook) -> tuple[float, float]:
    """Seconds to the first line on the last rank, and to the end of the cell."""
    cell = notebook.run(CELL.replace("RANKS", stage.ranks.line))
    return max(stage.stamps("first")) - cell.sent, cell.ended - cell.sent


def from_nothing(ranks: Ranks) -> float:
    """Run All of a notebook in a fresh kernel, that is: the extension and the cell right after it."""
    with Stage.open(ranks) as stage, stage.notebook(load=False) as notebook:
        loaded = notebook.run("%load_ext jupyter_torchdist")
        notebook.run(CELL.replace("RANKS", ranks.line), timeout=120)
        return max(stage.stamps("first")) - loaded.ended


def bare(stage: Stage) -> tuple[float, float]:
    """torchrun: seconds to the first line on the last rank, and to its result read back."""
    ran = torchrun(stage.script("bare", SCRIPT.replace("JOIN", stage.ranks.joins)), stage.ranks.count)
    first = max(stage.stamps("first"))
    assert (stage.root / "answer.json").read_text() == "42"
    return first - ran.begun, ran.ended - ran.begun


def accelerate(stage: Stage) -> list[float]:
    """accelerate's launcher for notebooks: it forks the kernel, torch, threads and all, and so hangs now and then."""
    samples: list[float] = []
    for _ in range(FORKS):
        with Notebook(stage.root, stage.environ) as notebook:
            notebook.run(STAMP.format(marks=str(stage.marks)) + ACCELERATE, timeout=120)
            try:
                for _ in range(FORKS):
                    cell = notebook.run("notebook_launcher(ranks, num_processes=2)", timeout=15)
                    samples.append(max(stage.stamps("first")) - cell.sent)
                return samples
            except TimeoutError:
                for pid in descendants(notebook.pid):
                    os.kill(pid, signal.SIGKILL)
                notebook.kill()
    return samples
