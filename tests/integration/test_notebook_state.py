"""Random numbers and settings of the notebook act in ranks as in a plain cell, and what a cell changes is there after.

One kernel for each test: what is looked at is the state of its process.
"""

from __future__ import annotations

from tests.notebook import Notebook

SEEDED = """
import random
import numpy as np
import torch
from torch import nn
torch.manual_seed(0); np.random.seed(0); random.seed(0)
torch.set_default_dtype(torch.float64)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
"""
TRAINING = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for x, y in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
    loss = ((model(x) - y) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(round(loss.item(), 10))
told = losses, str(model[0].weight.dtype), np.random.rand(), random.random(), torch.rand(2).tolist()
"""
DRAWN = "(np.random.rand(), random.random(), torch.rand(2).tolist())"


def test_a_seed_in_the_first_cell_decides_what_a_strategy_trains(kernel: Notebook) -> None:
    kernel.run(SEEDED)
    kernel.run(TRAINING)
    plain = kernel.value("told")
    kernel.run(TRAINING)
    again = kernel.value("told"), kernel.value(DRAWN)
    kernel.run(SEEDED)
    kernel.run(f"%%distribute --ranks 2 --strategy ddp --name once\n{TRAINING}")
    assert kernel.value("told") == plain
    assert "the first steps were proved in" in kernel.run("%dist show once").text
    kernel.run(f"%%distribute --ranks 2 --strategy ddp\n{TRAINING}")
    assert (kernel.value("told"), kernel.value(DRAWN)) == again


def test_ranks_draw_alike_only_what_the_notebook_seeded(kernel: Notebook) -> None:
    kernel.run("import random, numpy as np, torch")
    draw = f"%%distribute --ranks 2 --collect all\ndrawn = list({DRAWN})"
    kernel.run(draw)
    one, other = kernel.value("drawn")
    assert all(left != right for left, right in zip(one, other, strict=True))
    kernel.run("torch.manual_seed(3)")
    kernel.run(draw)
    one, other = kernel.value("drawn")
    assert [left == right for left, right in zip(one, other, strict=True)] == [False, False, True]
    first = kernel.value("torch.manual_seed(3) and torch.rand(2).tolist()")
    kernel.run("torch.manual_seed(3)")
    kernel.run(draw)
    kernel.run("following = torch.rand(2).tolist()")
    assert one[2] == first == kernel.value("drawn")[0][2]
    assert kernel.value("torch.manual_seed(3) and torch.rand(4).tolist()[2:]") == kernel.value("following")


def test_a_seed_in_the_cell_is_the_notebooks(kernel: Notebook) -> None:
    kernel.run("import random")
    kernel.run("%%distribute --ranks 2\nrandom.seed(7)\nx = random.random()")
    assert kernel.value("random.random()") == kernel.value("[random.seed(7), random.random(), random.random()][2]")


def test_settings_of_torch_act_in_ranks_and_come_back(kernel: Notebook) -> None:
    kernel.run("import torch\ntorch.set_printoptions(precision=2)\ntorch.set_grad_enabled(False)")
    told = kernel.run("%%distribute --ranks 2 --plan\ntorch.rand(1)").text
    assert "torch settings" in told and "grad mode False, print options" in told
    kernel.run(
        "%%distribute --ranks 2\n"
        "text, grad = str(torch.tensor(1 / 3)), torch.is_grad_enabled()\n"
        "torch.set_default_dtype(torch.float64)\n"
        "torch.use_deterministic_algorithms(True)\n"
    )
    assert kernel.value("[text, grad]") == ["tensor(0.33)", False]
    assert kernel.value("str(torch.get_default_dtype())") == "torch.float64"
    assert kernel.value("torch.are_deterministic_algorithms_enabled()") is True


def test_a_function_starts_from_the_notebooks_numbers(kernel: Notebook) -> None:
    kernel.run(
        "import torch, jupyter_torchdist as td\ntorch.manual_seed(5)\ndef draw():\n    return torch.rand(2).tolist()"
    )
    kernel.run("one, two = td.launch(draw, ranks=2)\nthree = draw()")
    kernel.run("torch.manual_seed(5)\nplain = [draw(), draw(), draw()]")
    assert kernel.value("[one, two, three]") == [kernel.value(f"plain[{number}]") for number in (0, 0, 1)]


def test_a_rank_that_is_stopped_in_a_with_block_leaves_the_settings_as_they_were(kernel: Notebook) -> None:
    kernel.run("import torch, torch.distributed as dist, time")
    cell = kernel.try_run(
        "%%distribute --ranks 2\n"
        "with torch.no_grad():\n"
        "    told = 'reached'\n"
        "    dist.barrier()\n"
        "    if dist.get_rank() == 1:\n"
        "        raise ValueError('of rank 1')\n"
        "    time.sleep(60)\n"
    )
    assert cell.error and cell.error.name == "ValueError"
    assert kernel.value("[told, torch.is_grad_enabled()]") == ["reached", True]


def test_out_none_leaves_the_notebook_as_it_is(kernel: Notebook) -> None:
    kernel.run("import torch\ntorch.manual_seed(5)")
    kernel.run("%%distribute --ranks 1 --out none\ntorch.rand(1)\ntorch.set_default_dtype(torch.float64)")
    assert kernel.value("str(torch.get_default_dtype())") == "torch.float32"
    assert kernel.value("torch.rand(2).tolist()") == kernel.value("torch.manual_seed(5) and torch.rand(2).tolist()")


def test_loggers_and_filters_of_the_notebook_act_in_ranks(kernel: Notebook) -> None:
    kernel.run(
        "import logging, queue, sys, warnings\n"
        "from logging.handlers import QueueHandler\n"
        "logging.basicConfig(level=logging.INFO, format='<%(name)s %(message)s>', stream=sys.stdout, force=True)\n"
        "own = logging.getLogger('own')\n"
        "own.setLevel(logging.DEBUG)\n"
        "own.addHandler(logging.StreamHandler(sys.stdout))\n"
        "own.addHandler(QueueHandler(queue.Queue()))\n"
        "own.propagate = False\n"
        "class Secret(logging.Filter):\n"
        "    def filter(self, record):\n"
        "        return record.msg != hidden\n"
        "hidden = 'secret'\n"
        "own.addFilter(Secret())\n"
        "own.handlers[0].addFilter(Secret())\n"
        "warnings.filterwarnings('error', message='no.*')\n"
    )
    cell = kernel.run(
        "%%distribute --ranks 2 --watch text\n"
        "own.debug('mine')\n"
        "own.debug('secret')\n"
        "logging.getLogger('other').info('its')\n"
        "try:\n"
        "    warnings.warn('no way')\n"
        "except UserWarning as error:\n"
        "    raised = str(error)\n"
        "own.setLevel(logging.ERROR)\n"
        "logging.getLogger('other').addHandler(logging.StreamHandler(sys.stdout))\n"
        "warnings.simplefilter('ignore')\n"
    )
    for rank in (0, 1):
        assert f"[rank {rank}] mine\n" in cell.stdout and f"[rank {rank}] <other its>\n" in cell.stdout
    assert "secret" not in cell.stdout and "QueueHandler" in cell.text
    assert kernel.value("[raised, own.level, len(own.handlers)]") == ["no way", 40, 2]
    assert kernel.value("[type(one).__name__ for one in logging.getLogger('other').handlers]") == ["StreamHandler"]
    assert kernel.value("warnings.filters[0][0]") == "ignore"
    assert kernel.run("logging.getLogger('other').info('again')").stdout.count("again") == 2


def test_settings_of_python_and_libraries_act_in_ranks(kernel: Notebook) -> None:
    kernel.run(
        "import decimal, sys\n"
        "import matplotlib, numpy as np, pandas as pd\n"
        "from tqdm.auto import tqdm\n"
        "decimal.getcontext().prec = 4\n"
        "sys.setrecursionlimit(1234)\n"
        "np.set_printoptions(precision=2)\n"
        "np.seterr(divide='raise')\n"
        "matplotlib.rcParams['figure.figsize'] = (9.0, 3.0)\n"
        "pd.set_option('display.max_rows', 7)\n"
        "tqdm.pandas(desc='rows')\n"
        "@pd.api.extensions.register_dataframe_accessor('mine')\n"
        "class Mine:\n"
        "    def __init__(self, frame):\n"
        "        self.frame = frame\n"
        "    def total(self):\n"
        "        return int(self.frame.to_numpy().sum()) * factor\n"
        "factor = 10\n"
    )
    kernel.run(
        "%%distribute --ranks 2\n"
        "found = [\n"
        "    str(decimal.Decimal(1) / 3), sys.getrecursionlimit(), str(np.array([1 / 3])), np.geterr()['divide'],\n"
        "    list(matplotlib.rcParams['figure.figsize']), pd.get_option('display.max_rows'),\n"
        "    pd.DataFrame({'a': [1, 2]}).mine.total(),\n"
        "    int(pd.DataFrame({'a': [1, 2]}).progress_apply(lambda column: column.sum()).a),\n"
        "]\n"
        "decimal.getcontext().prec = 6\n"
        "np.seterr(divide='ignore')\n"
        "matplotlib.rcParams['lines.linewidth'] = 5.0\n"
        "pd.set_option('display.max_rows', 9)\n"
    )
    assert kernel.value("found") == ["0.3333", 1234, "[0.33]", "raise", [9.0, 3.0], 7, 30, 3]
    told = "[decimal.getcontext().prec, np.geterr()['divide'], matplotlib.rcParams['lines.linewidth']]"
    assert kernel.value(told) == [6, "ignore", 5.0]
    assert kernel.value("[pd.get_option('display.max_rows'), pd.DataFrame.mine is Mine]") == [9, True]


OPERATORS = """
import numpy as np
import torch, jupyter_torchdist as td
from torch import Tensor
factor = 1.0

@torch.library.custom_op("td_mine::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.detach().float().numpy())) * factor

@torch.library.custom_op("td_mine::cosine", mutates_args=(), device_types="cpu")
def cosine(x: Tensor) -> Tensor:
    return torch.from_numpy(np.cos(x.detach().numpy()))

sine.register_autograd(
    lambda ctx, grad: grad * torch.ops.td_mine.cosine(ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
cosine.register_autograd(
    lambda ctx, grad: -grad * sine(ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
sine.register_fake(torch.empty_like)
sine.register_vmap(lambda info, dims, x: (sine(x), dims[0]))
torch.library.register_autocast("td_mine::sine", "cpu", torch.bfloat16)

@torch.library.custom_op("td_mine::halve", mutates_args={"x"}, tags=[torch.Tag.needs_fixed_stride_order])
def halve(x: Tensor, times: int = 1) -> None:
    x.div_(2**times)
"""
USING = """
x = torch.arange(3.0, requires_grad=True)
(grad,) = torch.autograd.grad(torch.ops.td_mine.sine(x).sum(), x, create_graph=True)
(second,) = torch.autograd.grad(grad.sum(), x)
y = torch.ones(2)
torch.ops.td_mine.halve(y, 2)
found = [
    sine(x).tolist(), grad.tolist(), second.tolist(), y.tolist(),
    torch.vmap(sine)(torch.ones(2, 2)).tolist(), list(sine(torch.ones(2, device="meta")).shape),
    str(torch.autocast("cpu") and torch.ops.td_mine.halve.default._schema),
    sorted(tag.name for tag in torch.ops.td_mine.halve.default.tags),
]
with torch.autocast("cpu", dtype=torch.bfloat16):
    found.append(sine(torch.tensor([0.3])).tolist())
"""


def test_operators_of_the_notebook_act_in_ranks_and_come_back(kernel: Notebook) -> None:
    kernel.run(OPERATORS)
    kernel.run(USING)
    plain = kernel.value("found")
    cell = kernel.run(f"%%distribute --ranks 2\n{USING}\nfactor = 2.0")
    assert kernel.value("found") == plain
    assert kernel.value("round(sine(torch.ones(1)).item() / float(np.sin(1.0)), 4)") == 2.0
    receipt = kernel.value("[item.what for item in td.last.receipt if item.name == 'torch operators']")
    assert receipt == ["td_mine::sine, td_mine::cosine, td_mine::halve"], cell.text
    kernel.run(
        "%%distribute --ranks 2\n"
        "@torch.library.custom_op('td_mine::triple', mutates_args=())\n"
        "def triple(x: Tensor) -> Tensor:\n"
        "    return x * 3 * factor\n"
        "a = triple(torch.ones(1)).item()"
    )
    after = "[a, triple(torch.ones(1)).item(), torch.ops.td_mine.triple(torch.ones(1)).item()]"
    assert kernel.value(after) == [6.0, 6.0, 6.0]
    kernel.run("%%distribute --ranks 2 --strategy ddp\na = torch.ops.td_mine.triple(torch.ones(1)).item()")
    assert kernel.value("a") == 6.0


def test_an_operator_of_a_local_module_is_imported_on_the_ranks(kernel: Notebook) -> None:
    (kernel.cwd / "td_operators.py").write_text(
        "import torch\n@torch.library.custom_op('td_local::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
    )
    kernel.run("import torch\nfrom td_operators import twice")
    kernel.run(
        "%%distribute --ranks 2\na = twice(torch.ones(1)).item(), torch.ops.td_local.twice(torch.ones(1)).item()"
    )
    assert kernel.value("a") == (2.0, 2.0)


def test_a_library_of_operators_stays_with_a_reason(kernel: Notebook) -> None:
    kernel.run("import torch\nlibrary = torch.library.Library('td_own', 'DEF')")
    cell = kernel.try_run("%%distribute --ranks 2\nprint(library)")
    assert cell.error and cell.error.name == "CaptureError"
    assert "library: torch.library.Library: its operators belong to this process; use custom_op" in cell.text
