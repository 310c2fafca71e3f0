"""What a loader makes of a sample is compared with what it makes of it beside others."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from jupyter_torchdist.checkpoint import randomness
from jupyter_torchdist.strategies.loop.collating import Collate, loads_batches
from jupyter_torchdist.strategies.loop.sampler_rng import Drawn

PADDED = "its batches are padded to the longest of their samples"
LOADED = "its dataset loads whole batches (__getitems__), and may pad them"
OTHER = "its collate_fn makes other values of samples beside others"


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    before = randomness.capture()
    randomness.seed(0)
    yield
    randomness.restore(before)


def series(*lengths: int) -> list[Tensor]:
    return [torch.randn(length, 3) for length in lengths]


def rows(count: int) -> list[tuple[Tensor, int]]:
    return [(torch.randn(4), number % 2) for number in range(count)]


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def stacked(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}


def centred(samples: list[tuple[Tensor, int]]) -> Tensor:
    x = torch.stack([x for x, _ in samples])
    return x - x.mean(0)


def noisy(samples: list[tuple[Tensor, int]]) -> Tensor:
    return torch.stack([x + torch.randn(4) * random.random() for x, _ in samples])


def tokens(samples: list[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """As tokenizers pad lists of numbers."""
    longest = max(len(one["ids"]) for one in samples)
    return {"ids": torch.tensor([one["ids"] + [0] * (longest - len(one["ids"])) for one in samples])}


def to_a_length(samples: list[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    return {"ids": torch.tensor([(one["ids"] + [0] * 9)[:9] for one in samples])}


def words(samples: list[str]) -> Tensor:
    return pad_sequence([torch.tensor([ord(letter) for letter in one]) for one in samples], batch_first=True)


IDS = [{"ids": [1, 2, 3]}, {"ids": [4, 5, 6]}, {"ids": [7, 8, 9]}, {"ids": [1, 1, 1]}]

CASES: dict[str, tuple[Callable[[Any], Any], list[Any], str | None]] = {
    "padded": (padded, series(3, 5, 2, 4), PADDED),
    "padded, the longest on this rank": (padded, series(5, 2, 3, 4), PADDED),
    "padded, all as long by chance": (padded, series(4, 4, 4, 4), PADDED),
    "padded numbers, all as many by chance": (tokens, IDS, PADDED),
    "padded words, all as long by chance": (words, ["abc", "def", "ghi", "jkl"], PADDED),
    "padded to a length": (to_a_length, IDS, None),
    "stacked": (stacked, rows(4), None),
    "of fewer samples than ranks": (stacked, rows(1), None),
    "centred": (centred, rows(4), OTHER),
    "noise": (noisy, rows(4), None),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_objections(name: str, rank: int) -> None:
    own, samples, objection = CASES[name]
    collate = pickle.loads(pickle.dumps(Collate(own, rank, 2, Drawn(None))))  # as it goes to workers
    made, why = collate(samples)
    assert why == objection
    assert {type(made)} == {type(own(samples))}


def test_only_the_first_batch_is_compared_and_nothing_more_is_drawn_or_left() -> None:
    asked: list[int] = []

    def counting(samples: list[tuple[Tensor, int]]) -> Tensor:
        asked.append(len(samples))
        return noisy(samples)

    collate = Collate(counting, 0, 2, Drawn(None))
    samples = rows(4)
    state = randomness.capture()
    first, second = collate(samples)[0], collate(samples)[0]
    assert asked == [4, 4], "what the other calls have left is undone"
    randomness.restore(state)
    assert torch.equal(first, noisy(samples))
    assert torch.equal(second, noisy(samples))


def test_what_was_found_is_said_of_every_batch() -> None:
    """Another loop over the same loader asks later."""
    collate = Collate(padded, 0, 2, Drawn(None))
    assert [collate(series(*lengths))[1] for lengths in ((3, 5), (2, 2))] == [PADDED, PADDED]


class Whole(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Formatted(Whole):
    """As a data set of Hugging Face's: with a transform, it is given all samples of a batch at once."""

    def __init__(self, kind: str | None) -> None:
        self.format = {"type": kind}


def test_datasets_that_load_whole_batches() -> None:
    plain, whole = TensorDataset(torch.ones(3)), Whole()
    by_samples: list[Dataset[Any]] = [plain, Subset(plain, [0]), StackDataset(x=plain, y=plain), Formatted("torch")]
    by_batches: list[Dataset[Any]] = [whole, Subset(whole, [0]), StackDataset(plain, whole), Formatted("custom")]
    by_samples.append(ConcatDataset([plain, whole]))  # which asks for one after another
    assert [loads_batches(dataset) for dataset in by_samples] == [None] * 5
    assert [loads_batches(dataset) for dataset in by_batches] == [LOADED] * 4


def test_tensors_of_every_kind_may_be_kept_beside_the_samples() -> None:
    kinds = {
        "complex": torch.ones(2, dtype=torch.complex64),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "bool": torch.tensor([True]),
        "grows": torch.ones(1),
    }

    def growing(samples: list[tuple[Tensor, int]]) -> Tensor:
        kinds["grows"].data = torch.ones(len(kinds["grows"]) + 1)
        return torch.stack([one for one, _ in samples])

    collate = Collate(growing, 0, 2, Drawn(None, growing))
    collate.begins()
    collate(rows(4))
    assert len(kinds["grows"]) == 2, "what the other calls have left is undone"
    collate.begins()
    assert collate(rows(4))[1] is not None
