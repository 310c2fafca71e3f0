"""256 MB from the notebook to two ranks and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.benchmarks.report import Row, median
from tests.benchmarks.stage import Stage, peak_memory
from tests.notebook import Notebook

SIZE = 2**28
RUNS = 5
SETUP = """
import hashlib, pathlib, time
import numpy as np, pandas as pd, torch
from torch import nn
from torch.utils.data import Dataset

def digest_and_write(data, path):
    begun = time.monotonic()
    hashlib.sha256(data).hexdigest()
    with open(path, "wb") as file:
        file.write(data)
    took = time.monotonic() - begun
    pathlib.Path(path).unlink()
    return took

class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]

numbers = np.random.default_rng(0).random(2**25)
"""
EMPTY = "%%distribute --ranks 2 --out none\nstamp('there')"
PAUSE = "\ntime.sleep(0.5)"
"""So that the memory is seen at its highest."""
BACK = """%%distribute --ranks 2
import torch
weights = torch.rand({elements}) if os.environ["RANK"] == "0" else None
stamp("made")
"""


@dataclass(frozen=True)
class Kind:
    """One way of holding 256 MB: how to make it, change a little of it, touch it in a rank, read all of it there."""

    name: str
    make: str
    change: str
    touch: str
    read: str


KINDS = (
    Kind("numpy array", "held = numbers", "held[0] += 1", "float(held[-1])", "float(held.sum())"),
    Kind("tensor", "held = torch.from_numpy(numbers.copy())", "held[0] += 1", "float(held[-1])", "float(held.sum())"),
    Kind(
        "nn.Module",
        "held = nn.Linear(8192, 8191, bias=True)",
        "with torch.no_grad(): held.bias[0] += 1; held.weight[0, 0] += 1",
        "float(held.weight[-1, -1])",
        "float(held.weight.sum())",
    ),
    Kind(
        "DataFrame",
        "held = pd.DataFrame(numbers.reshape(-1, 16).copy(), columns=[f'c{i}' for i in range(16)])",
        "held.iat[0, 0] += 1",
        "float(held.iat[-1, -1])",
        "float(held.to_numpy().sum())",
    ),
    Kind(
        "Dataset",
        "held = Pairs(numbers.reshape(-1, 64).copy(), np.zeros(2**19, np.int64))",
        "held.x[0, 0] += 1",
        "float(held[-1][0][-1])",
        "float(held.x.sum())",
    ),
)


def rows() -> Iterator[Row]:
    with Stage.open() as stage, stage.notebook() as notebook:
        notebook.run(SETUP, timeout=120)
        yield from to_ranks(stage, notebook)
        yield from from_rank(stage, notebook)


def to_ranks(stage: Stage, notebook: Notebook) -> Iterator[Row]:
    for kind in KINDS:
        notebook.run(kind.make)
        changed, unchanged, bare, written = [], [], [], []
        for _ in range(RUNS):
            stage.forget_blobs()
            bare.append(yardstick(stage, notebook))
            empty = launch(stage, notebook, EMPTY)
            notebook.run(kind.change)
            changed.append(launch(stage, notebook, held(kind.touch)) - empty)
            before = stage.blobs()
            unchanged.append(launch(stage, notebook, held(kind.touch)) - empty)
            written.append(stage.data_written(before))
        stage.forget_blobs()
        notebook.run(kind.change)
        peak = peak_memory(stage, notebook, held(kind.read) + PAUSE) - peak_memory(stage, notebook, EMPTY + PAUSE)
        beside = "SHA-256 and one write"
        yield Row(
            "data", f"256 MB to 2 ranks as {kind.name}: added to the launch", median(changed), "s", 1.3, median(bare),
            beside, samples=tuple(changed),
        )  # fmt: skip
        yield Row("data", f"…as {kind.name}: peak extra memory over all processes", peak / SIZE, "× the data", 1.1)
        yield Row(
            "data", f"…as {kind.name}, unchanged, second launch", median(unchanged), "s", 0.8, median(bare), beside,
            samples=tuple(unchanged),
        )  # fmt: skip
        yield Row("data", f"…as {kind.name}, unchanged: bytes of data written", max(written), "bytes", 0)


def held(expression: str) -> str:
    """A cell that captures the data; the rank is there when it has the expression's value."""
    return f"%%distribute --ranks 2 --out none\nlast = {expression}\nstamp('there')"


def launch(stage: Stage, notebook: Notebook, code: str) -> float:
    """Seconds from the cell's start until the last rank is there."""
    cell = notebook.run(code)
    return max(stage.stamps("there")) - cell.sent


def yardstick(stage: Stage, notebook: Notebook) -> float:
    """On the disk where the blobs are, of the bytes of an array of that size."""
    took = notebook.value(f"digest_and_write(numbers, {str(stage.root / 'yardstick')!r})")
    assert isinstance(took, float)
    return took


def from_rank(stage: Stage, notebook: Notebook) -> Iterator[Row]:
    notebook.run("held = None")
    took, bare = [], []
    for _ in range(RUNS):
        bare.append(yardstick(stage, notebook))
        small = back(stage, notebook, 1)
        took.append(back(stage, notebook, SIZE // 4) - small)
    small = peak_memory(stage, notebook, BACK.format(elements=1) + PAUSE)
    peak = peak_memory(stage, notebook, BACK.format(elements=SIZE // 4) + PAUSE) - small
    yield Row(
        "data", "256 MB tensor back from rank 0", median(took), "s", 0.75, median(bare), "SHA-256 and one write",
        samples=tuple(took),
    )  # fmt: skip
    yield Row("data", "…peak extra memory over all processes, the rank's own tensor included", peak / 2**20, "MiB", 300)


def back(stage: Stage, notebook: Notebook, elements: int) -> float:
    """Seconds from the tensor's being there on rank 0 to the end of the cell."""
    cell = notebook.run(BACK.format(elements=elements))
    made = stage.stamps("made")[0]
    notebook.run("float(weights[-1]); del weights")
    return cell.ended - made
