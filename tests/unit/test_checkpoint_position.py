"""A loop that is resumed sees the batches that one would have seen that was never interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from jupyter_torchdist.checkpoint import randomness
from jupyter_torchdist.checkpoint.position import Saved, follow
from jupyter_torchdist.checkpoint.variables import Variables

EPOCHS = 3
Batches = list[list[float]]


class Noisy(Dataset[torch.Tensor]):
    """Samples with noise from the global generator, as augmentations have; it counts what it loads."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        return index + torch.rand(())


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (number + torch.rand(()) for number in range(22))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Noisy(), batch_size=4),
    "shuffled": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(
        Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "without batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
}


def train(loader: DataLoader[Any], stop: tuple[int, int] | None, goal: tuple[Saved, Any] | None) -> tuple[Batches, Any]:
    """The batches of a run whose body draws numbers too, and what a checkpoint after batch ``stop`` has."""
    torch.manual_seed(1 if goal is None else 99)
    position = follow(loader)
    if goal is not None:
        position.go_to(goal[0], lambda: randomness.restore(goal[1]))
    seen: Batches = []
    next(iter(loader))  # a look at the first batch
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            seen.append([*torch.atleast_1d(batch).tolist(), float(torch.rand(()))])
            if (epoch, number) == stop:
                return seen, (position.saved(), randomness.capture())
            if epoch == 1 and number == 4:
                break  # an epoch that is left early
    return seen, (position.saved(), randomness.capture())


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("stop", [(0, 0), (0, 2), (2, 3)])
def test_what_is_seen_after_resuming(kind: str, stop: tuple[int, int]) -> None:
    whole, _ = train(LOADERS[kind](), None, None)
    first, saved = train(LOADERS[kind](), stop, None)
    rest, _ = train(LOADERS[kind](), None, saved)
    assert first and rest
    assert first + rest == whole


def test_samples_that_were_seen_are_not_loaded_again() -> None:
    _, saved = train(LOADERS["shuffled"](), (2, 3), None)
    dataset = Noisy()
    rest, _ = train(DataLoader(dataset, batch_size=4, shuffle=True), None, saved)
    assert dataset.loaded == sum(len(batch) - 1 for batch in rest) + 4  # and the look at the first batch


def test_a_checkpoint_between_two_epochs() -> None:
    def run(loader: DataLoader[Any], epochs: range) -> Batches:
        return [batch.tolist() for _ in epochs for batch in loader]

    torch.manual_seed(2)
    loader = LOADERS["shuffled"]()
    position = follow(loader)
    run(loader, range(1))
    saved, random = position.saved(), randomness.capture()
    expected = run(loader, range(2))
    again = LOADERS["shuffled"]()
    follow(again).go_to(saved, lambda: randomness.restore(random))
    assert run(again, range(3)) == expected


def test_an_iteration_over_another_loader_that_begins_late() -> None:
    """As the automatic way's: a generator over a loader that gives a rank its part."""

    def batches(loader: DataLoader[Any]) -> Iterator[Any]:
        yield from loader

    torch.manual_seed(2)
    loader = LOADERS["shuffled"]()
    position = follow(loader)
    iterator = iter(loader)
    next(iterator), next(iterator)
    saved, random = position.saved(), randomness.capture()
    expected = [batch.tolist() for batch in iterator]
    again, part = LOADERS["shuffled"](), LOADERS["shuffled"]()
    later = follow(again)
    later.go_to(saved, lambda: randomness.restore(random))
    assert [batch.tolist() for batch in later.iterate(lambda: batches(part))] == expected
    assert (later.saved().started, later.saved().batches) == (1, 6)


def test_workers_see_the_same_samples() -> None:
    def run(loader: DataLoader[Any], count: int) -> list[list[int]]:
        return [batch.int().tolist() for number, batch in zip(range(count), loader, strict=False)]

    torch.manual_seed(4)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1)
    position = follow(loader)
    iterator = iter(loader)
    first = [next(iterator).int().tolist() for _ in range(3)]
    saved, random = position.saved(), randomness.capture()
    rest = [batch.int().tolist() for batch in iterator]
    again = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    follow(again).go_to(saved, lambda: randomness.restore(random))
    assert run(again, 9) == rest
    assert len(first) + len(rest) == 6 == len(run(again, 9))  # the epoch after it is whole
    del iterator, again


def test_more_ranks_pass_over_fewer_batches() -> None:
    def loader(ranks: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(Noisy(), ranks, 0, shuffle=False)
        return DataLoader(Noisy(), batch_size=2, sampler=sampler)

    two = loader(2)
    position = follow(two)
    iterator = iter(two)
    for _ in range(4):
        next(iterator)
    four = loader(4)
    follow(four).go_to(position.saved())
    assert next(iter(four)).int().tolist() == [16, 20]  # 4 batches of 2 ranks were 16 samples


def test_variables_that_the_loop_changes() -> None:
    namespace: dict[str, Any] = {"epochs": 3, "losses": [1.0], "model": torch.nn.Linear(1, 1), "_private": 1}
    variables = Variables(namespace)
    namespace["losses"].append(2.0)
    namespace |= {"best": 0.5, "loss": torch.ones(1), "seen": {1: (2, "x")}}
    changed = variables.changed()
    assert changed == {"losses": [1.0, 2.0], "best": 0.5, "seen": {1: (2, "x")}}
    losses: list[float] = []
    later: dict[str, Any] = {"epochs": 5, "losses": losses}
    Variables(later).restore(changed)
    assert later["losses"] is losses == [1.0, 2.0]
    assert later["epochs"] == 5 and later["best"] == 0.5
