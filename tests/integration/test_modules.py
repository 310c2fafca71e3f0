"""Modules as the notebook has them, on two ranks: what a plain cell sees of them, and leaves in them."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook


@pytest.fixture
def kernel(one_kernel: Notebook) -> Notebook:
    """No test here needs a kernel of its own."""
    return one_kernel


def test_a_module_loaded_by_its_path(kernel: Notebook) -> None:
    (kernel.cwd / "elsewhere").mkdir()
    (kernel.cwd / "elsewhere" / "cfgmod.py").write_text("LR = 0.5\ndef f(x): return x * LR\n")
    kernel.run(
        "import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('cfgmod', 'elsewhere/cfgmod.py')\n"
        "cfg = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(cfg)"
    )
    kernel.run("%%distribute --ranks 2\ncfg.LR = 2.0\nn = cfg.f(3)")
    assert kernel.value("(n, cfg.LR, cfg.f(1))") == (6.0, 2.0, 2.0)


def test_a_module_made_in_the_notebook(kernel: Notebook) -> None:
    kernel.run(
        "import types, sys\ndm = types.ModuleType('td_made')\n"
        "exec('Q = 5\\ndef f(x): return x + Q', dm.__dict__)\nsys.modules['td_made'] = dm"
    )
    kernel.run("%%distribute --ranks 2\nimport td_made\nn = dm.f(3), td_made is dm\ndm.Q = 6")
    assert kernel.value("(n, dm.f(3))") == ((8, True), 9)
    receipt = "[item.what for item in __import__('jupyter_torchdist').last.receipt if item.kind != 'state']"
    assert kernel.value(receipt) == ["td_made with its values"]


def test_an_object_that_looks_itself_up_without_an_end(kernel: Notebook) -> None:
    kernel.run("class Loop:\n    def __getattribute__(self, name): return getattr(self, name)\na = Loop()")
    cell = kernel.try_run("%%distribute --ranks 2\nprint(type(a))")
    assert cell.error
    assert cell.error.name == "CaptureError"
    assert "a: Loop: its __getattribute__ calls itself without end" in cell.text


def test_a_file_that_was_edited_after_its_import(kernel: Notebook) -> None:
    kernel.run("%%writefile td_layers.py\nWIDTH = 3\nclass Block:\n    width = WIDTH")
    kernel.run("from td_layers import Block\nb = Block()")
    kernel.run("%%writefile td_layers.py\nWIDTH = 55\nclass Block:\n    size = WIDTH")
    cell = kernel.run("%%distribute --ranks 2\ns = b.width, Block().width\nfrom td_layers import WIDTH")
    assert kernel.value("(s, WIDTH)") == ((3, 3), 3)
    assert "td_layers.py has changed; the ranks use td_layers as it was imported here" in cell.text
    kernel.run("import importlib, td_layers\nimportlib.reload(td_layers)")
    kernel.run("%%distribute --ranks 2\ns = td_layers.Block.size")
    assert kernel.value("s") == 55


@pytest.mark.parametrize("edit", ["def f(): return 222", "W = 1\ndef f(): return 222"], ids=["in place", "reloaded"])
def test_a_file_that_autoreload_has_loaded_again(kernel: Notebook, edit: str) -> None:
    name = f"td_auto{len(edit)}"
    (kernel.cwd / f"{name}.py").write_text("def f(): return 1")
    kernel.run(f"%load_ext autoreload\n%autoreload 2\nimport {name} as m")
    (kernel.cwd / f"{name}.py").write_text(edit)
    try:
        kernel.run("%%distribute --ranks 2\na = m.f()")
        assert kernel.value("(a, m.f())") == (222, 222)
    finally:
        kernel.run("%autoreload 0")


def test_what_cells_set_on_modules(kernel: Notebook) -> None:
    kernel.run("%%writefile td_conf.py\nBATCH = 32\nSEEN = []\ndef f(n):\n    SEEN.append(n)\n    return n // BATCH")
    kernel.run("import td_conf, math, torch, torch.nn.functional as F, jupyter_torchdist as td")
    kernel.run(
        "def gelu(x): return x * 100\nF.gelu = gelu\nmath.tau2 = 12\nsetattr(td_conf, 'BATCH', 64)\ntd_conf.f(1)"
    )
    kernel.run("torch.nn.Linear.extra = lambda self: 'patched'")
    kernel.run(
        "%%distribute --ranks 2\na = F.gelu(torch.ones(1)).item(), math.tau2, torch.nn.Linear(1, 1).extra()\n"
        "n = td_conf.f(640)\ntd_conf.BATCH = 16\nmath.tau3 = 13\ndel math.tau2"
    )
    after = "(a, n, td_conf.BATCH, td_conf.SEEN, math.tau3, hasattr(math, 'tau2'))"
    assert kernel.value(after) == ((100.0, 12, "patched"), 10, 16, [1, 640], 13, False)
    assert kernel.value("F.gelu is gelu")
    names = kernel.value("[item.name for item in td.last.receipt]")
    assert {"td_conf.BATCH", "td_conf.SEEN", "math.tau2", "torch.nn.functional.gelu"} <= set(names)
    kernel.run("%%distribute --ranks 2 --out n\nn = td_conf.BATCH\ntd_conf.BATCH = 17")
    assert kernel.value("(n, td_conf.BATCH)") == (16, 17)
    kernel.run("%%distribute --ranks 2 --collect all\nn = td_conf.BATCH\ntd_conf.BATCH += 1")
    assert kernel.value("(n, td_conf.BATCH)") == ([17, 17], 18)
    kernel.run("%%distribute --ranks 2 --out none\ntd_conf.BATCH = 99")
    assert kernel.value("td_conf.BATCH") == 18
    kernel.run("def g():\n    td_conf.BATCH += 1\n    return td_conf.BATCH\nr = td.launch(g, ranks=2)")
    assert kernel.value("(r, td_conf.BATCH)") == ([19, 19], 19)
    both = "torch.distributed.barrier()"  # the first rank that fails stops the other
    cell = kernel.try_run(f"%%distribute --ranks 2\ntd_conf.BATCH = 20\n{both}\n1 / 0")
    assert cell.error
    assert kernel.value("td_conf.BATCH") == 20


def test_what_cells_set_acts_with_a_strategy(kernel: Notebook) -> None:
    kernel.run(
        "import torch, torch.nn.functional as F\nold_loss, old_call = F.mse_loss, torch.nn.Module.__call__\n"
        "def loss(a, b): return old_loss(a, b) * 3\nF.mse_loss = loss\ntorch.manual_seed(0)\n"
        "model = torch.nn.Linear(2, 1)\nx, y = torch.randn(8, 2), torch.randn(8, 1)\n"
        "def step(m):\n    o = torch.optim.SGD(m.parameters(), 0.1)\n    l = F.mse_loss(m(x), y)\n    l.backward()\n"
        "    o.step()\n    return l.item()\n"
        "import copy\nother = copy.deepcopy(model)\nplain = step(other)"
    )
    kernel.run("%%distribute --ranks 2 --strategy ddp\nvalue = step(model)")
    assert kernel.value("abs(value - plain) < 1e-5 and torch.allclose(model.weight, other.weight, atol=1e-5)")
    kernel.run("def call(self, *a, **k):\n    return old_call(self, *a, **k)\ntorch.nn.Module.__call__ = call")
    try:
        cell = kernel.run("%%distribute --ranks 2 --strategy ddp\nvalue = step(model)")
        name = "torch.nn.modules.module.Module.__call__"
        assert f"{name} differs from the notebook: the strategy uses its own value there" in cell.text
        assert kernel.value("torch.nn.Module.__call__ is call")
    finally:
        kernel.run("torch.nn.Module.__call__ = old_call\nF.mse_loss = old_loss")
