"""What watching a training loop costs it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.report import Row, in_random_order, median
from tests.benchmarks.stage import Stage, torchrun
from tests.notebook import Notebook

RUNS, STEPS, BATCHES, CALLS = 11, 300, 30, 2000
MODEL = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
"""
LOOP = f"""
torch.manual_seed(0)
layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.rand(128, 784), torch.randint(10, (128,))
for step in range({STEPS} + 50):
    if step == 50:
        begun = time.perf_counter()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    log(loss, step)
    if step % 50 == 0:
        print(f"step {{step}} loss {{loss.item():.4f}}")
speed = {STEPS} / (time.perf_counter() - begun)
if dist.get_rank() == 0:
    pathlib.Path(target).write_text(repr(speed))
"""
BARE = """
dist.init_process_group("gloo")
target = "speed"
def log(loss, step):
    pass
"""
OURS = """
import jupyter_torchdist as td
def log(loss, step):
    td.log(loss=loss, lr=1e-3, step=step)
"""
LOG = f"""%%distribute --ranks 2
spent = []
for batch in range({BATCHES}):
    begun = time.perf_counter()
    for call in range({CALLS}):
        td.log(loss=0.5, lr=0.001)
    spent.append((time.perf_counter() - begun) / {CALLS} * 1e6)
    time.sleep(0.02)
"""


def rows() -> Iterator[Row]:
    with Stage.open() as stage, stage.notebook() as notebook:
        notebook.run(MODEL + OURS, timeout=120)
        notebook.run(f"target = {str(stage.root / 'speed')!r}")
        notebook.run(LOG)
        spent = notebook.value("spent")
        script = stage.script("training", MODEL + BARE + LOOP)
        ours, bare = [], []

        def under_torchrun() -> None:
            torchrun(script)
            bare.append(speed(stage))

        in_random_order(RUNS, lambda: ours.append(run(stage, notebook)), under_torchrun)
    yield Row("training", "`td.log(loss=…, lr=…)`", median(spent), "µs a call", 5, samples=tuple(spent))
    yield Row(
        "training", "a training loop with logs, metrics and autolog on", max(ours), "steps/s", 0.98, max(bare),
        f"the same loop under bare torchrun; fastest of {RUNS}", at_least=True, samples=tuple(ours),
        yardsticks=tuple(bare),
    )  # fmt: skip


def run(stage: Stage, notebook: Notebook) -> float:
    notebook.run("%%distribute --ranks 2 --out none\n" + LOOP, timeout=120)
    return speed(stage)


def speed(stage: Stage) -> float:
    """Steps a second, as rank 0 wrote it down."""
    path = stage.root / "speed"
    value = float(path.read_text())
    path.unlink()
    return value
