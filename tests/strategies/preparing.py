"""``td.prepare``: one device's losses and weights from each rank's rows, what a rank holds, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset

import jupyter_torchdist as td
from jupyter_torchdist.protocol.errors import StrategyError
from jupyter_torchdist.strategies.core import rank_context
from jupyter_torchdist.strategies.core.context import ParallelContext

from .models import CASES, Gpt, loss_of
from .prepared import Noted, Prepare, Result, alone, data, ddp, equal, fsdp, job, joined, sgd, train
from .ranks import CLOSE, SAID, assert_close, compiled_graphs, context, everyone, local_bytes, refusal
from .unchanged import Determined, under


def check_as_on_one_device() -> None:
    for how in (ddp(), fsdp()):
        for name in ("conv", "tied"):
            equal(how, lambda prepare, name=name: train(prepare, name, optimizer_with=sgd))  # type: ignore[misc]
        equal(how, lambda prepare: train(prepare, "mlp", 17, optimizer_last=True))  # the last batch has one sample
    equal(ddp(zero1=True), lambda prepare: train(prepare, "mlp"))
    equal(ddp(find_unused_parameters=True), lambda prepare: train(prepare, "mixture"))
    equal(fsdp(), lambda prepare: train(prepare, "mixture"))


def check_summed_losses_ignored_targets_and_hooks_on_gradients() -> None:
    def summed(prepare: Prepare) -> Result:
        model = CASES["mlp"].model()
        optimizer = sgd(list(model.parameters()))
        loader = DataLoader(data("mlp", 21), 8)
        prepare(model, optimizer, loader)
        for x, y in loader:
            F.cross_entropy(model(x), y, reduction="sum").div(50).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, []

    def ignoring(prepare: Prepare) -> Result:
        model = CASES["mlp"].model()
        optimizer, samples = sgd(list(model.parameters())), data("mlp", 16)
        samples.tensors[1][:7] = -100
        loader = DataLoader(samples, 8)
        prepare(model, optimizer, loader)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, []

    def hooked(prepare: Prepare) -> Result:
        model = CASES["mlp"].model()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        optimizer, loader = sgd(list(model.parameters())), DataLoader(data("mlp", 16), 8)
        prepare(model, optimizer, loader)
        for x, y in loader:
            for _ in range(2):  # added to what was there, clipped
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, []

    equal(ddp(loss="sum"), summed)
    equal(fsdp(), ignoring)
    equal(ddp(), hooked)
    equal(fsdp(), hooked)


def check_a_rank_holds_and_loads_its_part() -> None:
    model = CASES["tied"].model()
    whole = local_bytes(list(model.parameters()))
    samples = data("tied", 21)
    apart = torch.optim.LBFGS(nn.Linear(1, 1).parameters())  # which cannot train shards, and need not
    with job(fsdp()):
        optimizer = torch.optim.AdamW(model.parameters())
        returned = td.prepare(optimizer, model, loader := DataLoader(samples, 8, shuffle=True))
        assert [one is other for one, other in zip(returned, (optimizer, model, loader), strict=True)] == [True] * 3
        assert len(loader) == 3 and isinstance(model, Gpt)
        sizes = []
        for x, y in loader:
            loss_of(model(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
        assert local_bytes(list(model.parameters())) < 0.6 * whole
        assert local_bytes([state["exp_avg"] for state in optimizer.state.values()]) < 0.6 * whole
        state = model.state_dict()
        assert not any(isinstance(value, DTensor) for value in state.values())
        assert local_bytes(list(state.values())) >= whole
    assert len(apart.param_groups[0]["params"]) == 2
    asked = everyone(samples.asked)
    assert sorted(joined(asked)) == list(range(21))  # none left out, none twice
    assert [len(one) for one in asked] == [11, 10] and sizes == [4, 4, 3 - dist.get_rank()]
    assert "prepared for fsdp on 2 ranks: Gpt" in SAID[0] and "its part of every batch" in SAID[1]


def check_options_act_through_it() -> None:
    model = CASES["tied"].model()
    with job(fsdp(activation_checkpointing=True, precision="bf16")):
        td.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        seen: list[torch.dtype] = []
        layer = model.get_submodule("layers.0.mlp.1")
        handle = layer.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
        x, y = CASES["tied"].batches(1)[0]
        loss_of(model(x), y).backward()
        assert set(seen) == {torch.bfloat16} and len(seen) == 2  # forward, and again for the backward
        handle.remove()
    with job(ddp(precision="bf16")):
        model = td.prepare(CASES["mlp"].model())
        assert model(torch.randn(2, 6)).dtype == torch.float32
        assert "forward" in vars(model)
    assert "forward" not in vars(model)


def check_compiled_it_trains_as_one_device() -> None:
    for how in (ddp(compile=True), fsdp(compile=True)):
        with compiled_graphs() as graphs:
            equal(how, lambda prepare: train(prepare, "tied", 16, optimizer_with=sgd))
        assert graphs and {"layer_norm", "linear", "gelu", "scaled_dot_product_attention"} <= set(graphs[0]), graphs


def check_shuffled_alike_whatever_the_seeds() -> None:
    class Drawn(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(16), 16))

        def __len__(self) -> int:
            return 16

    class Noisy(Noted):
        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(()), random.random()

    with job(ddp()):
        for sampler in (None, Drawn()):
            torch.manual_seed(dist.get_rank())
            random.seed(dist.get_rank())
            noisy = Noisy(torch.arange(16))
            loader = td.prepare(DataLoader(noisy, 4, shuffle=sampler is None, sampler=sampler))
            epochs = [list(loader) for _ in range(2)]
            drawn = [joined(batch[0].tolist() for batch in epoch) for epoch in epochs]
            assert drawn[0] != drawn[1]
            for epoch, found in zip(epochs, drawn, strict=True):
                assert sorted(joined(everyone(found))) == list(range(16))
                noise = joined(everyone([float(v) for batch in epoch for part in batch[1:] for v in part]))
                assert len(set(noise)) == len(noise)  # each rank's own
        torch.manual_seed(5)
        random.seed(5)
        list(td.prepare(DataLoader(Noisy(torch.arange(5)), 4)))  # one more sample here than there
        assert len(set(everyone((float(torch.rand(())), random.random())))) == 1


def check_workers() -> None:
    with job(ddp()):
        torch.manual_seed(dist.get_rank())
        samples = TensorDataset(torch.arange(11))
        loader = td.prepare(DataLoader(samples, 4, shuffle=True, num_workers=1, persistent_workers=True))
        for _ in range(2):
            found = [int(i) for (batch,) in loader for i in batch]
            assert sorted(joined(everyone(found))) == list(range(11))
        del loader


class Stream(IterableDataset[Tensor]):
    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.first, self.first + 11))


class Batches(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.arange(5) + 5 * index, "pair": (torch.ones(5, 2),)}  # type: ignore[dict-item]


def check_streams_and_whole_batches() -> None:
    with job(ddp()):
        loader = td.prepare(DataLoader(Stream(), 4))
        found = [batch.tolist() for batch in loader]
        assert found == ([[0, 1], [4, 5], [8, 9]] if dist.get_rank() == 0 else [[2, 3], [6, 7], [10]])
        whole = td.prepare(DataLoader(Batches(), batch_size=None))
        rows = [(batch["x"].tolist(), len(batch["pair"][0])) for batch in whole]
        assert rows[0] == (([0, 1, 2], 3) if dist.get_rank() == 0 else ([3, 4], 2))
        own = td.prepare(DataLoader(Stream(20 * dist.get_rank()), 4))
        assert "the ranks read different streams of samples" in refusal(lambda: list(own))
        texts = td.prepare(DataLoader([{"x": torch.ones(4), "name": "a"}], batch_size=None))  # type: ignore[arg-type]
        assert "batches that are not tensors with the same number of rows" in refusal(lambda: list(texts))


def check_a_plateau_is_the_same_on_all_ranks() -> None:
    with job(ddp()):
        model = CASES["mlp"].model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        td.prepare(model, optimizer, plateau)
        plateau.step(1.0)
        plateau.step(2.0 if dist.get_rank() else 0.5)  # 1.25 on all: worse
        assert optimizer.param_groups[0]["lr"] == 0.1


def check_means() -> None:
    rank, loader = dist.get_rank(), DataLoader(TensorDataset(torch.arange(5.0)), 5)
    with job(ddp()):
        assert td.reduce_mean(2 * rank) == 1.0
        assert td.reduce_mean([torch.tensor([1.0 + rank, 2.0]), torch.tensor([3.0 + rank, 2.0])]).tolist() == [2.5, 2.0]
        for (x,) in td.prepare(loader):
            assert float(td.reduce_mean(x.mean())) == 2.0  # of rows 0, 1, 2 and of 3, 4
        assert (td.dp_rank, td.tp_rank, td.cp_rank, td.pp_rank) == (rank, 0, 0, 0)
        assert td.mesh is not None and td.mesh["dp_replicate"].size() == 2
    assert [td.mesh, td.dp_rank] == [None, rank]


def check_refusals() -> None:
    def prepare(*things: Any, how: ParallelContext | None = None) -> str:
        with job(how or ddp()):
            return refusal(lambda: td.prepare(*things))

    model, other = (cast("nn.Sequential", CASES["mlp"].model()) for _ in range(2))
    before = list(model.parameters())
    loader = DataLoader(TensorDataset(torch.arange(4)), 2)
    assert "Mlp is prepared already" in prepare(model, model)
    assert "DataLoader is prepared already" in prepare(loader, loader)
    assert "CrossEntropyLoss has no parameters" in prepare(nn.CrossEntropyLoss())
    strange = prepare(model, torch.optim.SGD([*model.parameters(), next(other.parameters())]))
    assert "SGD trains 1 parameters that are in no prepared model" in strange and "[16, 6]" in strange
    assert "SGD trains 6" in prepare(StepLR(torch.optim.SGD(model.parameters()), 1))
    assert "was given list" in prepare([model])
    assert "parameter weight is (3, 4)" in prepare(nn.Linear(4, 3 + dist.get_rank()))
    assert "different things: ['Mlp'] on rank 0" in prepare(model if dist.get_rank() == 0 else loader)
    samples = TensorDataset(torch.arange(4))
    assert "DistributedSampler" in prepare(DataLoader(samples, 2, sampler=DistributedSampler(samples)))
    wrapped = fsdp(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap=("Layer",))
    assert "Layer" in (said := prepare(CASES["tied"].model(), how=wrapped)) and "Block" in said
    assert "shares parameters" in prepare(model, nn.Sequential(model[0], nn.Linear(16, 2)))
    assert "LBFGS cannot train" in prepare(model, torch.optim.LBFGS(model.parameters()), how=fsdp())
    uneven = ddp(uneven_inputs=True)
    for word, how in (("stages", context({"pp": 2})), ("-O batch", ddp(batch="whole")), ("Join around", uneven)):
        with job(how):
            assert word in refusal(lambda: td.prepare(model))
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]  # nothing was changed
    with job(ddp()):
        td.prepare(gpt := CASES["tied"].model())
        x, _ = CASES["tied"].batches(1)[0]
        assert "tokens of the prepared Gpt is called by itself" in refusal(lambda: gpt.get_submodule("tokens")(x))
        with torch.no_grad():
            gpt.get_submodule("tokens")(x)
        uneven = td.prepare(DataLoader(TensorDataset(torch.arange(4 + 4 * dist.get_rank())), 2))
        assert "different numbers of batches: [2, 4]" in refusal(lambda: list(uneven))
        loaders = td.prepare(DataLoader(range(8), 4), DataLoader(range(5), 5))  # type: ignore[arg-type]

        def backward() -> None:
            for _ in zip(*loaders, strict=False):
                torch.ones((), requires_grad=True).backward()

        assert "batches of 4, 5 samples are used in one step" in refusal(backward)


def check_unused_parameters_are_said() -> None:
    with job(ddp()) as mine:
        model = td.prepare(CASES["mixture"].model())
        x, y = CASES["mixture"].batches(1)[0]
        try:
            for _ in range(2):
                loss_of(model(x), y).backward()
        except RuntimeError as error:
            assert mine.prepared is not None
            said = mine.prepared.explained(error)
            assert isinstance(said, StrategyError) and "find_unused_parameters=1" in str(said)
        else:
            raise AssertionError("nothing was said")


def check_an_operation_without_fp16_is_named() -> None:
    for how in (ddp(precision="fp16"), fsdp(precision="fp16")):
        with job(how) as mine:
            model = td.prepare(Determined(4, 4))
            try:
                model(torch.randn(8, 4))
            except RuntimeError as error:
                assert mine.prepared is not None
                said = str(mine.prepared.explained(error))
        assert "no fp16 on the CPU" in said and "autocast" in said, said


def check_models_of_several_kinds() -> None:
    """A teacher, its student and an adversary; each its own optimizer."""

    def cell(prepare: Prepare) -> Result:
        torch.manual_seed(2)
        teacher, student, judge = (CASES["mlp"].model(seed) for seed in (1, 2, 3))
        teacher.requires_grad_(False)
        one, two = sgd(list(student.parameters())), sgd(list(judge.parameters()))
        loader = DataLoader(data("mlp", 13), 8)
        prepare(teacher, student, judge, one, two, loader)
        losses = []
        for x, _ in loader:
            with torch.no_grad():
                wanted = teacher(x)
            fake = student(x)
            loss = judge(F.pad(fake.detach(), (0, 3))).square().mean() + (judge(F.pad(wanted, (0, 3))) - 1).abs().mean()
            two.zero_grad()
            loss.backward()
            two.step()
            loss = F.mse_loss(fake, wanted) - judge(F.pad(fake, (0, 3))).mean()
            one.zero_grad()
            loss.backward()
            one.step()
            losses.append(float(td.reduce_mean(loss)) if prepare is not alone else loss.item())
        return student, one, losses

    for how in (ddp(), fsdp()):
        equal(how, cell)


class Odd(nn.Module):
    """Built in several ways: in place, from a constant, through a view, again, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 16)
        self.b = nn.Parameter(torch.tensor([0.5, -0.5]).repeat(8))
        self.table = nn.Embedding(4, 16, padding_idx=1)
        self.register_buffer("mask", torch.arange(1.0, 10.0).view(3, 3).tril())  # rows that no softmax ignores
        self.out = nn.Linear(16, 3)
        nn.init.normal_(self.a.weight, std=0.3)
        with torch.no_grad():
            self.a.weight[0].zero_()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)) * self.b + self.table.weight.sum(0)
        return self.out(h) @ self.mask  # type: ignore[no-any-return]


