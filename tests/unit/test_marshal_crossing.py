"""Notebook → rank → notebook, through a second interpreter."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy
import pytest

from tests import crossing
from tests.crossing import Notebook

ranks, notebook = crossing.ranks, crossing.notebook


def test_values_of_the_cell_come_back(notebook: Notebook) -> None:
    notebook.cell("base = 40")
    assert notebook.run("answer = base + 2\ntext = 'ü'")["answer"] == 42
    assert notebook.names["text"] == "ü"


def test_lists_of_the_notebook_are_updated_in_place(notebook: Notebook) -> None:
    notebook.cell("losses = []\nalias = losses\nholder = {'losses': losses}")
    notebook.run("losses.append(1.5)")
    assert notebook.names["alias"] == [1.5]
    assert notebook.names["losses"] is notebook.names["alias"] is notebook.names["holder"]["losses"]


@pytest.mark.parametrize(
    ("make", "change", "expected"),
    [
        ("x = {'a': [1]}", "x['a'].append(2); x['b'] = 3", "{'a': [1, 2], 'b': 3}"),
        ("x = {1, 2}", "x.discard(1); x.add(5)", "{2, 5}"),
        ("from collections import *\nx = OrderedDict(a=1, b=2)", "x.move_to_end('a')", "OrderedDict(b=2, a=1)"),
        ("from collections import *\nx = defaultdict(list)", "x['k'].append(1)", "defaultdict(list, {'k': [1]})"),
        ("from collections import *\nx = Counter('aab')", "x.update('b')", "Counter('aabb')"),
        ("from collections import *\nx = deque([1], maxlen=2)", "x.extend([2, 3])", "deque([2, 3], maxlen=2)"),
        ("x = bytearray(b'ab')", "x += b'c'", "bytearray(b'abc')"),
        ("import numpy as np\nx = np.zeros(3)", "x[1] = 7", "np.array([0, 7, 0])"),
        ("import numpy as np\nx = np.zeros(100_000)", "x[1] = 7", "np.eye(1, 100_000, 1)[0] * 7"),
        ("import torch\nx = torch.zeros(3)", "x[1] = 7", "torch.tensor([0., 7, 0])"),
        ("import torch\nx = torch.zeros(100_000)", "x[1] = 7", "torch.eye(1, 100_000)[0].roll(1) * 7"),
        ("import torch\nx = torch.zeros(3)", "x.resize_(2).fill_(4)", "torch.tensor([4., 4])"),
        ("import torch\nx = torch.zeros(3)", "x.data = torch.ones(2, dtype=torch.int64)", "torch.tensor([1, 1])"),
        ("import random\nx = random.Random(1)", "x.random()", "None"),
        ("import pandas as pd\nx = pd.DataFrame({'a': [1, 2]})", "x.loc[0, 'a'] = 9", "pd.DataFrame({'a': [9, 2]})"),
        (
            "import pandas as pd\nx = pd.DataFrame({'a': [1, 2]})",
            "x['b'] = 'z'",
            "pd.DataFrame({'a': [1, 2], 'b': 'z'})",
        ),
    ],
)
def test_every_kind_of_container_is_updated_in_place(notebook: Notebook, make: str, change: str, expected: str) -> None:
    notebook.cell(make)
    before = notebook.names["x"]
    wanted = {**notebook.names, "x": copy.deepcopy(before)}
    exec(change, wanted)
    notebook.run(change)
    assert notebook.names["x"] is before
    assert type(before) is type(wanted["x"])
    assert pickle.dumps(before) == pickle.dumps(wanted["x"]) or numpy.asarray(before == wanted["x"]).all()
    assert expected == "None" or len(before) == len(eval(expected, wanted))


def test_what_did_not_change_does_not_come_back(notebook: Notebook) -> None:
    notebook.cell(
        "import numpy as np, torch\na = [1, {'k': (2, [3])}]\nb = np.ones(200_000)\nt = torch.ones(200_000)\nc = 'x'"
    )
    notebook.run("y = (len(a), b.sum(), t.sum().item(), c, a[1]['k'][1][0])")
    assert notebook.answer["changed"] == []
    assert notebook.answer["size"] < 2000


def test_rebinding_and_aliasing_come_back(notebook: Notebook) -> None:
    notebook.cell("a = [1]\nb = [1]\nn = 5\nboth = [a, b]")
    notebook.run("b = a\nn += 1\nboth[1] = both[0]")
    assert notebook.names["b"] is notebook.names["a"]
    assert notebook.names["n"] == 6
    assert notebook.names["both"][1] is notebook.names["a"]


TRAINING = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    scale = 2.0
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(20, 300)
        self.norm = nn.BatchNorm1d(300)
        self.head = nn.Linear(300, 2)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return self.head(F.relu(self.norm(self.inner(x)))) * factor * self.scale

factor = 1.0
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
x, y = torch.randn(64, 20), torch.randint(0, 2, (64,))
losses = []

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
"""


