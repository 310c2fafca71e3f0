"""What cells set on modules, and what local modules hold, is on a rank as in the notebook, and back afterwards."""

from __future__ import annotations

import ast
import builtins
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jupyter_torchdist.capture.touched import Kind, Touch, facts
from tests import crossing
from tests.crossing import Notebook

ranks, notebook = crossing.ranks, crossing.notebook

SETTINGS = """
BATCH = 32
HISTORY = []
CONFIG = {"lr": 1}
COUNT = 0
CACHE = None
NAMES = ("a", "b")
class Options:
    epochs = 1
    @staticmethod
    def double(x): return 2 * x
OPTIONS = Options()
def batches(n):
    global COUNT, CACHE
    HISTORY.append(n)
    COUNT += 1
    CACHE = [n]
    return n // BATCH
def lr(): return CONFIG["lr"]
"""
LOGS = """
import threading
from collections import defaultdict
LOCKS = [threading.Lock()]
LINES = []
RATES: dict = {"lr": 0.1}
BY_NAME = defaultdict(list)
def log(line, write=LINES.append): write(line)
def rate(key, value, table=RATES): table[key] = value
def count(name): BY_NAME[name].append(1)
def shown(): return [*LINES], dict(RATES), dict(BY_NAME), LINES.copy() and RATES.get("lr")
"""
TOUCHED = (torch, torch.nn.functional, torch.nn.Linear, math, builtins, sys)
USER = """
import td_settings
from td_settings import HISTORY as seen
import torch.nn.functional as F
def configure(): td_settings.BATCH = 8
def patch(): F.celu = mine
def mine(x, **_): return x * 1000
def note(x): seen.append(x)
"""


