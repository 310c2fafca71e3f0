"""On ranks: what is saved under one strategy and number of ranks comes back under another."""

from __future__ import annotations

import os
import resource
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import jupyter_torchdist as td
from jupyter_torchdist.protocol.errors import CheckpointError

from . import models, prepared, unchanged
from .ranks import CLOSE, SAID, assert_close, everyone, mine

CASE = models.CASES["untied"]
SAVED, STEPS = 3, 6


class Training:
    """A model under a strategy, its optimizer and schedule."""

    def __init__(self, strategy: str, seed: int = 0) -> None:
        self.model = CASE.model(seed)
        if strategy == "fsdp":
            for layer in self.model.layers:  # type: ignore[union-attr]
                fully_shard(layer)
            fully_shard(self.model)
        self.whole = strategy == "plain"
        if strategy == "replicate":
            replicate(self.model)
        if strategy == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.optimizer = models.adamw(list(self.model.parameters()))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def run(self, begin: int, end: int) -> None:
        for inputs, targets in CASE.batches(STEPS)[begin:end]:
            own = (inputs, targets) if self.whole else (mine(inputs), mine(targets))
            models.step(self.model, self.optimizer, *own, after=lambda: None)
            self.scheduler.step()

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler

    def see_that_it_is_the_one_that_was_never_interrupted(self) -> None:
        reference = Training("plain")
        reference.run(0, STEPS)
        state = dict(self.model.state_dict())
        state = {name.removeprefix("module."): value for name, value in state.items()}
        assert_close(state, reference.model.state_dict())
        assert self.scheduler.get_last_lr() == reference.scheduler.get_last_lr()


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def run(names: list[str], place: str) -> list[str]:
    """Checks of this module, in order; the tracebacks of those that failed on this rank."""
    failed = []
    for name in names:
        SAID.clear()
        try:
            globals()[name](Path(place))
        except Exception:
            failed.append(f"{name}\n{traceback.format_exc()}")
        dist.barrier()
    return failed


# ------------------------------------------------------------------------------------------------ 2 → 4 → 1 → 2 ranks


def save_while_it_trains(place: Path) -> None:
    training = Training("fsdp")
    training.run(0, SAVED)
    torch.manual_seed(5)  # the same numbers on all ranks
    saving = td.save(place / "main", *training.parts, step=SAVED, history=[1.5, 2.5], table=torch.arange(4))
    expected = torch.rand(3)
    training.run(SAVED, STEPS)  # changes what has been saved; the copies must not see it
    assert saving.wait() == place / "main" / "step-000003"
    training.see_that_it_is_the_one_that_was_never_interrupted()
    if td.is_main:
        torch.save(expected, place / "random.pt")
    assert td.load(place / "main")["history"] == [1.5, 2.5]


def resume(place: Path, strategy: str, directory: str = "main") -> None:
    training = Training(strategy, seed=9)
    torch.manual_seed(td.rank)
    found = td.load(place / directory, *training.parts)
    assert found["step"] == SAVED
    assert found["history"] == [1.5, 2.5] and found["table"].tolist() == [0, 1, 2, 3]
    assert torch.equal(torch.rand(3), torch.load(place / "random.pt"))
    training.run(SAVED, STEPS)
    training.see_that_it_is_the_one_that_was_never_interrupted()


def resume_as_fsdp(place: Path) -> None:
    resume(place, "fsdp")


def resume_as_ddp(place: Path) -> None:
    resume(place, "ddp", "plain")


def resume_as_replicate(place: Path) -> None:
    resume(place, "replicate", "plain")


# ------------------------------------------------------------------------------------------------- kinds of objects


def tensor_parallel(place: Path) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = models.Mlp()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 1.0)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh, plan)
    td.save(place / "tp", model, asynchronous=False)
    fresh = models.Mlp()
    assert td.load(place / "tp", fresh)["step"] == 1
    assert_close(fresh.state_dict(), whole, 0)


def zero_optimizer_becomes_a_plain_one(place: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer.optim.state) < 6  # this rank's share
    td.save(place / "zero", model, optimizer, step=2)
    other = torch.optim.AdamW(plain.parameters(), lr=0.3)
    td.load(place / "zero", plain, optimizer=other, zeroredundancyoptimizer=None)
    assert len(other.state) == 6 and other.param_groups[0]["lr"] == 0.1
    again = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    shared = ZeroRedundancyOptimizer(again.parameters(), torch.optim.AdamW, lr=0.3)
    td.load(place / "zero", again, shared)
    for one, opt in ((plain, other), (again, shared), (model, optimizer)):
        one(torch.ones(2, 4)).sum().backward()
        opt.step()
    assert_close(plain.state_dict(), model.state_dict(), 0)
    assert_close(again.state_dict(), model.state_dict(), 0)


def buffers_are_those_of_rank_0(place: Path) -> None:
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(td.rank + 1.0)  # type: ignore[union-attr]
    td.save(place / "buffers", norm, step=1).wait()
    td.load(place / "buffers", norm)
    assert norm.running_mean.tolist() == [1.0] * 3  # type: ignore[union-attr]