def test_a_trained_model_is_the_notebooks_own_object(notebook: Notebook) -> None:
    notebook.cell(TRAINING)
    names = notebook.names
    model, optimizer, kind, head = names["model"], names["optimizer"], names["Net"], names["model"].head.weight
    notebook.cell("import copy\nreference = copy.deepcopy((model, optimizer, scheduler, losses))")
    notebook.run("train(3)\nprediction = model.eval()(x).detach()")
    assert names["model"] is model
    assert names["optimizer"] is optimizer
    assert type(model) is names["Net"] is kind
    assert model.head.weight is head
    assert len(names["losses"]) == 3
    assert model.calls == 4
    assert not model.training
    assert optimizer.param_groups[0]["params"][0] is model.inner.weight
    assert all(parameter in optimizer.state for parameter in model.parameters())
    assert optimizer.state[head]["step"] == 3
    assert names["scheduler"].optimizer is optimizer
    assert names["scheduler"].last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    notebook.cell("assert torch.equal(model(x), prediction)\nmodel.train()\ntrain(1)")
    assert optimizer.state[head]["step"] == 4


def test_a_scheduler_does_not_warn_about_its_optimizer(notebook: Notebook) -> None:
    notebook.cell(TRAINING)
    notebook.run(
        "import warnings\nwith warnings.catch_warnings(record=True) as seen:\n    warnings.simplefilter('always')\n"
        "    train(2)\nmessages = [str(item.message) for item in seen]\ndel seen"
    )
    assert notebook.names["messages"] == []


def test_views_of_captured_tensors_stay_views(notebook: Notebook) -> None:
    notebook.cell("import torch\nbig = torch.zeros(200_000)\nhalf = big[100:200]\nparts = [big[:5], half]")
    notebook.run("view = big[7:9]\nhalf[0] = 3")
    names = notebook.names
    assert names["big"][100] == 3
    assert names["parts"][1] is names["half"]
    names["big"][8] = 4
    assert names["view"][1] == 4
    names["half"][1] = 5
    assert names["big"][101] == 5


def test_a_small_view_does_not_take_the_whole_storage_along(notebook: Notebook) -> None:
    notebook.cell("import torch\nsmall = torch.arange(1_000_000.)[500:510]\nother = small[2:4]")
    captured = notebook.send("small += 1\nnew = torch.ones(2_000_000)[3:7]")
    assert captured.size < 100_000
    assert notebook.answer["size"] < 100_000
    notebook.names.update(notebook.bring(captured))
    assert notebook.names["small"].tolist() == [float(501 + i) for i in range(10)]
    assert notebook.names["other"].tolist() == [503.0, 504.0]
    assert notebook.names["small"].storage_offset() == 500
    assert notebook.names["new"].tolist() == [1.0] * 4


def test_classes_of_the_notebook_stay_as_they_are(notebook: Notebook) -> None:
    notebook.cell(
        "def helper(): return 1\nCONSTANT = 10\n"
        "class Thing:\n    rate = 1\n    def value(self): return helper() + CONSTANT + self.rate"
    )
    captured = notebook.send("thing = Thing()\nthing.mark = 3")
    kind = notebook.names["Thing"]
    notebook.cell("def helper(): return 2\nCONSTANT = 20\nThing.rate = 5\nThing.extra = 'mine'")
    notebook.count -= 1
    found = notebook.bring(captured)
    assert type(found["thing"]) is kind
    assert found["thing"].value() == 27
    assert kind.extra == "mine"


def test_classes_and_functions_of_the_cell_come_back(notebook: Notebook) -> None:
    notebook.cell("offset = 5")
    notebook.run(
        "class Point:\n    def __init__(self, x): self.x = x\n    def moved(self): return Point(self.x + offset)\n"
        "def double(p): return Point(p.x * 2)\npoint = Point(3)"
    )
    names = notebook.names
    assert isinstance(names["point"], names["Point"])
    assert names["double"].__globals__ is names
    assert names["point"].moved().x == 8
    names["offset"] = 6
    assert names["double"](names["point"].moved()).x == 18


def test_reading_the_results_twice_gives_the_same_class_and_leaves_it_alone(notebook: Notebook) -> None:
    captured = notebook.send("class Cell:\n    tag = 1\none = Cell()")
    first = notebook.bring(captured)
    first["Cell"].tag = 2
    second = notebook.bring(captured)
    assert second["Cell"] is first["Cell"]
    assert type(second["one"]).tag == 2


