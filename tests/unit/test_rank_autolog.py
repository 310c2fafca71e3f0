"""Names and values of the curves nobody asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.ranks import execution
from jupyter_torchdist.ranks.autolog import Autolog, loss_name
from jupyter_torchdist.ranks.batches import Batches
from jupyter_torchdist.ranks.streams.metrics import Recorder
from jupyter_torchdist.torch_private import training
from jupyter_torchdist.usercode.frames import is_users
from jupyter_torchdist.usercode.source import remember_cell


@pytest.mark.parametrize(
    ("line", "direct", "name"),
    [
        ("loss.backward()", True, "loss"),
        ("d_loss.backward(retain_graph=True)", True, "d_loss"),
        ("(loss / accumulate).backward()", True, "loss / accumulate"),
        ("self.loss.backward()", True, "loss"),
        ("losses['g'].backward()", True, "losses['g']"),
        ("criterion(model(x), y).backward()", True, "criterion"),
        ("F.cross_entropy(model(x), y).backward()", True, "F.cross_entropy"),
        ("scaler.scale(g_loss).backward()", True, "g_loss"),
        ("scaler.scale(loss / 4).backward()", True, "loss / 4"),
        ("accelerator.backward(loss)", False, "loss"),
        ("fabric.backward(out.loss)", False, "out.loss"),
        ("trainer.fit(model)", False, "loss"),
        ("(first_term + second_term * weight_of_it + third_term * another_weight).backward()", True, "first_term"),
    ],
)
def test_names(line: str, direct: bool, name: str) -> None:
    remember_cell(f"x = 1\n{line}\n", "Cell In[31]", 2)
    assert loss_name("Cell In[31]", 3, direct=direct) == name


def test_a_source_that_is_not_there() -> None:
    assert loss_name("nowhere.py", 3) == "loss"
    remember_cell("this is not python\n", "Cell In[32]", 2)
    assert loss_name("Cell In[32]", 2) == "loss"


@pytest.mark.parametrize(
    "library",
    [
        torch.nn.__file__,
        pytest.__file__,
        "/home/ada/.local/lib/python3.11/site-packages/sympy/core/sympify.py",
        "/usr/lib/python3/dist-packages/numpy/__init__.py",
        "/opt/base-of-a-virtual-environment/lib/python3.11/site-packages/sympy/core/sympify.py",
    ],
)
def test_libraries_are_not_the_users(library: str) -> None:
    assert not is_users(library)


@pytest.mark.parametrize("own", ["Cell In[3]", "/elsewhere/my-site-packages/train.py", "/elsewhere/net.py"])
def test_cells_and_modules_beside_them_are_the_users(own: str) -> None:
    assert is_users(own)


class Kept(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, float, int | None]] = []

    def log(self, values: dict[str, Any], step: Any = None, *, auto: bool = False, drawn: bool = True) -> None:
        assert auto
        self.found += [(name, value.item(), step) for name, value in values.items() if drawn]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(torch.Tensor, "backward", torch.Tensor.backward)
    monkeypatch.setattr(torch.amp.GradScaler, "scale", torch.amp.GradScaler.scale)
    kept = Kept()
    Autolog(kept).install()
    return kept


def run(source: str, **names: Any) -> None:
    remember_cell(source, "Cell In[33]", 2)
    code = execution.compile_cell(source, "Cell In[33]", 2)
    execution.run_cell(code, {"torch": torch, "w": torch.nn.Parameter(torch.ones(3)), **names})


def test_one_curve_a_call_site(kept: Kept) -> None:
    run("for i in range(2):\n    a = (w * 2).sum()\n    a.backward()\n    b = w.sum(); b.backward()\n")
    assert kept.found == [("a", 6.0, 1), ("b", 3.0, 1), ("a", 6.0, 2), ("b", 3.0, 2)]


def test_two_calls_on_a_line(kept: Kept) -> None:
    run("a, b = w.sum(), w.prod()\na.backward(); b.backward()\n")
    assert [name for name, _, _ in kept.found] == ["a", "b"]


def test_equal_names_get_their_line(kept: Kept) -> None:
    run("loss = w.sum()\nloss.backward()\nloss = w.prod()\nloss.backward()\n")
    assert [name for name, _, _ in kept.found] == ["loss", "loss (line 5)"]


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("td.log(loss=loss)", []),
        ("td.log(train_loss=loss.detach().item(), step=i)", []),
        ("td.log(lr=0.1); log(loss=float(loss.detach()), step=i)", []),
        ("td.log(accuracy=0.5)", ["loss"]),
        ("td.log(**{'loss': loss})", ["loss"]),
        ("if i: td.log(loss=loss)", ["loss.backward()"]),
        ("if i: td.log(train=loss)", ["loss"]),
        ("td.log(loss=loss.item() * 4)", ["loss.backward()"]),
    ],
)
def test_a_loss_that_the_user_logs_is_one_curve(kept: Kept, log: str, found: list[str]) -> None:
    """Of the user's name. Other values of that name are told apart."""

    class Module:
        @staticmethod
        def log(**values: Any) -> None:
            """As ``td.log``."""

    source = f"for i in range(2):\n    loss = w.sum()\n    loss.backward()\n    {log}\n"
    run(source, td=Module, log=Module.log)
    assert [name for name, _, step in kept.found if step == 1] == found