def what_is_each_ranks_own_comes_back_to_it(place: Path) -> None:
    generator = torch.Generator().manual_seed(100 + td.rank)
    torch.manual_seed(200 + td.rank)
    td.save(place / "own", generator, step=1).wait()
    expected = torch.rand(2), torch.rand(2, generator=generator)
    td.load(place / "own", generator)
    assert torch.equal(torch.rand(2), expected[0])
    assert torch.equal(torch.rand(2, generator=generator), expected[1])


def saving_changes_nothing(place: Path) -> None:
    """Neither the random numbers nor an optimizer that has no state yet."""
    model = models.Mlp()
    optimizer = models.adamw(list(model.parameters()))
    before = torch.get_rng_state()
    td.save(place / "untouched", model, optimizer, step=0).wait()
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state
    td.load(place / "untouched", model, optimizer)
    assert not optimizer.state


# ------------------------------------------------------------------------------------------------------- bad input


def ranks_that_save_different_things(place: Path) -> None:
    words = refused(lambda: td.save(place / "differ", models.Mlp(), step=td.rank))
    assert "rank 0 step 0, rank 1 step 1" in words
    words = refused(lambda: td.save(place / "differ", lock=threading.Lock() if td.rank else 1, step=1))
    assert "lock cannot be pickled" in words, words
    assert not (place / "differ").exists()


def a_file_system_that_is_full_half_way(place: Path) -> None:
    model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 500))  # a half for each rank
    td.save(place / "full", model, step=1, asynchronous=False)
    if td.rank == 1:  # what it writes is refused by the kernel, as on a full disk
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        saving = td.save(place / "full", model, step=2)
        words = refused(saving.wait)
    finally:
        if td.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "failed on rank 1" in words and "there is no space left" in words, words
    assert sorted(everyone(os.listdir(place / "full"))[0]) == ["step-000001"]
    assert td.load(place / "full", model)["step"] == 1
    saving = td.save(place / "full", model, step=2)
    assert saving.wait().name == "step-000002"


def an_error_of_an_asynchronous_save_is_raised_by_the_next(place: Path) -> None:
    td.save(place / "late", nn.Linear(500, 500), step=1).wait()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        td.save(place / "late", nn.Linear(500, 500), step=2)
        words = refused(lambda: td.save(place / "late", nn.Linear(500, 500), step=3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "the checkpoint of step 2 failed" in words


def another_model_is_named_on_every_rank(place: Path) -> None:
    def load() -> None:
        training = Training("fsdp")
        other = nn.Sequential(nn.Linear(2, 2 + td.rank))  # differs between the ranks too
        td.load(place / "main", other, training.optimizer)

    words = refused(load)
    assert "was saved from a different model: it has no 0.weight" in words, words
    assert "more differences" in words


def a_loop_goes_on_after_the_last_batch(place: Path) -> None:
    """Of an unmodified cell, and of a prepared one: no sample that was seen is loaded again."""
    for way, loaded in (("unmodified", 8 + 8 + 4), ("prepared", 4 + 4 + 4)):
        samples = prepared.data("mlp", 48)

        def run(
            *,
            resumed: bool,
            prepare: Callable[..., Any] = prepared.alone,
            way: str = way,
            samples: prepared.Noted = samples,
        ) -> prepared.Result:
            torch.manual_seed(7 if resumed else 5)
            model = models.CASES["mlp"].model()
            optimizer, losses = models.adamw(list(model.parameters())), []
            loader = DataLoader(samples, 8, shuffle=True)
            prepare(model, optimizer, loader)
            td.follow(loader)
            if resumed:
                assert td.load(place / way, model, optimizer, loader)["step"] == 3
            del samples.asked[:]
            for number, (x, y) in enumerate(loader, start=1):
                optimizer.zero_grad()
                loss = models.loss_of(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if number == 3 and not resumed:
                    td.save(place / way, model, optimizer, loader, step=number).wait()
            return model, optimizer, losses

        found = []
        for resumed in (False, True):
            SAID.clear()
            if way == "unmodified":
                found.append(unchanged.under(prepared.ddp(), partial(run, resumed=resumed)))
            else:
                with prepared.job(prepared.ddp()):
                    found.append(run(resumed=resumed, prepare=td.prepare))
        (whole, _, losses), (again, _, rest) = found
        assert max(abs(a - b) for a, b in zip(losses[3:], rest, strict=True)) < CLOSE
        assert len(samples.asked) == loaded, (way, samples.asked)
        if way == "unmodified":
            assert "each rank loads its part of every batch" in SAID
        if dist.get_rank() == 0:
            assert_close(again.state_dict(), whole.state_dict())


def a_rank_that_ends_in_an_asynchronous_save(place: Path) -> None:
    model = nn.Linear(3000, 3000)
    td.save(place / "killed", model, step=1).wait()
    td.save(place / "killed", model, step=2)
    if td.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    td.save(place / "killed", model, step=3)
