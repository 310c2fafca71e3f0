"""What a tensor can be with respect to the samples of the batch.

Every kind is a claim about the tensor of the same name in a run on one device with the *global* batch, of which this
rank holds a slice:

``Same``     it has the rank's value: parameters, constants.
``Noise``    it was drawn from a random generator; nothing of the batch is in it.
``Rows``     along ``dim`` it is the ranks' tensors one after the other; each index belongs to one sample.
``Total``    no dimension of samples is left. ``den`` None: the ranks' values add up to it (a sum).
             Else it is ``Σ den_r · value_r / Σ den_r`` over the ranks r (a mean: ``den`` counts samples).
``Mixed``    samples are combined in another way; no such formula exists.
``Unknown``  there is no rule for an operation on its way.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """A line of source, the innermost outside torch."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Owners:
    """For each index along a tensor's dimension of samples, the sample it belongs to.

    ``vector`` is int64 on the CPU. ``selection`` identifies the mask that chose the rows, if their number differs
    between samples; else None. ``shuffled``: the order is random. ``order`` identifies the sort that put the rows in
    another order than the samples; else None.
    """

    def __init__(
        self,
        vector: torch.Tensor,
        samples: int,
        selection: Hashable | None = None,
        *,
        shuffled: bool = False,
        order: Hashable | None = None,
    ) -> None:
        self.vector, self.samples, self.selection = vector, samples, selection
        self.shuffled, self.order = shuffled, order

    def __len__(self) -> int:
        return len(self.vector)

    def agrees(self, other: Owners) -> bool:
        """Whether index i belongs to the same sample in both."""
        return self is other or (self.order == other.order and torch.equal(self.vector, other.vector))

    def with_vector(self, vector: torch.Tensor) -> Owners:
        return self.but(vector=vector)

    def but(self, **changes: Any) -> Owners:
        names = ("vector", "samples", "selection", "shuffled", "order")
        return Owners(**{name: getattr(self, name) for name in names} | changes)

    @functools.cached_property
    def even(self) -> bool:
        """Whether all samples have the same number of rows."""
        counts = torch.bincount(self.vector, minlength=self.samples)
        return bool((counts == counts[0]).all())

    @functools.cached_property
    def by_sample(self) -> torch.Tensor:
        """The indices in the order of their samples, ``[samples, rows per sample]``; for ``even`` owners only."""
        return torch.argsort(self.vector, stable=True).view(self.samples, -1)


@dataclass(frozen=True)
class Den:
    """The weight of a rank's value in a mean. Equal ``token``: weights are proportional on every rank, at every step.

    ``full``: some rows could have been left out (``ignore_index``), but none was.
    """

    token: Hashable
    value: float | torch.Tensor = field(compare=False)
    full: bool = False

    @property
    def counts_samples(self) -> bool:
        return self.full or (isinstance(self.token, tuple) and self.token[0] == "samples")


@dataclass(frozen=True)
class Same:
    pass


@dataclass(frozen=True)
class Noise:
    pass


@dataclass(frozen=True)
class Rows:
    """``over``: the sum over the batch by which the rows are divided already."""

    dim: int
    owners: Owners
    over: Den | None = None


@dataclass(frozen=True)
class Positions:
    """Rows whose values are positions in this rank's slice: they may only index it.

    They come from ``nonzero``, from a sort (``owners.order``), or from the inverse of that sort (``undoes``).
    """

    dim: int
    owners: Owners
    undoes: bool = False


@dataclass(frozen=True)
class Total:
    """``counts``: how many elements were summed; if the sum is divided by such a number, its ``Den`` is the divisor.

    ``floored``: the sum was clamped from below; it may only be a divisor.
    """

    den: Den | None = None
    counts: frozenset[tuple[int, Den]] = frozenset()
    floored: bool = False

    @property
    def name(self) -> str:
        return "sum over the batch" if self.den is None else "mean over the batch"


@dataclass(frozen=True)
class Mixed:
    operation: str
    why: str
    place: Place | None


@dataclass(frozen=True)
class Unknown:
    operation: str
    why: str
    place: Place | None


Kind = Same | Noise | Rows | Positions | Total | Mixed | Unknown

SAME = Same()
NOISE = Noise()


@dataclass(frozen=True)
class Suspect:
    """A number in the arithmetic that may or may not come from the size of this rank's slice.

    ``spread``: the number of copies of something that does not depend on the batch, not summed so far.
    """

    value: float
    whole: bool
    place: Place | None
    spread: bool = False


@dataclass(frozen=True)
class Fact:
    """What is known of one tensor. ``number``: equal for equal expressions. ``time``: a logical time stamp."""

    kind: Kind
    number: int
    time: int
    notes: frozenset[str] = frozenset()
    suspects: frozenset[Suspect] = frozenset()

    def of_kind(self, kind: Kind) -> Fact:
        return replace(self, kind=kind)


class MixesError(Exception):
    """Raised by a rule: the operation combines samples."""


class NoRuleError(Exception):
    """Raised by a rule: what the operation does to samples is not known."""

    def __init__(self, why: str = "is an operation of which it is not known whether it treats samples apart") -> None:
        super().__init__(why)


def uniform(tensor: torch.Tensor, dim: int, owners: Owners) -> bool:
    """Whether a tensor that does not depend on the batch has the same values for all samples along ``dim``."""
    if tensor.size(dim) == 1 or tensor.stride(dim) == 0:
        return True
    rows = tensor.detach().movedim(dim, 0)
    if owners.selection is None and owners.even and len(rows) == len(owners):
        rows = rows[owners.by_sample.to(rows.device)]
    return bool((rows == rows[:1]).all())


def regroup(sizes: Sequence[int], dim: int, owners: Owners, into: Sequence[int]) -> tuple[int, Owners]:
    """Where the samples of dimension ``dim`` are after a ``view`` of ``sizes`` as ``into``.

    Raises ``NoRuleError`` if they spread over two dimensions.
    """
    before, after = _group(sizes, dim, into)
    shape = [1] * len(before)
    shape[before.index(dim)] = sizes[dim]
    block = owners.vector.view(shape).expand([sizes[i] for i in before]).reshape([into[i] for i in after])
    moving = [
        position for position in range(block.dim()) if bool((block != block.narrow(position, 0, 1)).any())
    ]  # along these, the sample changes
    if len(moving) > 1:
        raise NoRuleError("folds the batch into two dimensions")
    if not moving:
        moving = [next((i for i in range(block.dim()) if block.size(i) > 1), 0)]
    line = block.movedim(moving[0], 0).reshape(block.size(moving[0]), -1)[:, 0]
    return after[moving[0]], owners.with_vector(line.contiguous())


def _group(sizes: Sequence[int], dim: int, into: Sequence[int]) -> tuple[list[int], list[int]]:
    """The smallest runs of dimensions of ``sizes`` (with ``dim``) and of ``into`` that hold the same elements."""
    i = j = 0
    while i < len(sizes):
        first, second = [i], list[int]()
        here, there = sizes[i], 1
        i += 1
        while here != there or (dim in first and not second):
            if (here > there or not second) and j < len(into):
                there *= into[j]
                second.append(j)
                j += 1
            elif i < len(sizes):
                here *= sizes[i]
                first.append(i)
                i += 1
            else:
                raise NoRuleError("has a shape that could not be followed")
        if dim in first:
            while i < len(sizes) and sizes[i] == 1:
                first.append(i)
                i += 1
            while j < len(into) and into[j] == 1:
                second.append(j)
                j += 1
            return first, second
    raise NoRuleError("has a shape that could not be followed")
