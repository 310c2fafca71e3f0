"""Inputs divided along the sequence: cut where they enter a region of the model, joined where they leave it.

A parameter inside gets the gradient of the rank's tokens times the number of ranks. So its mean over the ranks of
``group`` is the single-device gradient. Gradients that are equal on all ranks do not change when they are averaged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ...protocol.errors import StrategyError
from ...torch_private.autograd import at_end_of_backward
from ..core.ownership import INSTEAD_OF_A_COPY
from ..core.scatter import BatchShard, cut_rows, join_rows, map_tensors, tensors_in
from ..step.gradients import AtEndOfBackward, average_gradients
from ..step.views import no_view

Forward = Callable[..., Any]


class Tokens:
    """The current sequence: ``length`` tokens over the ranks of ``group``, along dimension 1."""

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self.group, self.what = group, what
        self.length = self.batch = 0
        self.are_whole = False
        """Every rank has all tokens: no gradient is needed, and the length is uneven or ``stay_whole`` is set."""
        self.stay_whole = False
        """Results are kept for later tokens (a cache), so without gradients the sequence is not divided."""
        self.in_flight = False
        """Each rank has its part: the tokens were cut and not joined yet."""

    @property
    def rows(self) -> BatchShard:
        return BatchShard(self.length, self.group)

    @property
    def part(self) -> int:
        """The number of tokens of a rank."""
        return self.length // int(self.group.size())

    def begins(self, hidden: torch.Tensor, *, or_whole: bool = False) -> None:
        """``hidden``: batch x sequence x width. Raises ``StrategyError`` if ranks do not divide the length evenly.

        ``or_whole``: such a sequence is not divided instead; for example a text that grows word by word.
        """
        ranks = int(self.group.size())
        if hidden.ndim != 3:
            raise StrategyError(
                f"{self.what} divides inputs of shape batch x sequence x width, and was given {list(hidden.shape)}",
                "add the missing dimension, or use fsdp",
            )
        self.batch, self.length = hidden.shape[:2]
        self.are_whole = or_whole and (self.length % ranks > 0 or self.stay_whole)
        if self.length % ranks and not self.are_whole:
            raise StrategyError(
                f"{self.what}: {self.length} tokens over {ranks} ranks do not divide evenly",
                f"pad the sequences to a multiple of {ranks}",
            )
        self.in_flight = not self.are_whole

    def cut(self, value: Any) -> Any:
        """This rank's tokens of every 3-dim tensor with the whole sequence in dimension 1 (masks have 4 dimensions)."""
        return map_tensors(value, lambda one: cut_rows(one, self.rows, 1) if self._has(one, self.length) else one)

    def cut_all(self, value: Any) -> Any:
        """As ``cut``, and also of tensors that are the same for all samples, such as rotary position embeddings."""

        def part(one: torch.Tensor) -> torch.Tensor:
            dim = 1 if self._has(one, self.length) else self._only(one)
            return one if dim is None else cut_rows(one, self.rows, dim)

        return map_tensors(value, part)

    def _only(self, tensor: torch.Tensor) -> int | None:
        """The sequence dimension of a tensor of shape: sequence, sequence x width; with any dimensions of size 1.

        None for a mask, whose last dimension is the sequence, and if it may be the dimension of the samples.
        """
        long = [dim for dim, size in enumerate(tensor.shape) if size != 1]
        if not long or len(long) > 2 or tensor.shape[long[0]] != self.length or tensor.shape.count(self.length) > 1:
            return None
        dim = long[0]
        ends, samples = dim == tensor.ndim - 1 > 0, dim == 0 and self.length == self.batch
        return None if ends or samples else dim

    def join(self, value: Any) -> Any:
        self.in_flight = False
        return map_tensors(
            value, lambda one: no_view(join_rows(one, self.rows, 1)) if self._has(one, self.part) else one
        )

    def _has(self, tensor: torch.Tensor, length: int) -> bool:
        return tensor.ndim == 3 and tensor.shape[1] == length


def refuse_copies(model: nn.Module, strategy: str) -> None:
    """Make ``copy.deepcopy`` of ``model`` fail: a copy would call the forward of the original."""

    def refuse(_memo: object) -> NoReturn:
        raise StrategyError(
            f"copy.deepcopy of {type(model).__name__}, which {strategy} has divided: a copy would not be divided",
            INSTEAD_OF_A_COPY,
        )

    vars(model)["__deepcopy__"] = refuse


def hidden_in(args: Sequence[Any], kwargs: dict[str, Any], module: nn.Module) -> torch.Tensor:
    """The hidden states that flow through the blocks: the first tensor in the arguments."""
    tensors = tensors_in((tuple(args), kwargs))
    if not tensors:
        raise StrategyError(f"{type(module).__name__} is called without a tensor", "pass the hidden states first")
    return tensors[0]


def around_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """``module.forward(...)`` becomes ``wrapper(original, ...)``, until ``restore.restore``."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    forward.__module__ = __name__
    vars(module)["forward"] = forward


def average_after_backward(model: nn.Module, group: dist.ProcessGroup, split_over_group: set[str]) -> None:
    """Average gradients over ``group`` at the end of each backward, except of the parameters named.

    Parameters are looked up at that time, because a strategy may have replaced them. It runs after FSDP's own callback
    at the end of the backward, which may be queued before or after this one.
    """

    def average() -> None:
        at_end_of_backward(lambda: average_gradients(_others(model, split_over_group), group))

    model.register_forward_hook(AtEndOfBackward(average).watch)


def _others(model: nn.Module, split: set[str]) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name not in split]
