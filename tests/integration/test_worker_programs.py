"""What user code of many kinds finds in a rank: its own process group, children, displays, curves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.strategy import StrategyPlan
from jupyter_torchdist.store import logs
from tests.ranks import RankJob, Warm


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as process:
        yield process


DATASET = """
import torch, dataclasses, typing
from torch.utils.data import DataLoader, Dataset
import torch.distributed as dist

class Item(typing.NamedTuple):
    x: torch.Tensor
    label: int

@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    labels: list

factor = 3
table = torch.arange(10.0)

def scaled(i):
    return Item(table[i] * factor, other(i))

def other(i):
    return -i if i < 5 else scaled(i - 5).label - 5

class Numbers(Dataset):
    def __len__(self):
        return 10
    def __getitem__(self, i):
        return scaled(i)

def collate(items):
    return Batch(torch.stack([item.x for item in items]), [item.label for item in items])

seen = []
for method in METHODS:
    workers = 2 if method == "fork" else 1  # one that is not forked imports torch
    loader = DataLoader(Numbers(), 4, num_workers=workers, multiprocessing_context=method, collate_fn=collate)
    batches = list(loader)
    seen.append((method, all(type(b) is Batch for b in batches),
                 torch.cat([b.x for b in batches]).tolist(), sum((b.labels for b in batches), [])))
"""


@pytest.mark.parametrize("world", [1, 2])
def test_data_loader_workers_under_every_start_method(warm: Warm, tmp_path: Path, world: int) -> None:
    methods = ("fork", "spawn", "forkserver") if world == 1 else ("fork",)
    job = RankJob(warm, tmp_path, DATASET.replace("METHODS", repr(methods)), world=world, bound=("seen",)).run()
    assert job.codes == dict.fromkeys(range(world), 0), job.err(0)
    numbers, labels = [3.0 * i for i in range(10)], [-i for i in range(10)]
    assert job.values()["seen"] == [(method, True, numbers, labels) for method in methods]


def test_pools_of_children(warm: Warm, tmp_path: Path) -> None:
    source = """
import concurrent.futures, multiprocessing as mp
class Answer:
    def __init__(self, n): self.n = n
base = 10
def work(n):
    return Answer(n + base)
results = {}
for method in ("spawn", "forkserver"):
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=mp.get_context(method)) as pool:
        answers = list(pool.map(work, range(3)))
    results[method] = [a.n for a in answers if type(a) is Answer]
results
"""
    job = RankJob(warm, tmp_path, source, world=1, bound=("results",)).run()
    assert job.codes == {0: 0}, job.err(0)
    assert job.values()["results"] == {"spawn": [10, 11, 12], "forkserver": [10, 11, 12]}


def test_code_that_makes_its_own_group(warm: Warm, tmp_path: Path) -> None:
    source = """
import datetime, torch, torch.distributed as dist
from torch.distributed import init_process_group
init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
init_process_group("gloo", init_method="env://") if False else None
x.item()
"""
    job = RankJob(warm, tmp_path, source, bound=("x", "init_process_group")).run()
    assert job.codes == {0: 0, 1: 0}, job.err(0)
    assert job.values()["x"].item() == 2
    assert job.values()["init_process_group"].__module__ == "torch.distributed.distributed_c10d"


@pytest.mark.parametrize("ends", ["", "dist.init_process_group('gloo')\ndist.destroy_process_group()\n"])
def test_a_rank_leaves_the_group_when_all_have_joined(warm: Warm, tmp_path: Path, ends: str) -> None:
    """Gloo fails in a rank that still connects when another one is gone."""
    waited = (
        "import torch.distributed as dist\n"
        "from jupyter_torchdist.ranks.group import Meeting\n"
        "def wait(meeting, original=Meeting.wait):\n"
        "    original(meeting)\n"
        "    print('all are here', dist.is_initialized(), flush=True)\n"
        "Meeting.wait = wait\n"
    )
    job = RankJob(warm, tmp_path, waited + ends).run()
    assert job.codes == {0: 0, 1: 0}, (job.err(0), job.err(1))
    assert all(job.out_text(rank).startswith("all are here True\n") for rank in (0, 1))


def test_a_script(warm: Warm, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, os\n"
        "import torch.distributed as dist\n"
        "if __name__ == '__main__':\n"
        "    dist.init_process_group('gloo')\n"
        "    print(sys.argv[1:], dist.get_rank(), os.path.basename(__file__))\n"
        "    dist.barrier()\n"
        "    dist.destroy_process_group()\n"
    )
    job = RankJob(
        warm,
        tmp_path,
        script.read_text(),
        kind="script",
        argv=("train.py", "--lr", "1"),
        out=("none",),
        label=str(script),
    ).run()
    assert job.codes == {0: 0, 1: 0}, job.err(0)
    assert job.out_text(1) == "['--lr', '1'] 1 train.py\n"


def test_a_captured_call(warm: Warm, tmp_path: Path) -> None:
    names = {"__torchdist_call__": (sorted, ([3, 1, 2],), {"reverse": True})}
    job = RankJob(warm, tmp_path, "", kind="function", names=names, collect="all").run()
    assert [job.values(rank) for rank in (0, 1)] == [{"__torchdist_value__": [3, 2, 1]}] * 2


def test_names_that_are_asked_for(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(warm, tmp_path, "a, b, c = 1, 2, 3\nc", world=1, bound=("a", "b", "c"), out=("a", "zzz")).run()
    assert job.values() == {"a": 1, "__torchdist_value__": 3}
    assert [name for name, _ in job.event(0, "rank.result").data["left"]] == ["zzz"]
    job = RankJob(warm, tmp_path / "none", "a = 1\na", world=1, bound=("a",), out=("none",)).run()
    assert job.values() == {"__torchdist_value__": 1}


def test_what_cannot_be_pickled_stays_and_still_shows(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(
        warm,
        tmp_path,
        "import threading\nok = 1\nlock = threading.Lock()\n(i for i in [1])",
        world=1,
        bound=("ok", "lock"),
    ).run()
    assert job.codes == {0: 0}
    assert job.values() == {"ok": 1}
    assert {name for name, _ in job.event(0, "rank.result").data["left"]} == {"lock", "__torchdist_value__"}
    assert "generator object" in job.display(0)[-1]["data"]["text/plain"]


def test_commands_and_keyboards(warm: Warm, tmp_path: Path) -> None:
    source = """
