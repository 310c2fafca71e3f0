"""What watching a training loop costs it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.report import Row, in_random_order, median
from tests.benchmarks.stage import TWO_ON_CPUS, Ranks, Stage, torchrun
from tests.notebook import Notebook

RUNS, STEPS, BATCHES, CALLS = 11, 300, 30, 2000
MODEL = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
"""
LOOP = """
torch.manual_seed(0)
device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
model = DistributedDataParallel(nn.Sequential(*layers).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.rand(128, 784).to(device), torch.randint(10, (128,)).to(device)
for step in range(STEPS + 50):
    if step == 50:
        begun = time.perf_counter()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    log(loss, step)
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")
last = loss.item()
speed = STEPS / (time.perf_counter() - begun)
if dist.get_rank() == 0:
    pathlib.Path(target).write_text(repr(speed))
"""
BARE = """
JOIN
target = "speed"
def log(loss, step):
    pass
"""
OURS = """
import jupyter_torchdist as td
def log(loss, step):
    td.log(loss=loss, lr=1e-3, step=step)
"""
LOG = f"""%%distribute RANKS
spent = []
for batch in range({BATCHES}):
    begun = time.perf_counter()
    for call in range({CALLS}):
        td.log(loss=0.5, lr=0.001)
    spent.append((time.perf_counter() - begun) / {CALLS} * 1e6)
    time.sleep(0.02)
"""


def rows(ranks: Ranks = TWO_ON_CPUS, runs: int = RUNS, steps: int = STEPS) -> Iterator[Row]:
    loop = LOOP.replace("STEPS", str(steps))
    with Stage.open(ranks) as stage, stage.notebook() as notebook:
        notebook.run(MODEL + OURS, timeout=120)
        notebook.run(f"target = {str(stage.root / 'speed')!r}")
        notebook.run(LOG.replace("RANKS", ranks.line))
        spent = notebook.value("spent")
        script = stage.script("training", MODEL + BARE.replace("JOIN", ranks.joins) + loop)
        ours, bare = [], []

        def under_torchrun() -> None:
            torchrun(script, ranks.count)
            bare.append(speed(stage))

        in_random_order(runs, lambda: ours.append(run(stage, notebook, loop)), under_torchrun)
    yield Row("training", "`td.log(loss=…, lr=…)`", median(spent), "µs a call", 5, samples=tuple(spent))
    yield Row(
        "training", "a training loop with logs, metrics and autolog on", max(ours), "steps/s", 0.98, max(bare),
        f"the same loop under bare torchrun; fastest of {runs}", at_least=True, samples=tuple(ours),
        yardsticks=tuple(bare),
    )  # fmt: skip


def run(stage: Stage, notebook: Notebook, loop: str) -> float:
    notebook.run(f"%%distribute {stage.ranks.line} --out none\n{loop}", timeout=120)
    return speed(stage)


def speed(stage: Stage) -> float:
    """Steps a second, as rank 0 wrote it down."""
    path = stage.root / "speed"
    value = float(path.read_text())
    path.unlink()
    return value