def check_built_without_memory() -> None:
    def cell(prepare: Prepare) -> Result:
        torch.manual_seed(11)
        with td.meta():
            model = Odd()
            other = Gpt()
        assert model.a.weight.is_meta == (prepare is not alone)
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()], lr=0.01)
        held = [model.b]
        prepare(model, other, optimizer)
        assert held[0] is model.b
        losses = []
        for (x, y), (words, _) in zip(CASES["mlp"].batches(3), CASES["tied"].batches(3), strict=True):
            loss = loss_of(model(x), y) + loss_of(other(words), words)  # the same rows on every rank
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return nn.ModuleList([model, other]), optimizer, losses

    outer = rank_context.current
    for how in (ddp(), fsdp()):
        rank_context.take(None)
        expected, _, expected_losses = cell(alone)
        rank_context.take(outer)
        with job(how):
            found, optimizer, losses = cell(td.prepare)
        assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) < CLOSE
        if dist.get_rank() == 0:
            assert_close(found.state_dict(), expected.state_dict())
            assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in found.parameters()}
    with job(fsdp()), td.meta():
        lost = nn.Linear(2, 2)
    with job(ddp()), torch.device("meta"):
        assert "have no values (weight)" in refusal(lambda: td.prepare(nn.Linear(2, 2)))
    with job(fsdp()):  # loaded on rank 0 alone
        if dist.get_rank() == 0:
            lost.load_state_dict({"weight": torch.eye(2), "bias": torch.ones(2)}, assign=True)
        td.prepare(lost)
        assert lost(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


def check_built_without_memory_for_unchanged_cells() -> None:
    def cell() -> Result:
        torch.manual_seed(11)
        with td.meta():
            model = Odd()
        torch.manual_seed(5)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for x, y in CASES["mlp"].batches(3):
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model, optimizer, losses

    outer = rank_context.current
    rank_context.take(None)
    expected, _, expected_losses = cell()
    rank_context.take(outer)
    for how in (ddp(trust_model=True), fsdp(trust_model=True)):
        model, optimizer, losses = under(how, cell)
        assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) < CLOSE
        if dist.get_rank() == 0:
            assert_close(model.state_dict(), expected.state_dict())
            assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