get_ipython().system('echo from the shell')
text = get_ipython().getoutput('echo one; echo two')
words = []
for ask in (lambda: input('? '), breakpoint, lambda: get_ipython().run_line_magic('time', 'x')):
    try:
        ask()
    except Exception as error:
        words.append(str(error))
"""
    job = RankJob(warm, tmp_path, source, world=1, bound=("text", "words")).run()
    assert job.codes == {0: 0}, job.err(0)
    assert job.out_text(0) == "from the shell\n"
    values = job.values()
    assert values["text"] == ["one", "two"]
    assert [word.splitlines()[0] for word in values["words"][:2]] == [
        "input() does not work: a rank has no keyboard",
        "breakpoint() does not work: a rank has no keyboard",
    ]
    assert values["words"][2].startswith("%time cannot run on a rank")


def test_rich_output(warm: Warm, tmp_path: Path) -> None:
    source = """
import pandas
from IPython.display import HTML, clear_output, display
import matplotlib.pyplot as plt
display(HTML('<b>bold</b>'))
clear_output(wait=True)
plt.plot([1, 2]); plt.show()
plt.plot([2, 1])
pandas.DataFrame({'a': [1]})
"""
    job = RankJob(warm, tmp_path, source, world=1).run()
    assert job.codes == {0: 0}, job.err(0)
    assert job.err(0) == ""
    lines = job.display(0)
    assert [line["kind"] for line in lines] == ["display", "clear", "display", "result", "display"]
    assert lines[0]["data"]["text/html"] == "<b>bold</b>"
    assert "image/png" in lines[2]["data"] and "image/png" in lines[4]["data"]
    assert "<table" in lines[3]["data"]["text/html"]
    assert job.out_text(0) == (
        "[display 1: text/html] <IPython.core.display.HTML object>\n"
        "[display 2: image/png] <Figure size 640x480 with 1 Axes>\n"
        "[display 3: text/html] a…\n"
        "[display 4: image/png] <Figure size 640x480 with 1 Axes>\n"
    )


def test_display_is_there_without_an_import(warm: Warm, tmp_path: Path) -> None:
    source = "display('x')\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(3)): pass"
    job = RankJob(warm, tmp_path, source, world=1).run()
    assert job.codes == {0: 0}, job.err(0)
    assert job.display(0)[0]["data"] == {"text/plain": "'x'"}
    assert "3/3" in job.err(0)


def test_nested_bars_are_shown_as_one_line_each(warm: Warm, tmp_path: Path) -> None:
    source = """
from tqdm.notebook import tqdm
for _ in tqdm(range(3), "outer"):
    for _ in tqdm(range(50), "inner", leave=False, mininterval=0):
        pass
print("after", file=__import__("sys").stderr)
"""
    job = RankJob(warm, tmp_path, source, world=1).run()
    assert job.codes == {0: 0}, job.err(0)
    assert job.err(0).count("\x1b[A") > 100
    bar, after = logs.lines(job.files.err(0))
    assert "3/3" in bar and after == "after\n"


def test_curves(warm: Warm, tmp_path: Path) -> None:
    source = """
import torch, jupyter_torchdist.ranks.api as td
from torch.nn.functional import mse_loss
w = torch.nn.Parameter(torch.ones(2))
scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)
for step in range(3):
    d_loss = (w ** 2).sum()
    d_loss.backward()
    g_loss = mse_loss(w, torch.zeros(2))
    scaler.scale(g_loss).backward()
    (w.sum() / 4).backward()
    (w * 2).backward(torch.ones(2))
    td.log(lr=0.1, w=w.detach().sum(), step=step)