@pytest.fixture
def kernel(notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """A notebook with a history, and two modules of its own. What its cells do to torch is taken back."""
    (tmp_path / "td_settings.py").write_text(SETTINGS)
    (tmp_path / "td_user.py").write_text(USER)
    (tmp_path / "td_logs.py").write_text(LOGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = [(owner, dict(vars(owner))) for owner in TOUCHED]
    notebook.names["In"] = [""]
    yield notebook
    for owner, names in before:
        for name in [name for name in vars(owner) if name not in names]:
            delattr(owner, name)
        for name in [name for name in names if vars(owner)[name] is not names[name]]:
            setattr(owner, name, names[name])
    for name in ("td_settings", "td_user", "td_logs"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def after(kernel: Notebook, *cells: str) -> Notebook:
    for source in cells:
        kernel.names["In"].append(source)
        kernel.cell(source)
    return kernel


def receipt(kernel: Notebook) -> dict[str, str]:
    assert kernel.captured
    return {item.name: item.what for item in kernel.captured.receipt}


WRAPS = """
import torch.nn.functional as F, functools
old = F.relu
@functools.wraps(old)
def mine(x, **k): return old(x) * 3
F.relu = mine
"""
S = "import td_settings"
SET = [
    (S + "\ntd_settings.BATCH = 64", "a = td_settings.batches(640)", 10),
    ("import td_settings as s\nsetattr(s, 'BATCH', 64)", "a = s.batches(640)", 10),
    (S + "\nfor td_settings.BATCH in (1, 64): pass", "a = td_settings.batches(640)", 10),
    (S + "\ndef f():\n    import td_settings as t\n    t.BATCH += 32\nf()", "a = td_settings.BATCH", 64),
    (S + "\nget_ipython = None\ntd_settings.BATCH = 64", "from td_settings import BATCH as a", 64),
    (S + "\ndel td_settings.BATCH", "a = hasattr(td_settings, 'BATCH')", False),
    (S + "\ntd_settings._private = 5", "a = td_settings._private", 5),
    (S + "\ntd_settings.Options.epochs = 9", "a = td_settings.Options().epochs", 9),
    (S + "\ntd_settings.OPTIONS.epochs = 9", "a = td_settings.OPTIONS.epochs", 9),
    (S + "\ntd_settings.CONFIG['lr'] = 7", "a = td_settings.lr()", 7),
    (S + "\nfrom td_settings import CONFIG\nCONFIG['lr'] = 7", "a = td_settings.lr()", 7),
    (S + "\nfrom td_settings import CONFIG\nCONFIG['lr'] = 7", "CONFIG['lr'] = 8\na = td_settings.lr()", 8),
    ("import td_settings, td_user\ntd_user.configure()", "a = td_settings.BATCH", 8),
    ("import td_settings, td_user\ntd_user.note(4)", "td_user.note(5)\na = td_settings.HISTORY", [4, 5]),
    (S + "\ntd_settings.batches(64)", "td_settings.batches(3)\na = td_settings.COUNT", 2),
    (S + "\ntd_settings.batches(64)", "a = td_settings.CACHE", [64]),
    (S + "\ntd_settings.f = lambda x: x + k\nk = 2", "a = td_settings.f(1)", 3),
    (S + "\ntd_settings.BATCH = 64\nimport importlib\nimportlib.reload(td_settings)", "a = td_settings.BATCH", 32),
    ("import td_user\ntd_user.patch()", "import torch\na = torch.nn.functional.celu(torch.ones(1)).item()", 1000),
    ("import math\nmath.tau2 = 12", "import math\na = math.tau2", 12),
    ("import math\nold = math.sqrt\nmath.sqrt = lambda x: old(x) + 1", "a = math.sqrt(4)", 3),
    ("import torch\nold = torch.relu\ntorch.relu = lambda x: old(x) + 1", "a = torch.relu(torch.ones(1)).item()", 2),
    (
        WRAPS,
        "import torch\na = torch.nn.ReLU()(torch.ones(1)).item(), F.relu is mine",
        (3.0, True),
    ),
    ("import torch\ntorch.nn.Linear.extra = lambda self: 'patched'", "a = torch.nn.Linear(1, 1).extra()", "patched"),
    ("import torch\ntorch.nn.Linear.extra = staticmethod(lambda: 'one')", "a = torch.nn.Linear.extra()", "one"),
    ("import torch\ntorch.nn.Linear.extra = property(lambda s: s.in_features)", "a = torch.nn.Linear(3, 1).extra", 3),
    ("import builtins\nbuiltins.td_shout = lambda text: text.upper()", "a = td_shout('a')", "A"),
    ("import sys\nsys.argv = ['train', '--lr', '1']", "import sys\na = sys.argv[1:]", ["--lr", "1"]),
    (
        "import torch\nclass Old: pass\ntorch.td_new = Old\nx = Old()",
        "a = type(x) is torch.td_new, torch.td_new is Old",
        (True, True),
    ),
    ("get_ipython().run_cell_magic('time', '', 'import math\\nmath.tau2 = 3')", "import math\na = math.tau2", 3),
]  # fmt: skip


@pytest.mark.parametrize(("cell", "under", "value"), SET, ids=[cell[:45] for cell, *_ in SET])
def test_what_a_cell_set(kernel: Notebook, cell: str, under: str, value: Any) -> None:
    if cell.startswith("get_ipython"):
        kernel.names["In"].append(cell)
        math.tau2 = 3  # type: ignore[attr-defined]
    else:
        after(kernel, cell)
    found = kernel.run(under)
    assert kernel.answer["notes"] == []
    assert found["a"] == value


BACK = [
    ("td_settings.BATCH = 16", "td_settings.BATCH", 16),
    ("td_settings.new = [1]", "td_settings.new", [1]),
    ("del td_settings.BATCH", "hasattr(td_settings, 'BATCH')", False),
    ("td_settings.batches(96)", "(td_settings.HISTORY, td_settings.COUNT, td_settings.CACHE)", ([64, 96], 2, [96])),
    ("td_settings.batches(96)", "seen is td_settings.HISTORY and seen == [64, 96]", True),
    ("td_settings.CONFIG['lr'] = 3", "td_settings.lr()", 3),
    ("td_settings.OPTIONS.epochs = 3", "td_settings.OPTIONS.epochs", 3),
    ("td_settings.OPTIONS = td_settings.Options()\ntd_settings.OPTIONS.epochs = 4", "td_settings.OPTIONS.epochs", 4),
    ("td_settings.Options.epochs = 3", "td_settings.OPTIONS.epochs", 3),
    ("td_settings.hook = lambda: 5", "td_settings.hook()", 5),
    ("import torch.nn.functional as F\nF.celu = lambda x: 5", "torch.nn.functional.celu(1)", 5),
    ("torch.td_new = torch.ones(2)", "torch.td_new.tolist()", [1.0, 1.0]),
    ("def f():\n    import td_settings as t\n    t.BATCH = 2\nf()", "td_settings.BATCH", 2),
    ("for name in ('x', 'y'): pass\nsetattr(td_settings, 'BATCH', name)", "td_settings.BATCH", "y"),
    ("import importlib\nimportlib.reload(td_settings)\ntd_settings.BATCH += 1", "td_settings.BATCH", 33),
]


@pytest.mark.parametrize(("under", "expression", "value"), BACK)
def test_what_the_cell_on_the_ranks_sets(kernel: Notebook, under: str, expression: str, value: Any) -> None:
    after(kernel, "import torch, td_settings\nfrom td_settings import HISTORY as seen\ntd_settings.batches(64)")
    kernel.run(under)
    assert eval(expression, kernel.names) == value
    assert not [name for name in kernel.names if ":" in name]


def test_two_cells_one_after_the_other(kernel: Notebook) -> None:
    after(kernel, "import td_settings")
    for number in (1, 2, 3):
        source = f"td_settings.BATCH += 1\ntd_settings.HISTORY.append({number})\na = td_settings.BATCH"
        kernel.names["In"].append(f"get_ipython().run_cell_magic('distribute', '--ranks 2', {source!r})")
        assert kernel.run(source)["a"] == 32 + number
    assert (kernel.names["td_settings"].BATCH, kernel.names["td_settings"].HISTORY) == (35, [1, 2, 3])


def test_the_receipt_names_them_and_no_others(kernel: Notebook) -> None:
    after(kernel, "import td_settings, torch, math\ntd_settings.BATCH = 64\nmath.tau2 = 12")
    after(kernel, "def never(): torch.nn.functional.relu = 5")
    kernel.run("a = td_settings.BATCH")
    assert receipt(kernel) == {
        "td_settings": "td_settings as import",
        "td_settings.BATCH": "int 64",
        "td_settings.HISTORY": "list of 0",
        "td_settings.COUNT": "int 0",
        "td_settings.CACHE": "NoneType None",
        "math.tau2": "int 12",
    }
    kernel.run("b = 1")
    assert receipt(kernel) == {"math.tau2": "int 12"}


def test_an_attribute_is_the_object_that_a_name_is(kernel: Notebook) -> None:
    after(kernel, "import td_settings, torch\nmodel = torch.nn.Linear(1, 1)\ntd_settings.MODEL = model")
    kernel.run("same = td_settings.MODEL is model\nmodel.weight.data.fill_(5)")
    assert kernel.names["same"]
    assert kernel.names["td_settings"].MODEL is kernel.names["model"]
    assert kernel.names["td_settings"].MODEL.weight.item() == 5


def test_containers_stay_those_that_their_module_gave_away(kernel: Notebook) -> None:
    """As default arguments, on the ranks and in the notebook; also when they are not as the import made them."""
    after(kernel, "import td_logs")
    logs = sys.modules["td_logs"]
    under = "td_logs.log('{0}')\ntd_logs.rate('{0}', 2)\ntd_logs.count('{0}')\nshown = td_logs.shown()"
    for name in "ab":
        kernel.run(under.format(name))
        logs.log(name.upper())
        logs.rate("lr", name)
    assert kernel.names["shown"] == (["a", "A", "b"], {"lr": "a", "a": 2, "b": 2}, {"a": [1], "b": [1]}, "a")
    assert logs.shown() == (["a", "A", "b", "B"], {"lr": "b", "a": 2, "b": 2}, {"a": [1], "b": [1]}, "b")


def test_what_is_in_a_container_comes_back_as_the_object_that_it_is(kernel: Notebook) -> None:
    after(kernel, "import td_logs\ntd_logs.count('a')\nones = td_logs.BY_NAME['a']")
    before = kernel.names["td_logs"].BY_NAME
    kernel.run("td_logs.BY_NAME['a'].append(2)")
    assert kernel.names["td_logs"].BY_NAME is before and before["a"] is kernel.names["ones"] == [1, 2]
    kernel.run("same = td_logs.BY_NAME['a'] is ones")
    assert kernel.names["same"]


def test_a_container_that_an_object_has_too_is_one_object(kernel: Notebook) -> None:
    after(kernel, "import td_logs\nclass Box: pass\nbox = Box()\nbox.lines = td_logs.LINES")
    after(kernel, "td_logs.HOLDER = Box()\ntd_logs.HOLDER.rates = td_logs.RATES")
    kernel.run("same = box.lines is td_logs.LINES, td_logs.HOLDER.rates is td_logs.RATES\ntd_logs.LINES.append(3)")
    assert kernel.names["same"] == (True, True)
    assert kernel.names["box"].lines is kernel.names["td_logs"].LINES
    assert kernel.names["box"].lines == [3]


def test_a_container_that_cannot_be_copied_is_set_all_the_same(kernel: Notebook) -> None:
    after(kernel, "import td_logs")
    kernel.run("a = len(td_logs.LOCKS)\ntd_logs.LOCKS = [1, 2]")
    assert kernel.answer["notes"] == []
    assert (kernel.names["a"], kernel.names["td_logs"].LOCKS) == (1, [1, 2])


def test_a_container_that_the_notebook_has_too_is_one_object(kernel: Notebook) -> None:
    after(kernel, "import td_logs\nfrom td_logs import LINES")
    kernel.run("LINES.append(1)\nshown = td_logs.LINES is LINES, td_logs.shown()[0]")
    assert kernel.names["shown"] == (True, [1])
    assert kernel.names["td_logs"].LINES is kernel.names["LINES"]


def test_what_cannot_be_pickled_stays_with_a_note(kernel: Notebook) -> None:
    after(kernel, "import td_settings, threading\ntd_settings.LOCK = threading.Lock()\ntd_settings.BATCH = 64")
    captured = kernel.send("a = td_settings.BATCH, hasattr(td_settings, 'LOCK')")
    assert kernel.bring(captured)["a"] == (64, False)
    said = "LOCK: _thread.lock: cannot pickle '_thread.lock' object; the ranks get its module's value"
    assert captured.notes == (f"td_settings.{said}",)
    assert kernel.names["td_settings"].LOCK is not None


def test_it_can_be_left_behind(kernel: Notebook) -> None:
    after(kernel, "import td_settings\ntd_settings.BATCH = 64")
    captured = kernel.capture("a = td_settings.BATCH", exclude=["td_settings.BATCH"])
    kernel.launch(captured, "a = td_settings.BATCH")
    assert kernel.bring(captured)["a"] == 32


def test_modules_that_nothing_needs_stay(kernel: Notebook) -> None:
    after(kernel, "import td_settings\ntd_settings.BATCH = 64")
    captured = kernel.capture("a = 1")
    assert (captured.receipt, captured.sources) == ((), {})


def test_what_is_set_on_the_kernels_own_stays(kernel: Notebook) -> None:
    after(kernel, "from IPython.core.interactiveshell import InteractiveShell as S\nimport sys")
    after(kernel, "S.td_x = 1\nsys.td_y = 2\ndel S.td_x, sys.td_y", "S.td_x = sys.td_y = 3")
    try:
        assert kernel.capture("a = 1").receipt == ()
    finally:
        del kernel.names["S"].td_x


def test_what_texts_touch() -> None:
    found = facts("import a.b as c\nc.d.e = 1\nx.y[0].z = 2\ndel x.w\nsetattr(x, 'v', 1)\nx.u.append(1)\nf().g = 1\n")
    assert found.touches == {
        Touch(("c", "d", "e"), Kind.SET, "a.b"),
        Touch(("x", "y"), Kind.CHANGED),
        Touch(("x", "w"), Kind.DELETED),
        Touch(("x", "v"), Kind.SET),
        Touch(("x", "u"), Kind.CALLED),
    }
    assert facts("x.y = = 1").touches == frozenset()
    assert facts("%%bash\nx.y=1").touches == frozenset()


def test_cells_of_a_long_history_are_parsed_once(kernel: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        f"x{n} = model(batch{n})\nloss{n} = criterion(x{n}, y)\nloss{n}.backward()\noptimizer.step()\n"
        f"log[{n}] = loss{n}.item()\nfig, ax = plt.subplots()\nax.plot(log)\nax.set_title('{n}')\n"
        f"torch.nn.functional.relu(x{n})\nself.x{n} = 1"
        for n in range(300)
    ]
    after(kernel, "import torch, math\nmath.tau2 = 1")
    kernel.names["In"] += cells
    kernel.names.update({f"x{n}": [n] for n in range(300)})
    parsed: list[Any] = []
    parse = ast.parse

    def noted(text: Any, *words: Any, **named: Any) -> Any:
        parsed.append(text)
        return parse(text, *words, **named)

    monkeypatch.setattr(ast, "parse", noted)
    kernel.capture("a = 1")
    assert set(cells) <= set(parsed)
    parsed.clear()
    kernel.capture("a = 1")
    assert not set(cells) & set(parsed)


@pytest.mark.parametrize("name", ["SimpleNamespace", "nothing"])
def test_what_is_set_in_a_module_that_is_not_loaded(kernel: Notebook, name: str) -> None:
    """The import would fail if the function were called."""
    after(
        kernel,
        f"def f():\n    from td_nowhere import {name}\n    {name}.x = 1\n    import coroutine\n    coroutine.y = 2\n",
    )
    kernel.run("f")
    assert "error" not in kernel.answer, kernel.answer
