"""What a cell keeps in files, under each strategy, is one device's: whole, plain, and written once."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jupyter_torchdist as td

from .languages import LENGTH, WORDS, Language
from .ranks import CLOSE, SAID, assert_close, context, everyone
from .unchanged import Cell, language, under


@contextmanager
def directory() -> Iterator[Path]:
    """The same for all ranks."""
    place = Path(everyone(tempfile.mkdtemp() if dist.get_rank() == 0 else "")[0])
    try:
        yield place
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)


@contextmanager
def writes() -> Iterator[list[str]]:
    """The files that ``torch.save`` writes on this rank."""
    save, written = torch.save, []

    def noted(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, (str, os.PathLike)):
            written.append(Path(f).name)
        save(obj, f, *args, **kwargs)

    torch.save = noted
    try:
        yield written
    finally:
        torch.save = save


def keeping(place: Path) -> Cell:
    """Trains, keeps model and optimizer in three ways, and goes on with what it reads."""

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        model, optimizer, losses = language(Language)()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place / "whole.pt")
        td.save(place / "steps", model, optimizer, step=6).wait()
        td.export(model, place / "model.safetensors")
        read = torch.load(place / "whole.pt")
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])
        return model, optimizer, losses

    return cell


def changed(look: Callable[[nn.Module], object]) -> Cell:
    """Does something with the model after each step."""

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(3)
        model, losses = Language(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for (x,) in DataLoader(TensorDataset(torch.randint(WORDS, (12, LENGTH))), 4, shuffle=True):
            loss = F.cross_entropy(model(x).view(-1, WORDS), x.roll(1, 1).view(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            look(model)
        return model, optimizer, losses

    return cell


def check_what_is_written_to_a_state_dict_is_the_models() -> None:
    """A write by ``data``, too; weights that were changed meanwhile are not undone."""

    def shrink(model: nn.Module) -> None:
        first = next(iter(model.state_dict()))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                (value.data if name == first else value).mul_(0.9)
        kept = model.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        del kept

    alone, _, losses = changed(shrink)()
    for one in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
        model, _, ours = under(context({one: dist.get_world_size()}), changed(shrink))
        assert max(abs(a - b) for a, b in zip(losses, ours, strict=True)) < CLOSE, one
        if dist.get_rank() == 0:
            assert_close(model.state_dict(), alone.state_dict())


class Extra(Language):
    """Its state has more than tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def check_a_state_of_the_modules_own_goes_along() -> None:
    for one in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):

        def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
            model, optimizer, losses = language(Extra, epochs=1)()
            model.load_state_dict(model.state_dict())
            return model, optimizer, losses

        model, _, _ = under(context({one: dist.get_world_size()}), cell)
        assert model.get_extra_state() == {"version": 3}, one


def check_a_state_dict_that_is_kept_is_said() -> None:
    """On one device it would follow the training; a copy of it would not, and neither does ours."""
    kept: list[dict[str, torch.Tensor]] = []

    def said(degree: str, look: Callable[[nn.Module], object]) -> bool:
        SAID.clear()
        under(context({degree: dist.get_world_size()}), changed(look))
        return any("Language.state_dict() returns a copy of the sharded weights" in line for line in SAID)

    def keep(model: nn.Module) -> None:
        kept.append(model.state_dict())

    assert said("dp_shard", keep)
    assert said("tp", keep)
    assert said("pp", keep)
    assert not said("dp_replicate", keep)
    assert not said("dp_shard", lambda model: kept.append(copy.deepcopy(model.state_dict())))


def check_what_a_cell_keeps_is_one_device_s_and_written_once() -> None:
    alone, _, _ = language(Language)()
    expected = alone.state_dict()
    for one in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
        with directory() as place:
            with writes() as written:
                model, optimizer, _ = under(context({one: dist.get_world_size()}), keeping(place))
            assert everyone(written) == [["whole.pt.part"], []], one
            assert sorted(os.listdir(place)) == ["model.safetensors", "steps", "whole.pt"], one
            read = torch.load(place / "whole.pt")
            assert not any(type(value) is not torch.Tensor for value in read["model"].values()), one
            assert_close(read["model"], expected)
            exported = load_file(place / "model.safetensors")
            assert_close({name: exported.pop(name) for name in expected}, expected)
            assert not exported
            fresh = Language()
            again = torch.optim.AdamW(fresh.parameters())
            assert td.load(place / "steps", fresh, again)["step"] == 6
            assert_close(fresh.state_dict(), expected)
            if dist.get_rank() == 0:
                assert_close(model.state_dict(), expected)
                for kept in (read["optimizer"]["state"], again.state_dict()["state"]):
                    assert_close(moments(kept), moments(optimizer.state_dict()["state"]))


def moments(state: dict[int, Any]) -> dict[str, torch.Tensor]:
    """Of an optimizer's state, by name."""
    return {f"{place}.{name}": value for place, values in state.items() for name, value in values.items()}
