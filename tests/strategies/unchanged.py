"""Cells as users write them, divided inside by the automatic way: one device's losses, and a plain model after."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from jupyter_torchdist.strategies.auto import AutomaticTraining
from jupyter_torchdist.strategies.core.context import ParallelContext
from jupyter_torchdist.strategies.core.dtensors import local
from jupyter_torchdist.torch_private.settings import release

from .languages import LENGTH, WIDTH, WORDS, Apart, Fused, Language
from .ranks import CLOSE, SAID, assert_close, context, everyone, refusal, spied

Cell = Callable[[], tuple[nn.Module, torch.optim.Optimizer, list[float]]]


def under(how: ParallelContext, cell: Cell) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    automatic = AutomaticTraining(how)
    automatic.install()
    try:
        found = cell()
        automatic.finish()
    finally:
        automatic.abandon()
    return found


def language(build: Callable[[], nn.Module], epochs: int = 2) -> Cell:
    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(3)
        model, losses = build(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        words = torch.randint(WORDS, (12, LENGTH))
        for _ in range(epochs):
            for x, y in DataLoader(TensorDataset(words, words.roll(1, 1)), 4, shuffle=True):
                optimizer.zero_grad()
                logits = model(x)
                loss = F.cross_entropy(logits.view(-1, WORDS), y.view(-1))
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                losses += [loss.item(), norm.item(), (logits.argmax(-1) == y).float().mean().item()]
        return model, optimizer, losses

    return cell


def equal(how: ParallelContext, cell: Cell) -> Any:
    before, _, expected = cell()
    model, optimizer, losses = under(how, cell)
    assert len(losses) == len(expected)
    for number, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
        assert abs(ours - theirs) < 2 * CLOSE, (number, ours, theirs)
    assert type(model) is type(before) and not any(isinstance(p, DTensor) for p in model.parameters())
    assert not [part for part in model.modules() if {"forward", "__deepcopy__"} & vars(part).keys()]
    if dist.get_rank() == 0:
        assert_close(model.state_dict(), before.state_dict())
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
        assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
    return model


WORLD = dist.get_world_size


def check_tensor_parallelism() -> None:
    model = equal(context({"tp": WORLD()}), language(lambda: Language(tied=True)))
    assert model.head.weight is model.words.weight
    shapes = spied()

    def watched() -> nn.Module:
        """Notes what a layer of the first block is given, and what this rank has of the logits."""
        built = Language()
        built.get_submodule("layers.0.between").register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
        built.register_forward_hook(lambda _m, _a, output: shapes.append(local(output).shape))
        return built

    equal(context({"tp": 2}, sequence_parallel=True), language(watched))
    assert shapes[:2] == [(4, LENGTH, WIDTH), (4, LENGTH, WORDS)]  # on one device
    assert shapes[-2:] == [(4, LENGTH // 2, WIDTH), (4, LENGTH, WORDS)], shapes
    equal(context({"tp": 2}, loss_parallel=True), in_parts(spied(), spied(), watched))
    assert shapes[-2:] == [(6, LENGTH, WIDTH), (6, LENGTH, WORDS // 2)], shapes
    equal(context({"tp": 2}, loss_parallel=True), language(Language))  # it counts right answers


def check_context_parallelism() -> None:
    equal(context({"cp": WORLD()}), language(Language))


class InChunks(Language):
    """Makes its loss itself; of the logits those of a quarter of the tokens are there at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary, self.head = self.head, nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.vocabulary(hidden).flatten(0, 1), targets.flatten())

        parts = zip(super().forward(x).chunk(4, 1), x.roll(-1, 1).chunk(4, 1), strict=True)
        return torch.stack([checkpoint(loss_of, *part, use_reentrant=False) for part in parts]).mean()