def test_a_cell_run_again_unchanged_gives_its_class_of_now(notebook: Notebook) -> None:
    source = "class Model:\n    def go(self): return 1\n"
    notebook.cell(source)
    captured = notebook.send("made = Model()")
    number = notebook.count
    notebook.cell(source)
    notebook.count = number
    assert type(notebook.bring(captured)["made"]) is notebook.names["Model"]


def test_one_value_that_cannot_travel_does_not_lose_the_others(notebook: Notebook) -> None:
    notebook.cell("class Box: pass\nbox = Box()\nkept = []")
    notebook.run(
        "import threading\nbox.inner = {'deep': [1, threading.Lock()]}\nkept.append(1)\ngood = 7\n"
        "numbers = (i for i in range(3))\nlast = 8"
    )
    assert notebook.names["good"] == 7
    assert notebook.names["last"] == 8
    assert notebook.names["kept"] == [1]
    left = dict(notebook.answer["left"])
    assert set(left) == {"box", "numbers"}
    assert left["box"].startswith("box.inner['deep'][1]: _thread.lock")


def test_a_parallel_model_comes_back_plain(notebook: Notebook) -> None:
    notebook.cell("import torch\nmodel = torch.nn.Linear(3, 2)\nsame = model")
    notebook.run(
        "import torch.distributed as dist, tempfile\n"
        "store = dist.HashStore()\ndist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "model(torch.ones(1, 3)).sum().backward()\n"
        "with torch.no_grad(): model.module.weight += 1\n"
        "wrapped = [model]\nweight = model.module.weight\ndist.destroy_process_group()\ndel store"
    )
    names = notebook.names
    assert names["model"] is names["same"] is names["wrapped"][0]
    assert names["weight"] is names["model"].weight
    assert names["model"].weight.grad is not None


def test_another_kernel_reads_the_bundle(notebook: Notebook) -> None:
    notebook.cell(TRAINING)
    notebook.send("train(2)\nfresh = Net()")
    other = Notebook(notebook.home, notebook.ranks, count=notebook.count)
    other.cell(TRAINING.replace("x, y = ", "x, y = 2 * "))
    other.count = notebook.count
    found = other.bring(None)
    assert type(found["model"]) is other.names["Net"]
    assert type(found["fresh"]) is other.names["Net"]
    assert found["model"] is not other.names["model"]
    assert found["optimizer"].param_groups[0]["params"][0] is found["model"].inner.weight
    assert len(found["losses"]) == 2


def test_another_kernel_whose_class_differs_uses_the_jobs(notebook: Notebook) -> None:
    notebook.cell("class A:\n    def go(self): return 'job'\na = A()")
    notebook.send("a.done = True")
    other = Notebook(notebook.home, notebook.ranks, count=notebook.count)
    other.cell("class A:\n    def go(self): return 'here'")
    other.count = notebook.count
    found = other.bring(None)
    assert found["a"].go() == "job"
    assert found["a"].done
    assert "A" in " ".join(found.notes)


def test_globals_set_by_captured_functions_come_back(notebook: Notebook) -> None:
    notebook.cell("count = 0\ndef bump():\n    global count, found\n    count += 1\n    found = 'set'")
    notebook.run("bump()\nbump()")
    assert notebook.names["count"] == 2
    assert notebook.names["found"] == "set"


def test_a_deleted_entry_and_attribute_are_gone_afterwards(notebook: Notebook) -> None:
    notebook.cell("class Box: pass\nbox = Box()\nbox.a, box.b = 1, 2\nd = {'k': 1, 'l': 2}")
    notebook.run("del box.a\ndel d['k']")
    assert vars(notebook.names["box"]) == {"b": 2}
    assert notebook.names["d"] == {"l": 2}


def test_an_object_changed_meanwhile_keeps_what_the_job_did_not_touch(notebook: Notebook) -> None:
    notebook.cell("config = {'lr': 1}\nclass Run: pass\nrun = Run()\nrun.config = config\nrun.log = []")
    captured = notebook.send("run.log.append('job')")
    notebook.names["config"]["lr"] = 2
    notebook.bring(captured)
    assert notebook.names["config"] == {"lr": 2}
    assert notebook.names["run"].log == ["job"]


def test_ranks_by_rank_share_the_classes_of_the_cell(notebook: Notebook) -> None:
    source = "class R:\n    pass\nr = R()"
    captured = notebook.send(source)
    notebook.again(source, rank=1)
    first, second = notebook.bring(captured, 0), notebook.bring(captured, 1)
    assert type(first["r"]) is type(second["r"])


