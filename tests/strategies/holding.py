"""A model that layers or sequences divide is held against itself as it was: by how much, and where it cannot be."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .languages import LENGTH, WORDS, Language
from .ranks import SAID, context, everyone
from .unchanged import equal, language

DIVISIONS = ("tp", "cp")
SEEN: list[Any] = []
"""What the forwards were given. Not of a function or class of a check: there a trial undoes what it leaves."""


def check_two_samples_are_enough() -> None:
    class Watched(Language):
        def forward(self, x: Tensor) -> Any:
            SEEN.append((self.training, len(x)))
            return super().forward(x)

    for one in DIVISIONS:
        SEEN.clear()
        equal(context({one: dist.get_world_size()}), language(Watched))
        tried = [rows for training, rows in SEEN if not training]
        assert tried == [2, 2], (one, SEEN)  # before it was divided, and after


def check_a_model_that_takes_its_batches_alone_is_held_by_a_whole_one() -> None:
    class OfFour(Language):
        def forward(self, x: Tensor) -> Any:
            if not self.training:
                SEEN.append(len(x))
            return super().forward(x).view(4, LENGTH, WORDS)

    for one in DIVISIONS:
        SEEN.clear()
        equal(context({one: dist.get_world_size()}), language(OfFour))
        assert SEEN == [2, 4, 4], (one, SEEN)


def check_one_rank_without_the_memory_for_it_is_enough_to_go_on_without() -> None:
    class Large(Language):
        """As on a GPU that holds this rank's part and not the whole."""

        def forward(self, x: Tensor) -> Any:
            whole = not any(isinstance(parameter, DTensor) for parameter in self.parameters())
            if not self.training and whole and dist.get_rank() == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return super().forward(x)

    for one in DIVISIONS:
        SAID.clear()
        equal(context({one: dist.get_world_size()}), language(Large))
        assert all(any("Large is divided unchecked" in line for line in said) for said in everyone(SAID)), one