def check_a_loss_in_chunks_of_the_sequence_where_blocks_have_a_part_of_it() -> None:
    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(4)
        model, losses = InChunks(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for (x,) in DataLoader(TensorDataset(torch.randint(WORDS, (12, LENGTH))), 4):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model, optimizer, losses

    equal(context({"cp": WORLD()}), cell)


def asking(inputs: Callable[[nn.Module], Iterable[Tensor]], penalty: bool = False) -> Cell:
    """Takes its gradients by ``torch.autograd.grad``; ``penalty``: to train with their norm."""

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(5)
        model, losses = Language(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
        words = torch.randint(WORDS, (12, LENGTH))
        for x, y in DataLoader(TensorDataset(words, words.roll(1, 1)), 4):
            optimizer.zero_grad()
            with sdpa_kernel(SDPBackend.MATH):  # the others have no gradients of gradients
                loss = F.cross_entropy(model(x).view(-1, WORDS), y.view(-1))
                grads = torch.autograd.grad(loss, inputs(model), create_graph=penalty)  # type: ignore[call-overload]
                if penalty:
                    loss = loss + torch.stack([grad.square().sum() for grad in grads]).sum()
                    loss.backward()
                else:
                    for parameter, grad in zip(inputs(model), grads, strict=True):
                        parameter.grad = grad
            optimizer.step()
            losses.append(loss.item())
        return model, optimizer, losses

    return cell


def asking_by_name() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    torch.manual_seed(6)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    known: dict[str, Tensor] = dict(model.named_parameters())
    loss = model(torch.randint(WORDS, (4, LENGTH))).square().mean()
    for name, grad in torch.autograd.grad(loss, known).items():
        known[name].grad = grad
    optimizer.step()
    return model, optimizer, [loss.item()]


def check_gradients_that_the_cell_asks_for_itself() -> None:
    divided = context({"cp": WORLD()})
    equal(divided, asking(nn.Module.parameters))
    equal(divided, asking(nn.Module.parameters, penalty=True))
    if release() >= (2, 13):  # which can be asked by name
        equal(divided, asking_by_name)
    norms = asking(lambda model: [one for one in model.parameters() if one.ndim == 1][:2])
    equal(context({"tp": 2}, sequence_parallel=True), norms)
    for degrees, words in (({"tp": 2}, "has sharded"), ({"pp": 2}, "of a pipeline")):
        said = refusal(lambda degrees=degrees: under(context(degrees), asking(nn.Module.parameters)))  # type: ignore[misc]
        assert words in said and "or backward()" in said, said


def check_a_model_that_the_cell_compiles_is_one_model_by_both_names() -> None:
    """Trained and evaluated through either, and plain afterwards."""

    def cell(order: tuple[bool, ...]) -> Cell:
        def run() -> Any:
            torch.manual_seed(3)
            model, losses = Language(), []
            fast = torch.compile(model, backend="eager")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            words = torch.randint(WORDS, (12, LENGTH))
            for number, (x, y) in enumerate(DataLoader(TensorDataset(words, words.roll(1, 1)), 4)):
                ways: tuple[Any, Any] = (fast, model) if order[number] else (model, fast)
                optimizer.zero_grad()
                loss = F.cross_entropy(ways[0](x).view(-1, WORDS), y.view(-1))
                loss.backward()
                optimizer.step()
                for way in ways:
                    way.eval()
                    with torch.no_grad():
                        losses.append(F.cross_entropy(way(x).view(-1, WORDS), y.view(-1)).item())
                    way.train()
                losses.append(loss.item())
            return model, optimizer, losses

        return run

    for one in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
        for order in ((True, True, True), (False, True, False)):
            SAID.clear()
            equal(context({one: WORLD()}), cell(order))
            assert any("the model that the cell compiled runs without compilation" in line for line in SAID) == (
                order[0] and one in "tp pp"
            )


def check_flags_act_where_layers_and_sequences_are_divided() -> None:
    """Each block is computed again, in half precision, by the parts of a batch; and all of it at once."""
    begun = spied()
    kinds = spied()

    def watched() -> nn.Module:
        built = Language()
        built.get_submodule("layers.0").register_forward_pre_hook(lambda _m, _a: begun.append(1))
        built.get_submodule("layers.0.mlp").register_forward_hook(lambda _m, _a, out: kinds.append(out.dtype))
        return built

    for degrees in ({"tp": WORLD()}, {"cp": WORLD()}):
        begun.clear()
        equal(context(degrees, activation_checkpointing=True), language(watched))
        assert len(begun) >= 6 + 2 * 6, (degrees, begun)  # alone; forward, and again for each backward
        kinds.clear()
        under(context(degrees, precision="bf16"), language(watched))
        assert kinds[-6:] == [torch.bfloat16] * 6, (degrees, kinds)
        rows = spied()
        equal(context(degrees, grad_accumulation=2, activation_checkpointing=True), in_parts(rows, spied()))
        assert rows.count(4) >= 2 * 2 * 2, (degrees, rows)


class Masked(nn.Module):
    """Gives what dropout leaves of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.5)


def check_dropout_differs_by_rank_and_what_the_cell_draws_does_not() -> None:
    for degrees in ({"dp_replicate": WORLD()}, {"dp_shard": WORLD()}):
        masks = spied()
        drawn = spied()

        def cell(masks: list[Any] = masks, drawn: list[float] = drawn) -> Any:
            model = Masked()  # no seed is set
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for _ in range(2):
                output = model(torch.ones(2 * WORLD(), 16))
                output.sum().backward()
                masks.append(output.detach().ne(0).tolist())
                drawn.append(torch.rand(()).item())
            return model, optimizer, []

        under(context(degrees), cell)
        assert len({str(one) for one in everyone(drawn)}) == 1
        for mask in masks:  # of all ranks' samples: none is another's
            assert len({str(row) for row in mask}) == 2 * WORLD(), mask
        assert masks[0] != masks[1]


def check_batch_normalisation_over_all_ranks_is_said() -> None:
    def cell() -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(8, 4)).square().sum().backward()
        return model, optimizer, []

    under(context({"dp_replicate": WORLD()}), cell)
    assert "batch normalisation uses the samples of all ranks, as on a single device" in SAID


class Crossed(Language):
    """Between the layers of its MLP is something that looks at a rank's part as if it were the whole."""

    def __init__(self) -> None:
        super().__init__(Fused)
        for layer in self.layers:
            layer.mlp = nn.Sequential(nn.Linear(WIDTH, 32), Reversed(), nn.Linear(32, WIDTH))


class Reversed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        whole = x.to_local() if isinstance(x, DTensor) else x
        return DTensor.from_local(whole.flip(-1), x.device_mesh, x.placements) if isinstance(x, DTensor) else x.flip(-1)


def check_what_would_compute_something_else_is_refused_before_the_first_step() -> None:
    before = torch.nn.functional.cross_entropy
    message = refusal(lambda: under(context({"tp": WORLD()}), language(Crossed)))
    assert "tp would change what Crossed computes: output 0 is" in message and "tp_plan" in message
    assert before is torch.nn.functional.cross_entropy


def hooked() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    model = nn.Linear(3, 1)
    model.register_full_backward_hook(lambda module, before, after: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    return model, optimizer, []


def check_hooks_of_modules_on_gradients_are_refused_where_a_rank_has_its_rows_alone() -> None:
    assert "a backward hook of Linear would see only the gradients of this rank's samples" in refusal(
        lambda: under(context({"dp_replicate": WORLD()}), hooked)
    )
    under(context({"dp_replicate": WORLD()}, model="whole"), hooked)


class Sums(nn.Module):
    """Attention by hand, which cp does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x).cumsum(1)  # type: ignore[no-any-return]


def check_sequences_that_cannot_be_divided_are_refused_before_the_first_step() -> None:
    def of(build: Callable[[], nn.Module]) -> str:
        return refusal(lambda: under(context({"cp": WORLD()}), language(build)))

    assert "Layer computes no F.scaled_dot_product_attention" in of(lambda: Language(Sums))
    assert "1 heads over 2 ranks" in of(lambda: Language(lambda: Apart(heads=1)))  # type: ignore[arg-type]


class Asked(Language):
    """A model that is trained by another method than ``forward``."""

    def logits(self, words: Tensor) -> Tensor:
        return self.head(self.last(self.words(words)))  # type: ignore[no-any-return]


def check_a_model_that_is_called_by_another_method_is_named_where_it_cannot_be_divided() -> None:
    def called(call: Callable[[Any, Tensor], Tensor], build: Callable[[], nn.Module] = Asked) -> Cell:
        def cell() -> Any:
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            call(model, torch.randint(WORDS, (4, LENGTH))).sum().backward()
            return model, optimizer, []

        return cell

    models = lambda: nn.ModuleDict({"a": nn.Embedding(WORDS, 3), "b": Language()})  # noqa: E731
    for one in ("pp", "tp", "cp"):
        how = context({one: WORLD()})
        for call, words, remedy in (
            (
                lambda model, x: model.logits(x),
                "Asked.logits is called, which is not its forward",
                "move what logits does",
            ),
            (
                lambda model, x: model.forward(x),
                "Asked.forward is called, and not the model",
                "the model itself (model(x))",
            ),
            (lambda model, x: model.words(x), "a part of Asked is called by itself", "move what the loop does"),
        ):
            said = refusal(lambda call=call, how=how: under(how, called(call)))  # type: ignore[misc]
            assert words in said and remedy in said and f"{one} would divide only Embedding" in said, said
        said = refusal(lambda how=how: under(how, called(lambda both, x: both["a"](x), models)))  # type: ignore[misc]
        assert "would divide" not in said, said


def operations(output: Tensor) -> int:
    """How many there are in its graph: each keeps what it needs for the backward."""
    seen: set[Any] = set()
    todo = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return len(seen)


def in_parts(rows: list[int], kept: list[int], build: Callable[[], nn.Module] = Language, norm: bool = False) -> Cell:
    """Notes the rows of each forward, and the operations whose inputs are kept until the backward."""

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(3)
        model, losses = build(), []
        model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
        words = torch.randint(WORDS, (22, LENGTH))
        for x, y in DataLoader(TensorDataset(words, words.roll(1, 1)), 8, shuffle=True):
            logits = model(x)
            kept.append(operations(logits))
            optimizer.zero_grad()
            loss = F.cross_entropy(logits.view(-1, WORDS), y.view(-1))
            if norm:
                loss = loss + torch.autograd.grad(loss, list(model.parameters()), create_graph=True)[0].norm()
            loss.backward()
            losses += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
            optimizer.step()
        return model, optimizer, losses

    return cell


def check_a_batch_in_parts() -> None:
    for degrees in ({"dp_shard": WORLD()}, {"tp": WORLD()}):
        rows = spied()
        kept = spied()
        equal(context(degrees, grad_accumulation=2), in_parts(rows, kept))
        part = 4 if "tp" in degrees else 2
        assert rows.count(part) >= 2 * 2 * 2, rows  # of two steps, two parts, forward and again
        alone, ours = kept[:3], kept[3:]
        assert max(ours) < 8 < 30 < min(alone), kept


def check_what_cannot_be_taken_in_parts_is_refused() -> None:
    def of(cell: Cell, **more: Any) -> str:
        return refusal(lambda: under(context({"dp_replicate": WORLD()}, grad_accumulation=2, **more), cell))

    assert "gradients of gradients" in of(in_parts(spied(), spied(), norm=True))
    assert "-O model=whole" in of(in_parts(spied(), spied()), model="whole")
    assert "normalises over the batch" in of(in_parts(spied(), spied(), Normalised))
    assert "changes calls" in of(in_parts(spied(), spied(), Counting))
    stages = context({"pp": WORLD()}, grad_accumulation=2)
    assert "use -O microbatches=4" in refusal(lambda: under(stages, in_parts(spied(), spied())))


class Normalised(Language):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))  # type: ignore[no-any-return]


class Counting(Language):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Counted(Dataset[tuple[Tensor, Tensor]]):
    """25 samples. How many were loaded stands in an array: a loop that changes a list or a number has whole batches."""

    def __init__(self) -> None:
        self.loaded = array("q", [0])
        self.inputs, self.targets = torch.randn(25, 4), torch.arange(25) % 3

    def __len__(self) -> int:
        return 25

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.loaded[0] += 1
        return self.inputs[index], self.targets[index]


def counted(loss_of: Callable[[Tensor, Tensor], Tensor], loaded: list[int]) -> Cell:
    """Three batches of 10, 10 and 5 samples."""

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(3)
        dataset, model = Counted(), nn.Sequential(nn.Linear(4, 3))
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for x, y in DataLoader(dataset, 10):
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        loaded.append(dataset.loaded[0])
        return model, optimizer, losses

    return cell


def unproved(output: Tensor, y: Tensor) -> Tensor:
    """A mean over the samples, made of pairs of them."""
    each = F.cross_entropy(output, y, reduction="none")
    return (each + each.roll(1, 0)).mean() / 2


def check_what_a_rank_loads_is_as_proved_or_said() -> None:
    mine = 3 - dist.get_rank()  # of the last batch of 5
    summed = lambda output, y: F.cross_entropy(output, y, reduction="sum")  # noqa: E731
    for loss, options, expected in (
        (F.cross_entropy, {}, 20 + mine),
        (F.cross_entropy, {"batch": "whole"}, 25),
        (F.cross_entropy, {"batch": "slices"}, 10 + mine),
        (summed, {}, 20 + mine),
        (summed, {"batch": "slices", "loss": "sum"}, 10 + mine),
        (unproved, {"loss": "mean"}, 20 + mine),
        (unproved, {"trust_loss": True}, 20 + mine),
        (unproved, {}, 25),
    ):
        loaded = spied()
        equal(context({"dp_replicate": WORLD()}, **options), counted(loss, loaded))
        assert loaded == [25, expected], (options, loaded, expected)


def check_targets_that_are_ignored_count_nowhere() -> None:
    """Another number of them in each batch, and one batch in which a rank has no others."""

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(3)
        x, y, model = torch.randn(48, 4), torch.arange(48) % 3, nn.Linear(4, 3)
        y[[1, 17, 25, 26, 29]], y[36:40] = -100, -100
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for inputs, targets in DataLoader(TensorDataset(x, y), 8):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            losses += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
            optimizer.step()
        return model, optimizer, losses

    for degrees in ({"dp_replicate": WORLD()}, {"dp_shard": WORLD()}):
        SAID.clear()
        equal(context(degrees), cell)
        assert "each rank loads its part of every batch" in SAID


def check_gradients_that_are_there_on_some_ranks_alone_are_refused() -> None:
    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in DataLoader(Counted(), 5):
            F.cross_entropy(model(x), y).backward()
            if dist.get_rank() == 0:
                optimizer.zero_grad()
        return model, optimizer, []

    message = refusal(lambda: under(context({"dp_replicate": WORLD()}), cell))
    assert (
        "some ranks had gradients and others had none" in message
        and "zero_grad() in the same steps on every" in message
    )


class Noisy(Counted):
    """The noise of a sample is drawn where it is loaded."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index)[0] + torch.rand(()), self.targets[index]


def check_workers_of_a_divided_loader_draw_numbers_of_their_ranks() -> None:
    noise = spied()

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        dataset, model = Noisy(), nn.Sequential(nn.Linear(4, 3))
        dataset.inputs.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for x, y in DataLoader(dataset, 10, num_workers=1):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            noise.extend(x[:, 0].tolist())
        return model, optimizer, []

    under(context({"dp_replicate": WORLD()}, batch="slices"), cell)
    of_all = [one for several in everyone(noise) for one in several]
    assert len(of_all) == len(set(of_all)) == 25


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def check_a_model_that_mixes_samples_is_divided_on_the_users_word_alone() -> None:
    rows = spied()

    def cell() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
        model = Centred(4, 3)
        model.register_forward_pre_hook(lambda _module, inputs: rows.append(len(inputs[0])))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(8, 4)).square().mean().backward()
        return model, optimizer, []

    how = {"dp_replicate": WORLD()}
    words = refusal(lambda: under(context(how), cell))
    assert "-O model=whole" in words and "trust_model" not in words
    under(context(how, model="whole"), cell)
    assert rows[-1] == 8
    under(context(how, trust_model=True), cell)
    assert rows[-1] == 4


def check_state_dicts_are_whole_or_sharded_as_asked_for() -> None:
    for kind, sharded in (("FULL_STATE_DICT", False), ("SHARDED_STATE_DICT", True)):
        kinds = spied()
        refused: list[str] = []

        def cell(kinds: list[bool] = kinds, refused: list[str] = refused) -> Any:
            model = nn.Sequential(nn.Linear(4, 3))
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            moment = optimizer.state_dict()["state"][0]["exp_avg"]
            kinds += [isinstance(value, DTensor) for value in (*model.state_dict().values(), moment)]
            model.load_state_dict(model.state_dict())
            if kinds[0]:
                refused.append(refusal(lambda: torch.save(model.state_dict(), "never written")))
            return model, optimizer, []

        under(context({"dp_shard": WORLD()}, state_dict_type=kind), cell)
        assert kinds == [sharded] * 3
        assert [words for words in refused if "td.save" not in words] == []
        assert len(refused) == sharded


class Determined(nn.Linear):
    """LU has no half precision on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.det(super().forward(x).view(-1, 2, 2))  # type: ignore[no-any-return]


def check_an_operation_without_fp16_is_named() -> None:
    how = context({"dp_replicate": WORLD()}, precision="fp16", model="whole")
    automatic = AutomaticTraining(how)
    automatic.install()
    try:
        model = Determined(4, 4)
        torch.optim.SGD(model.parameters())
        model(torch.randn(8, 4))
    except NotImplementedError as error:
        said = str(automatic.explained(error))
    finally:
        automatic.abandon()
    assert "an operation of the model has no fp16 on the CPU" in said and "lu_cpu" in said and "autocast" in said
    assert automatic.explained(ValueError("other")).args == ("other",)
