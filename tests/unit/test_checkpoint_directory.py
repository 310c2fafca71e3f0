"""Checkpoints in one plain process: what is in a directory, what is refused and how, what others have written."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

import jupyter_torchdist as td
from jupyter_torchdist.checkpoint import saving
from jupyter_torchdist.checkpoint.directory import Writer
from jupyter_torchdist.protocol.errors import CheckpointError
from jupyter_torchdist.protocol.process import ProcessId


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def another_run() -> Iterator[None]:
    yield
    new_run()


def new_run() -> None:
    """This process saves as if it had just begun."""
    saving._writers.clear()


def trained(model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def same_next_step(one: tuple[nn.Module, Any, Any], other: tuple[nn.Module, Any, Any]) -> bool:
    for model, optimizer, _ in (one, other):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return same(one[0], other[0])


def fresh() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_all_comes_back(tmp_path: Path) -> None:
    saved, generator = trained(), torch.Generator().manual_seed(5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    td.save(tmp_path, *saved, scaler, generator, step=7, best={"loss": 0.5, "at": torch.tensor([1, 2])}).wait()
    expected = random.random(), numpy.random.rand(), torch.rand(2), torch.rand(1, generator=generator)
    loaded, other = fresh(), torch.amp.GradScaler("cpu")
    found = td.load(tmp_path, *loaded, other, generator, seen=3)
    again = random.random(), numpy.random.rand(), torch.rand(2), torch.rand(1, generator=generator)
    assert found.keys() == {"step", "best", "seen"} and (found["step"], found["seen"]) == (7, 3)
    assert found["best"]["loss"] == 0.5 and found["best"]["at"].tolist() == [1, 2]
    assert expected[:2] == again[:2] and all(map(torch.equal, expected[2:], again[2:]))
    assert other.get_scale() == 2.0**7
    assert loaded[2].get_last_lr() == saved[2].get_last_lr() and loaded[1].param_groups[0]["initial_lr"] == 0.1
    assert same_next_step(saved, loaded)


def test_two_models_share_an_optimizer_and_have_names(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        one, other, free = Net(), Net(), nn.Parameter(torch.ones(2))
        parameters = [{"params": [*other.parameters(), free], "lr": 0.3}, {"params": one.parameters(), "lr": 0.1}]
        optimizer = torch.optim.SGD(parameters, momentum=0.9)
        (one(torch.ones(1, 3)).sum() + other(torch.ones(1, 3)).prod() + free.sum()).backward()
        optimizer.step()
        return one, other, optimizer

    one, other, optimizer = make(0)
    td.save(tmp_path, generator=one, critic=other, optimizer=optimizer).wait()
    again = make(1)
    td.load(tmp_path, optimizer=again[2], critic=again[1], generator=again[0])
    assert same(again[0], one) and same(again[1], other)
    assert [group["lr"] for group in again[2].param_groups] == [0.3, 0.1]
    for mine, theirs in zip(again[2].state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])
    with pytest.raises(
        CheckpointError, match=r"has no model called 'net'; it has generator \(model\), critic \(model\)"
    ):
        td.load(tmp_path, net=Net())


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 100):
        td.save(tmp_path, Net(), step=step, keep=2)
    saving.wait()
    assert names(tmp_path) == ["step-000010", "step-000100"]
    assert td.load(tmp_path)["step"] == 100
    assert td.load(tmp_path / "step-000010")["step"] == 10
    td.save(tmp_path, Net(), step=100, keep=2, asynchronous=False)  # again: it takes the place of the first
    assert names(tmp_path) == ["step-000010", "step-000100"]


def test_two_runs_in_one_directory_are_told_apart(tmp_path: Path) -> None:
    td.save(tmp_path, Net(), step=5).wait()
    new_run()
    with pytest.raises(CheckpointError, match="holds step-000005 of an earlier run, and this run is only at step 1"):
        td.save(tmp_path, Net(), step=1)
    td.load(tmp_path)
    td.save(tmp_path, Net(), step=6).wait()
    (tmp_path / "step-000006").rename(tmp_path / "step-000007")  # as if another job had saved it
    with pytest.raises(CheckpointError, match="another job saves into"):
        td.save(tmp_path, Net(), step=8)


def test_what_a_crash_leaves_of_a_deletion_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose it was is known to the last: without that it would lie there for a day."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    owner = ProcessId.of(ended.pid)
    ended.wait()
    aside = Writer(tmp_path, "gone").open(1)
    (aside / "owner.json").write_text(json.dumps(owner.to_json()))
    (aside / "inner").mkdir()
    for place in (aside / "first", aside / "inner" / "second", aside / "zzz"):
        place.write_text("values")
    rmtree = shutil.rmtree

    def killed_before(path: Path, **options: Any) -> None:
        if path != aside:
            rmtree(path, **options)

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", killed_before)
        Writer(tmp_path, "gone").discard(aside)
    assert names(aside) == ["owner.json"]
    td.save(tmp_path, Net(), step=1).wait()
    assert names(tmp_path) == ["step-000001"]


def test_ranks_that_were_forked_from_one_process_have_names_of_their_own() -> None:
    code = (
        "import os\nfrom jupyter_torchdist.checkpoint import saving\nfrom pathlib import Path\n"
        "for _ in range(2):\n    if not os.fork():\n"
        "        print(saving.writer(Path('there')).token, flush=True)\n        os._exit(0)\n    os.wait()"
    )
    told = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    one, other = told.stdout.split()
    assert one != other


def test_what_a_crash_leaves_is_not_loaded_and_is_cleared_away(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, torch, jupyter_torchdist as td\n"
        "from jupyter_torchdist.checkpoint import directory\n"
        "directory.Writer.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "td.save(sys.argv[1], torch.nn.Linear(3, 3), step=1).wait()\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = names(tmp_path)
    assert left.startswith(".step-000001.") and (tmp_path / left / ".metadata").exists()
    with pytest.raises(CheckpointError, match="was begun and never completed"):
        td.load(tmp_path)
    td.save(tmp_path, nn.Linear(3, 3), step=1).wait()
    assert names(tmp_path) == ["step-000001"]


def test_another_model_is_refused_by_its_first_difference_and_nothing_is_changed(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    td.save(tmp_path, model, optimizer, step=1).wait()
    wider = Net(6)
    before = {name: value.clone() for name, value in wider.state_dict().items()}
    with pytest.raises(
        CheckpointError,
        match=r"first.weight has the shape \(5, 3\) in the checkpoint and \(6, 3\) in the model \(and 2 more",
    ):
        td.load(tmp_path, wider)
    assert all(torch.equal(value, before[name]) for name, value in wider.state_dict().items())
    smaller = Net()
    smaller.last.bias = None  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"last.bias is in the checkpoint but not in the model"):
        td.load(tmp_path, smaller)
    frozen = Net()
    with pytest.raises(CheckpointError, match=r"it does not have model.first.weight and 1 more"):
        td.load(tmp_path, frozen, torch.optim.AdamW(frozen.last.parameters()))
    with pytest.raises(CheckpointError, match="is on the meta device"), torch.device("meta"):
        td.load(tmp_path, Net())
    with pytest.raises(CheckpointError, match="a list needs a name in the checkpoint"):
        td.save(tmp_path, [1])
    with pytest.raises(CheckpointError, match="two objects are called 'model'"):
        td.save(tmp_path, model, model=Net())
    with pytest.raises(CheckpointError, match=r"td.follow\(loader\) before the loop"):
        td.save(tmp_path, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2))))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the directory does not exist"):
        td.load(tmp_path / "no", Net())
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*\n.*step-000100"):
        td.load(tmp_path, Net())


def test_a_damaged_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    td.save(tmp_path, Net(), step=1).wait()
    path = tmp_path / "step-000001"
    data = path / "__0_0.distcp"
    size = data.stat().st_size
    os.truncate(data, size - 10)
    with pytest.raises(CheckpointError, match=rf"__0_0.distcp has [\d,]+ of {size:,} bytes"):
        td.load(tmp_path, Net())
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing"):
        td.load(tmp_path, Net())
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"it has no .metadata"):
        td.load(tmp_path, Net())
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoint.json cannot be read"):
        td.load(tmp_path, Net())


def test_another_version_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    td.save(tmp_path, Net(), step=1).wait()
    manifest = tmp_path / "step-000001" / "checkpoint.json"
    value = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**value, "torch": "9.1.0"}))
    assert td.load(tmp_path, Net())["step"] == 1
    assert f"saved by torch 9.1.0, loaded by torch {torch.__version__}" in capsys.readouterr().out
    future = b"cjupyter_torchdist.protocol.errors\nOfTheFuture\n."  # a class that this version does not have
    with pytest.raises(AttributeError):
        pickle.loads(future)
    (tmp_path / "step-000001" / ".metadata").write_bytes(future)
    with pytest.raises(CheckpointError, match=r"cannot be read by torch .* \(torch 9.1.0 saved it\)[^→]*\n.*td.export"):
        td.load(tmp_path, Net())
    manifest.write_text(json.dumps({**value, "format": 2}))
    with pytest.raises(CheckpointError, match="saved by a later version of jupyter_torchdist"):
        td.load(tmp_path, Net())


def test_weights_that_are_not_numbers_are_saved_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    with torch.no_grad():
        model.last.weight[0, 0] = float("nan")
        model.first.bias.fill_(3e38)  # their sum overflows; they are numbers
    td.save(tmp_path, model, step=4).wait()
    said = "step 4: NaN or infinity in 1 tensor (model.last.weight); saved all the same"
    assert said in capsys.readouterr().out
    other = Net()
    td.load(tmp_path, other)
    assert torch.isnan(other.last.weight[0, 0])
    assert "NaN or infinity in model.last.weight" in capsys.readouterr().out


def test_the_last_finite_checkpoint_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    for step in (1, 2):
        td.save(tmp_path, model, step=step, keep=2).wait()
    with torch.no_grad():
        model.last.weight[0, 0] = float("inf")
    for step in (3, 4, 5):
        td.save(tmp_path, model, step=step, keep=2).wait()
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    assert "; step-000002 is without them, and kept" in capsys.readouterr().out
    (tmp_path / "step-000004" / "checkpoint.json").write_text("{")  # damaged: it counts as no finite one
    td.save(tmp_path, model, step=6, keep=2).wait()
    assert names(tmp_path) == ["step-000002", "step-000005", "step-000006"]
    with torch.no_grad():
        model.last.weight[0, 0] = 0.0
    td.save(tmp_path, model, step=7, keep=1).wait()
    assert names(tmp_path) == ["step-000007"]


def test_without_a_finite_checkpoint_the_last_ones_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    with torch.no_grad():
        model.last.bias[0] = float("nan")
    for step in (1, 2, 3):
        td.save(tmp_path, model, step=step, keep=2).wait()
    assert names(tmp_path) == ["step-000002", "step-000003"]
    assert "; no checkpoint here is without them" in capsys.readouterr().out


def test_a_directory_that_cannot_hold_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be saved in .*file"):
        td.save(tmp_path / "file" / "below", Net(), step=1)
    with pytest.raises(CheckpointError, match=r"does not fit into .* are free"):
        td.save(tmp_path / "large", table=torch.zeros(1).expand(2**60), step=1)
    assert not names(tmp_path / "large")


def test_export_is_whole_and_plain(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    class Tied(Net):
        def __init__(self) -> None:
            super().__init__(3)
            self.last.weight = self.first.weight

    model = Tied()
    compiled: Any = torch.compile(model, backend="eager")
    file = td.export(compiled, tmp_path / "out" / "model.safetensors")
    assert same(model, _filled(load_file(file)))
    td.save(tmp_path / "saved", compiled, step=1).wait()
    assert same(model, _filled(load_file(td.export(tmp_path / "saved", tmp_path / "again.safetensors"))))
    assert names(tmp_path / "out") == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="has no model called 'critic'; it has model"):
        td.export(tmp_path / "saved", file, name="critic")


def _filled(state: dict[str, torch.Tensor]) -> nn.Module:
    model = Net(3)
    model.load_state_dict(state)
    return model


def test_safetensors_is_asked_for_only_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        td.export(Net(), tmp_path / "model.safetensors")


@pytest.mark.parametrize("safe", [True, False])
def test_a_directory_of_accelerate(tmp_path: Path, safe: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    saved = trained()
    accelerator.prepare(*saved)
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    expected = torch.rand(2)
    loaded = fresh()
    td.load(tmp_path, *loaded)
    assert torch.equal(torch.rand(2), expected)
    assert loaded[2].state_dict()["_step_count"] == saved[2].state_dict()["_step_count"]
    assert same_next_step(saved, loaded)
    accelerator.end_training()


def test_the_sharded_form_of_accelerate(tmp_path: Path) -> None:
    saved = trained()
    weights, optimizer = get_state_dict(saved[0], saved[1])
    save_sharded({"model": weights}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0")
    save_sharded({"optimizer": optimizer}, checkpoint_id=tmp_path / "optimizer_0")
    loaded = fresh()
    td.load(tmp_path, *loaded[:2])
    assert loaded[1].param_groups[0]["lr"] == saved[1].param_groups[0]["lr"]
    assert same_next_step(saved, loaded)


@pytest.mark.parametrize("at_the_root", [True, False])
def test_a_directory_of_torchtitan(tmp_path: Path, at_the_root: bool) -> None:
    saved = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, optimizer = get_state_dict(saved[0], saved[1], options=options)
    state: dict[str, Any] = dict(weights) if at_the_root else {"model": weights}
    state |= {"optimizer": optimizer, "lr_scheduler": saved[2].state_dict()}
    state |= {"train_state": {"step": torch.tensor(20, dtype=torch.int32)}, "dataloader": {"dp_rank_0": b"x"}}
    for step in (9, 20):
        save_sharded(state, checkpoint_id=tmp_path / f"step-{step}")
    loaded = fresh()
    assert td.load(tmp_path, *loaded)["step"] == 20
    assert loaded[2].get_last_lr() == saved[2].get_last_lr()
    assert same_next_step(saved, loaded)
    file = td.export(tmp_path, tmp_path / "model.safetensors")
    assert file.stat().st_size > 0


def test_a_directory_of_hugging_faces_trainer(tmp_path: Path) -> None:
    """As ``transformers.Trainer`` writes it: ``checkpoint-N``, of which the highest is taken."""
    from safetensors.torch import save_file

    saved = trained()
    for step in (2, 10):
        directory = tmp_path / f"checkpoint-{step}"
        directory.mkdir()
        save_file(saved[0].state_dict(), directory / "model.safetensors")
        torch.save(saved[1].state_dict(), directory / "optimizer.pt")
        torch.save(saved[2].state_dict(), directory / "scheduler.pt")
        (directory / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    torch.manual_seed(3)
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(states, tmp_path / "checkpoint-10" / "rng_state.pth")
    expected = torch.rand(2)
    loaded = fresh()
    assert td.load(tmp_path, *loaded)["step"] == 10
    assert torch.equal(torch.rand(2), expected)
    assert same_next_step(saved, loaded)


def test_a_file_of_lightning(tmp_path: Path) -> None:
    saved = trained()
    state = {"pytorch-lightning_version": "2.6", "global_step": 7, "epoch": 1, "loops": {}, "callbacks": {}}
    state |= {"state_dict": saved[0].state_dict(), "optimizer_states": [saved[1].state_dict()]}
    state |= {"lr_schedulers": [saved[2].state_dict()]}
    torch.save(state, tmp_path / "epoch=1-step=7.ckpt")
    for place in (tmp_path, tmp_path / "epoch=1-step=7.ckpt"):
        loaded = fresh()
        assert td.load(place, *loaded) == {"step": 7, "epoch": 1}
    assert same_next_step(saved, loaded)


def test_a_file_of_fabric_and_a_state_dict(tmp_path: Path) -> None:
    saved, file = trained(), tmp_path / "file.pt"
    torch.save({"net": saved[0].state_dict(), "opt": saved[1].state_dict(), "step": 3, "lr": 0.5}, file)
    loaded = fresh()
    with pytest.raises(CheckpointError, match=r"no model called 'model'; it has net \(model\), opt \(optimizer\)"):
        td.load(file, loaded[0])
    torch.save({"model": saved[0].state_dict(), "optimizer": saved[1].state_dict(), "step": 3, "lr": 0.5}, file)
    assert td.load(file, *loaded[:2]) == {"step": 3, "lr": 0.5}
    torch.save(saved[0].state_dict(), file)
    assert td.load(file, loaded[0])["step"] is None
    assert all(map(torch.equal, loaded[0].parameters(), saved[0].parameters()))
    torch.save([1], file)
    with pytest.raises(CheckpointError, match="holds a list, not a checkpoint"):
        td.load(file, loaded[0])
    file.write_text("a text")
    with pytest.raises(CheckpointError, match="cannot be read"):
        td.load(file, loaded[0])