def test_scaled_losses_are_drawn_unscaled(kept: Kept) -> None:
    run(
        "scaler = torch.amp.GradScaler('cpu', init_scale=64.0)\nloss = w.sum()\nscaler.scale(loss).backward()\n"
        "scaled = scaler.scale(w.sum())\nscaled.backward()\n"
        "off = torch.amp.GradScaler('cpu', enabled=False)\noff.scale(w.sum()).backward()\n"
    )
    assert [value for _, value, _ in kept.found] == [3.0, 3.0, 3.0]
    assert kept.found[0][0] == "loss" and kept.found[1][0] == "scaled"


def test_what_is_not_a_scalar_is_not_drawn(kept: Kept) -> None:
    run("(w * 2).backward(torch.ones(3))\n")
    assert kept.found == []


def test_a_subclass_is_drawn_once(kept: Kept) -> None:
    class Marked(torch.Tensor):
        pass

    run("loss = w.sum().as_subclass(Marked)\nloss.backward()\n", Marked=Marked)
    assert len(kept.found) == 1


def test_the_gradients_are_the_same(kept: Kept) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    run("w.pow(2).sum().backward()\n", w=parameter)
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0, 2.0, 2.0]


def test_no_graph_is_kept(kept: Kept) -> None:
    import weakref

    parameter = torch.nn.Parameter(torch.ones(3))
    seen: list[Any] = []
    source = "loss = w.sum()\nseen.append(ref(loss))\nloss.backward()\ndel loss\n"
    run(source, w=parameter, seen=seen, ref=weakref.ref)
    assert seen[0]() is None


class _Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    monkeypatch.setattr(training.LOADING, "__next__", training.LOADING.__next__)
    monkeypatch.setenv("WORLD_SIZE", "2")
    batches = Batches(0, list)
    batches.install()
    return batches


def test_batches_of_a_rank_of_its_own_are_counted(batches: Batches) -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10.0))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    assert [(batches.samples(), batches.samples()) for _ in loader] == [(3, None), (2, None)]
    in_dictionaries: DataLoader[Any] = DataLoader(
        _Items([{"a": torch.zeros(3, 7)}] * 10), batch_size=4, sampler=sampler
    )
    assert [batches.samples() for _ in in_dictionaries] == [4, 1]


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": None}])
def test_batches_that_ranks_may_have_in_common_are_not_counted(batches: Batches, options: dict[str, Any]) -> None:
    assert [batches.samples() for _ in DataLoader(TensorDataset(torch.arange(4.0)), **options)] in (
        [None] * 2,
        [None] * 4,
    )


def test_all_batches_of_a_single_rank_are_counted(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_alone", True)
    assert [batches.samples() for _ in DataLoader(TensorDataset(torch.arange(4.0)), batch_size=3)] == [3, 1]
    assert [batches.samples() for _ in DataLoader(_Items([torch.zeros(7)] * 2), batch_size=None)] == [None, None]
    assert [batches.samples() for _ in DataLoader(_Items(["text"] * 2), batch_size=2)] == [None]


def test_a_batch_counts_with_its_backward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.Tensor, "backward", torch.Tensor.backward)
    monkeypatch.setattr(torch.amp.GradScaler, "scale", torch.amp.GradScaler.scale)
    recorder = Recorder(tmp_path / "metrics")
    Autolog(recorder, iter([64, None, 32]).__next__).install()
    run("for i in range(3):\n    w.sum().backward()\n")
    recorder.close()
    records = [codec.loads(line) for line in (tmp_path / "metrics").read_bytes().splitlines()]
    assert [record["n"] for record in records if record["k"] == "samples"][-1] == 96
