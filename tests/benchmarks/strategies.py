"""Unmodified cells under `--strategy`, beside what one would write by hand with PyTorch's own parts."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.benchmarks import turns
from tests.benchmarks.report import Row, in_random_order, median
from tests.benchmarks.stage import Ran, Stage, torchrun
from tests.notebook import Notebook

RUNS, OWN_RUNS, TURNS, BACK_RUNS = 2, 8, 24, 5
"""Of both sides together, a new job each; turns of each side in a run."""
WIDTH, NARROW = 256, 128
"""Of a model's layers; with the second one a step by hand takes about 10 ms."""
OWN_COST = 0.1
"""Milliseconds: 1 % of a step of 10 ms."""

MODEL = f"""
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

LAYERS, BATCH, STEPS = 20, 64, {(turns.WARM + TURNS) * turns.WINDOW}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS // 2)])
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
"""
DATA = """
torch.manual_seed(0)
samples = BATCH * STEPS
data = TensorDataset(torch.rand(samples, 64), torch.randint(10, (samples,)))
"""
SEQUENCES = """
WIDTH, LAYERS, TOKENS = 256, 2, 128

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (one.unflatten(-1, (8, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(64, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.last = nn.Linear(WIDTH, 64)

    def forward(self, x):
        x = self.words(x) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.last(x).transpose(1, 2)

torch.manual_seed(0)
words = torch.randint(64, (BATCH * STEPS, TOKENS + 1))
data = TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())
"""
"""A text model in place of the one above."""
CELL = """
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=BATCH, shuffle=True)
turns = Turns(port)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    turns.step()
spent = turns.end()
del turns
"""
BY_HAND = """
import pathlib
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model, part, share = Net(), None, 1

def mine(x, y):
    return x, y
"""
ULYSSES = """
from torch.distributed.nn.functional import all_gather, all_to_all_single
each, attend = TOKENS // ranks, F.scaled_dot_product_attention

def exchanged(x, scatter, gather):
    sent = torch.stack(x.chunk(ranks, scatter)).contiguous()
    return torch.cat(list(all_to_all_single(torch.empty_like(sent), sent)), gather)

def ulysses(query, key, value, **options):
    whole = [exchanged(one, 1, 2) for one in (query, key, value)]
    return exchanged(attend(*whole, **options), 2, 1)

F.scaled_dot_product_attention = ulysses
"""
"""Attention to whole sequences of which each rank has a part."""


@dataclass(frozen=True)
class Case:
    """An unmodified loop under ``line``, beside the same written by hand: ``setup``, told as ``beside``."""

    line: str
    setup: str
    beside: str
    ranks: int = 2
    runs: int = RUNS
    data: str = DATA
    width: int = WIDTH
    options: str = "{}"
    """Of the optimizer by hand."""