def test_a_lazy_layer_becomes_what_it_became_on_the_rank(notebook: Notebook) -> None:
    notebook.cell("import torch\nmodel = torch.nn.Sequential(torch.nn.LazyLinear(2))\nlayer = model[0]")
    notebook.run("before = model(torch.ones(1, 3)).detach()")
    assert type(notebook.names["layer"]).__name__ == "Linear"
    notebook.cell("assert torch.equal(model(torch.ones(1, 3)), before) and model[0] is layer")


def test_a_parametrized_module_is_trained_and_comes_back(notebook: Notebook) -> None:
    notebook.cell(
        "import torch\nfrom torch.nn.utils import parametrizations\n"
        "model = torch.nn.Sequential(parametrizations.weight_norm(torch.nn.Linear(3, 2)), torch.nn.Tanh())\n"
        "layer = model[0]\nx = torch.ones(1, 3)"
    )
    notebook.run(
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nmodel(x).sum().backward()\noptimizer.step()\n"
        "y = model(x).detach()\nweight = layer.weight.detach()"
    )
    notebook.cell("assert torch.equal(model(x), y) and torch.equal(layer.weight, weight) and model[0] is layer")
    notebook.cell("assert optimizer.param_groups[0]['params'][0] is list(model.parameters())[0]")


def test_a_loader_a_generator_and_a_compiled_model_cross(notebook: Notebook) -> None:
    notebook.cell(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.arange(10.))\ngenerator = torch.Generator().manual_seed(3)\n"
        "loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)\n"
        "model = torch.compile(torch.nn.Linear(1, 1), backend='eager')"
    )
    notebook.run("first = [batch[0] for batch in loader]\ncount = len(list(model.parameters()))")
    assert notebook.names["count"] == 2
    before = notebook.names["generator"].initial_seed()
    notebook.cell("second = [batch[0] for batch in loader]")
    assert before == 3
    reference = torch_order(notebook)
    assert [b.tolist() for b in notebook.names["second"]] == reference


def torch_order(notebook: Notebook) -> list[list[float]]:
    """The second epoch of the same loader, run in one process."""
    notebook.cell(
        "fresh = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))\n"
        "list(fresh)\nwanted = [b[0].tolist() for b in fresh]"
    )
    wanted: list[list[float]] = notebook.names["wanted"]
    return wanted


def test_names_of_a_star_import_come_back(notebook: Notebook) -> None:
    notebook.run("from textwrap import *\nshort = shorten('a b c', 5)")
    assert notebook.names["dedent"]("  x") == "x"


@pytest.mark.gpu
def test_tensors_of_a_gpu_travel_by_way_of_the_cpu(notebook: Notebook) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    notebook.cell("import torch\nw = torch.ones(300_000, device='cuda')\nview = w[:10]")
    captured = notebook.send("assert w.device.type == 'cpu'\nview += 1")
    assert any("cuda:0" in note for note in captured.notes)
    notebook.names.update(notebook.bring(captured))
    assert notebook.names["w"].device.type == "cuda"
    assert notebook.names["w"][:11].tolist() == [2.0] * 10 + [1.0]


def test_a_write_to_an_array_that_shares_memory_is_told(notebook: Notebook) -> None:
    notebook.cell("import numpy as np, torch\na = np.arange(6.0)\nview = a[2:4]\nt = torch.from_numpy(a)\nb = a[::-1]")
    assert notebook.run("a[0] = 5").notes == ()
    assert notebook.names["t"][0] == 5
    for told in (
        "a[0] = 7\nview",
        "a[0] = 7\nview[0] = 8",
        "t[0] = 9\na[1] = 8",
        "b[0] = 3\nview[1] = 1",
        "a\nt[0] = 2",
    ):
        assert any("shares memory with another" in note for note in notebook.run(told).notes), told
    assert notebook.run("a, view, t, b").notes == ()


def test_columns_of_a_table_share_no_memory(notebook: Notebook) -> None:
    notebook.cell("import numpy as np\ntable = np.ones((4, 3))\nx, y = table[:, :2], table[:, 2]")
    assert notebook.run("x -= 1\ny += 1").notes == ()
    assert notebook.names["table"].tolist() == [[0.0, 0.0, 2.0]] * 4


def test_rebuilding_what_was_captured_shows_no_warning(notebook: Notebook) -> None:
    notebook.cell(
        "import warnings\nclass Old:\n    a = 1\n    def __getstate__(self): return {'a': 1}\n"
        "    def __setstate__(self, state): warnings.warn('old')\nold = Old()"
    )
    notebook.send("x = old.a\nmade = Old()")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert notebook.bring(None)["x"] == 1
    assert not caught