for i in td.progress(range(5), desc='eval'):
    td.print('main only', i) if i == 4 else None
td.print('everyone', all=True)
facts = td.rank, td.world_size, td.local_rank, td.is_main, td.device.type, td.gather(td.rank)
"""
    job = RankJob(warm, tmp_path, source, bound=("facts",), collect="all").run()
    assert job.codes == {0: 0, 1: 0}, job.err(0)
    assert job.values(1)["facts"] == (1, 2, 1, False, "cpu", [0, 1])
    assert job.out_text(0) == "main only 4\n[rank 0] everyone\n" and job.out_text(1) == "[rank 1] everyone\n"
    lines = job.metrics(1)
    auto = [line for line in lines if line.get("auto")]
    assert [(name, line["step"]) for line in auto for name in line["v"]][:4] == [
        ("d_loss", 1), ("g_loss", 1), ("w.sum() / 4", 1), ("d_loss", 2),
    ]  # fmt: skip
    assert auto[1]["v"] == {"g_loss": 1.0} and len(auto) == 9
    logged = [line for line in lines if line["k"] == "log" and not line.get("auto")]
    assert [(line["step"], line["v"]) for line in logged] == [(i, {"lr": 0.1, "w": 2.0}) for i in range(3)]
    assert [line for line in lines if line["k"] == "progress"][-1]["n"] == 5


def test_a_loss_that_becomes_nan_is_said_once_with_rank_and_step(warm: Warm, tmp_path: Path) -> None:
    source = """
import torch
import jupyter_torchdist as td
w = torch.ones(1, requires_grad=True)
for step in range(1, 5):
    loss = (w - w).log().sum() * 0 if step > 1 + td.rank else w.sum()
    loss.backward()
    td.barrier()
"""
    job = RankJob(warm, tmp_path, source).run()
    notes = [event.data["text"] for rank in (0, 1) for event in job.events(rank) if event.kind == "job.note"]
    assert job.codes == {0: 0, 1: 0}
    assert notes in (["loss is NaN at step 2 on rank 0 (said once)"], ["loss is NaN at step 3 on rank 1 (said once)"])


def test_top_level_await_on_a_rank(warm: Warm, tmp_path: Path) -> None:
    job = RankJob(warm, tmp_path, "import asyncio\nx = await asyncio.sleep(0, 5)\nx", world=1, bound=("x",)).run()
    assert job.values() == {"x": 5, "__torchdist_value__": 5}


def test_a_compiled_step(warm: Warm, tmp_path: Path) -> None:
    source = """
import torch, torch._dynamo.utils as dynamo
model = torch.nn.Linear(3, 1)
@torch.compile(backend="eager")
def step(x):
    loss = model(x).sum()
    loss.backward()
    return loss
for _ in range(3): step(torch.ones(4, 3))
breaks = len(dynamo.counters["graph_break"])
"""
    job = RankJob(warm, tmp_path, source, world=1, bound=("breaks",)).run()
    assert job.codes == {0: 0}, job.err(0)
    values = job.values()
    assert values["breaks"] == 1
    assert not [name for name in values if name.startswith("__")], "names of torch.compile"
    assert [(line["step"], *line["v"]) for line in job.metrics(0)] == [(1, "loss"), (2, "loss"), (3, "loss")]


DDP = StrategyPlan("ddp", {"dp_replicate": 2})


@pytest.mark.parametrize(
    ("strategy", "sampler", "prepare", "counts"),
    [
        (StrategyPlan(), "torch.utils.data.DistributedSampler(data)", "", (100, 100)),
        (StrategyPlan(), "None", "", (None, None)),
        (DDP, "None", "", (200, None)),
        (DDP, "None", "td.prepare(model, loader)", (200, None)),
    ],
)
def test_samples_are_counted_where_it_is_known_what_the_ranks_have_in_common(
    strategy: StrategyPlan, sampler: str, prepare: str, counts: tuple[int | None, ...], warm: Warm, tmp_path: Path
) -> None:
    source = f"""
import torch, jupyter_torchdist as td
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.ones(100, 3))
loader = DataLoader(data, batch_size=16, sampler={sampler})
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
{prepare}
for _ in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for (x,) in loader: model(x)
"""
    job = RankJob(warm, tmp_path, source, strategy=strategy).run()
    assert job.codes == {0: 0, 1: 0}, (job.err(0), job.err(1))
    lines = [[line["n"] for line in job.metrics(rank) if line["k"] == "samples"] for rank in (0, 1)]
    assert tuple(max(counted, default=None) for counted in lines) == counts


def test_a_matmul_in_every_forked_rank(warm: Warm, tmp_path: Path) -> None:
    source = "import torch\nx = torch.ones(300, 300)\ny = (x @ x).sum().item()\n"
    job = RankJob(warm, tmp_path, source, env={"OMP_NUM_THREADS": "2"}, bound=("y",), collect="all").run()
    assert [job.values(rank)["y"] for rank in (0, 1)] == [300.0**3] * 2