CASES = {
    "ddp": Case(
        "--strategy ddp",
        """
model, share = nn.parallel.DistributedDataParallel(model), ranks
""",
        "DistributedDataParallel and DistributedSampler",
    ),
    "fsdp": Case(
        "--strategy fsdp",
        """
from torch.distributed.fsdp import fully_shard
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
share = ranks
""",
        "`fully_shard` of each block",
        runs=2 * RUNS,  # from job to job the ratio moves by 0.03, whichever side has the luckier memory
    ),
    "hsdp": Case(
        "--strategy hsdp -O dp_replicate=2 -O dp_shard=2",
        """
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
share = ranks
""",
        "`fully_shard` of each block on a mesh of 2 x 2",
        ranks=4,
        runs=1,
    ),
    # Parameters that are DTensors beside plain ones take no kernel over many tensors, neither by hand nor here.
    "tp": Case(
        "--strategy tp -O tp_plan=layers.*.up:colwise,layers.*.down:rowwise",
        """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
plan = {}
for number in range(len(model.layers)):
    plan[f"layers.{number}.up"], plan[f"layers.{number}.down"] = ColwiseParallel(), RowwiseParallel()
parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
""",
        "`parallelize_module`, optimizer without foreach",
        options="dict(foreach=False)",
    ),
    "cp": Case(
        "--strategy cp",
        ULYSSES
        + """
def cut(_layer, given):
    return given[0][:, rank * each:][:, :each]

def join(_layer, _given, part):
    return torch.cat(all_gather(part), 1)

model.layers[0].register_forward_pre_hook(cut)
model.layers[-1].register_forward_hook(join)
model = nn.parallel.DistributedDataParallel(model)
""",
        "blocks cut and joined, an all-to-all around each attention by hand, DistributedDataParallel",
        data=f"BATCH = 4\n{SEQUENCES}",
    ),
    "cp, beside every layer divided by hand (an aim)": Case(
        "--strategy cp",
        ULYSSES
        + """
def mine(x, y):
    return x[:, rank * each:][:, :each], y[:, rank * each:][:, :each]

model.places = nn.Parameter(model.places[rank * each:][:each].detach().clone())
nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["places"])
model = nn.parallel.DistributedDataParallel(model)
""",
        "tokens, targets and positions, an all-to-all around each attention by hand, DistributedDataParallel",
        data=f"BATCH = 4\n{SEQUENCES}",
    ),
    "pp": Case(
        "--strategy pp -O schedule=gpipe -O microbatches=4",
        """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
half = len(model.layers) // 2
parts = [nn.Sequential(model.first, *model.layers[:half]), nn.Sequential(*model.layers[half:], model.last)]
part = model = parts[rank]
schedule = ScheduleGPipe(PipelineStage(part, rank, ranks, torch.device("cpu")), 4, loss_fn=F.cross_entropy)
""",
        "`PipelineStage` and `ScheduleGPipe`, halves by hand",
    ),
}
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
sampler = torch.utils.data.DistributedSampler(data, ranks, rank) if share > 1 else None
loader = DataLoader(data, batch_size=BATCH // share, sampler=sampler)
turns = Turns(port)
for x, y in loader:
    x, y = mine(x, y)
    optimizer.zero_grad()
    if part is not None:
        schedule.step(x) if rank == 0 else schedule.step(target=y)
    else:
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    turns.step()
spent = turns.end()
if rank == 0:
    pathlib.Path("spent").write_text(repr(spent))
dist.destroy_process_group()
"""
TOUCH = "torch.ones(2_200_000_000, dtype=torch.uint8)"
"""Memory that is touched and given back: a machine of the cloud lends it, and the first touch of a page is dear."""
PARTS = "nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(16)])"
LARGE = f"""%%distribute --ranks 2 --strategy ddp
large = {PARTS}  # 1.07 GB
optimizer = torch.optim.SGD(large.parameters(), lr=1e-3)
large(torch.rand(2, 4096)).square().mean().backward()
optimizer.step()
if os.environ["RANK"] == "0":
    {TOUCH}
stamp("end")
"""


Spent = list[tuple[float, float]]
"""Milliseconds a step, by the clock and of the main thread, in each turn."""


def rows() -> Iterator[Row]:
    with Stage.open() as stage, stage.notebook() as notebook:
        for name, case in CASES.items():
            yield from compared(stage, notebook, name, case)
        yield from own_cost(stage, notebook)
        yield back(stage, notebook)


def compared(stage: Stage, notebook: Notebook, name: str, case: Case) -> Iterator[Row]:
    """Steps a second."""
    strategy, comma, of = name.partition(",")
    what = f"an unmodified loop under `--strategy {strategy}`, {case.ranks} ranks{comma}{of}"
    ours, bare = by_turns(stage, notebook, case)
    speeds, yardsticks = tuple(1e3 / clock for clock, _ in ours), tuple(1e3 / clock for clock, _ in bare)
    yield Row(
        "strategies", what, median(speeds), "steps/s", 0.97, median(yardsticks),
        f"{case.beside} under torchrun; by turns", at_least=True, samples=speeds, yardsticks=yardsticks, paired=True,
    )  # fmt: skip


def own_cost(stage: Stage, notebook: Notebook) -> Iterator[Row]:
    """What a step of about 10 ms takes more than with DDP written by hand: by the clock, and of the main thread.

    DDP makes two buckets of this model, of which it sends the first during the backward; the automatic way makes one,
    and on a machine whose cores are all at work that is the faster. So it is held against DDP of one bucket, too: what
    is left then is its own work alone.
    """
    by_hand = replace(CASES["ddp"], width=NARROW, runs=OWN_RUNS)
    one_bucket = by_hand.setup.replace("(model)", "(model, bucket_cap_mb=25)")
    what = "the automatic way's own cost a step of 20 layers, beside DDP written by hand"
    for case, beside in ((by_hand, ""), (replace(by_hand, setup=one_bucket), " with one bucket (an aim)")):
        ours, bare = by_turns(stage, notebook, case)
        step = median([clock for clock, _ in bare])
        note = f"The median of {len(bare)} pairs; by hand a step takes {step:.3g} ms. The limit is 1 % of one of 10 ms."
        for which, of in enumerate(("", ", of the main thread's processor time (an aim)")):
            more = tuple(mine[which] - theirs[which] for mine, theirs in zip(ours, bare, strict=True))
            name = f"{what}{beside}{of.replace(' (an aim)', '') if beside else of}"
            yield Row("strategies", name, median(more), "ms", OWN_COST, note=note, samples=more, sure=True)


def by_turns(stage: Stage, notebook: Notebook, case: Case) -> tuple[Spent, Spent]:
    """Ours and what is written by hand, at one time, in turns, as often as the case says."""
    ours, bare = [], []
    for _ in range(case.runs):
        mine, by_hand = run_by_turns(stage, notebook, case)
        ours += mine
        bare += by_hand
    return ours, bare


def run_by_turns(stage: Stage, notebook: Notebook, case: Case) -> tuple[Spent, Spent]:
    ran, table = list[Ran](), turns.Table()
    setup = f"{MODEL}WIDTH = {case.width}\n{case.data}{turns.SOURCE}port = {table.port}\n"
    body = f"{setup}options = {case.options}\n{BY_HAND}{case.setup}{LOOP}"
    script, result = stage.script(case.line.split()[1], body), stage.root / "spent"
    thread = threading.Thread(target=lambda: ran.append(torchrun(script, case.ranks)))
    thread.start()
    try:
        notebook.run(setup, timeout=120)
        notebook.run(f"%%distribute --ranks {case.ranks} {case.line}\n{CELL}", timeout=600)
    finally:
        thread.join()
        table.close()
    assert result.exists(), "\n".join(line for _, line in ran[0].lines)
    by_hand: Spent = ast.literal_eval(result.read_text())
    result.unlink()
    return notebook.value("spent"), by_hand


def back(stage: Stage, notebook: Notebook) -> Row:
    """From the last line on the slowest rank to the notebook's prompt, where the model is plain and whole."""
    spent: list[float] = []
    plain: list[float] = []
    file = str(stage.root / "large.pt")
    notebook.run(f"known = {PARTS}.state_dict()")

    def ours() -> None:
        cell = notebook.run(LARGE, timeout=300)
        spent.append(cell.ended - max(stage.stamps("end")))
        notebook.run("del large, optimizer")
        stage.forget_blobs()

    def by_hand() -> None:
        notebook.run(
            f"{TOUCH}; begun = time.monotonic()\n"
            f"torch.save(known, {file!r})\n"
            f"torch.load({file!r})\n"
            "once = time.monotonic() - begun\n"
            f"pathlib.Path({file!r}).unlink()",
            timeout=120,
        )
        plain.append(notebook.value("once"))

    in_random_order(BACK_RUNS, ours, by_hand)
    return Row(
        "strategies", "a model of 1.07 GB back in the notebook, plain and whole", median(spent), "s", 3, median(plain),
        "`torch.save` and `torch.load` of its state dict, once", samples=tuple(spent), yardsticks=tuple(plain),
    )  # fmt: skip
