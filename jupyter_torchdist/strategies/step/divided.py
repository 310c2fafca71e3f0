"""The training forward of a distributed model: each rank computes its rows of the batch; all ranks get all outputs.

Before the first forward of a kind, a trial runs the model on this rank's rows and follows each operation
(``batchwise``). A forward is divided only if it provably processes each sample independently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from ...protocol.errors import StrategyError
from ..analysis import packing
from ..analysis.divisors import divisor_of
from ..core.agreement import of_every_rank
from ..core.outputs import closed, opening
from ..core.ownership import own_class
from ..core.rng import OwnStream
from ..core.scatter import BatchShard, join_rows, map_tensors, tensors_in, weighted
from ..core.side_effects import Belongings
from . import batchnorm
from .batch_consistency import check_alike, fingerprint
from .holding import Held, holding
from .placing import Dims, cut, elsewhere, in_front, samples_in
from .trial import Refused, Trial, new_tensors
from .views import Unwritten
from .ways import AddedParts, Found, JoinedRows, Way

if TYPE_CHECKING:
    from .accumulating import Accumulation

WHOLE = "-O model=whole computes the whole batch on every rank: the same training, but no faster"
_TRUST = f"{WHOLE}; -O trust_model=1 divides it unchecked, if you know that no sample of a batch influences another"

_LOOKED_AT, _LATER = 100, 16
"""Forwards of a model after which it is looked for what they keep: the first ones, then one of so many.

A look takes half a millisecond for a model of 50 modules.
"""

Call = Callable[..., Any]


@dataclass(frozen=True)
class Learned:
    """The result of a trial. ``dims``: the dimensions of the samples in the inputs, if not the first."""

    found: Found
    dims: Dims | None = None

    @property
    def ways(self) -> tuple[Way, ...]:
        """How the outputs are joined."""
        return self.found.ways


def agreed(mine: Found | Refused, group: dist.ProcessGroup, parts: str) -> Found | Refused:
    """The result that all ranks found; if one rank refuses, all refuse."""
    found = of_every_rank(mine, group)
    refusal = next((one for one in found if isinstance(one, Refused)), None)
    if refusal is None and any(one != found[0] for one in found):
        return Refused(f"{parts} do not agree on how the outputs depend on the samples")
    return refusal or mine


class Divider:
    """Divides the forwards of all root modules in a job among the ranks of ``group``."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        accumulation: Accumulation | None = None,
        proving: AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008  # has no state
        *,
        whole: bool,
        trusted: bool,
        anywhere: bool = False,
    ) -> None:
        """``anywhere``: samples may be in another dimension of the inputs than the first. ``proving``: for trials."""
        self._proving = proving
        self._group, self._rank, self._accumulation = group, group.rank(), accumulation
        self._whole, self._trusted, self._anywhere = whole, trusted, anywhere and accumulation is None
        self._tried = Trial(self._rank, self.whole_batch, trusted=trusted, anywhere=self._anywhere)
        self._tried.follows_packing = accumulation is None
        self._known: dict[Hashable, Learned] = {}
        self._padded = packing.Padded(packing.over_ranks(group))
        self._left: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        self._forwards: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._flags: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()
        self._sharing: dict[int, batchnorm.Sharing | None] = {}
        self.counts: set[str] = set()
        """Attributes in which forwards keep integers that change with fewer samples."""
        self.samples: int | None = None
        """Number of samples in the last batch of a loader."""
        self.replicated = True
        """Whether the inputs of a forward are now the global batch, equal on all ranks."""
        self.divided = False
        """Whether a forward was divided: gradients are then partial."""
        self.ways: tuple[Way, ...] = ()
        """How the outputs of the last forward were combined from the ranks' parts; empty if it was not divided."""
        self.share: BatchShard | None = None
        """The samples of the last forward, with its outputs in their order; None if every rank computed all."""
        self.in_front = True
        """Whether the last forward had its samples in the first dimension (true if it was not divided)."""
        self.keeps = ""
        """An attribute or container in which the last forward has kept values of its samples; empty if none."""
        self.exact = True
        """Whether incoming gradients are equal on all ranks, as they are outside functional calls."""

    def __call__(self, forward: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``forward(*args, **kwargs)`` of a root module, divided. Raises ``StrategyError`` if that is not possible."""
        self.ways, self.in_front, self.share, self.keeps = (), True, None, ""
        share, learned, tensors = self._share(args, kwargs), None, tensors_in((args, kwargs))
        if not self._whole and share is not None:
            learned = self._known.get(_kind(module, (args, kwargs), tensors, share.total))
            learned = learned or self.learn(forward, module, args, kwargs, share)
            if learned.dims is not None:
                share = self._over(samples_in(tensors, learned.dims))
        if learned is None or share is None:
            with self.whole_batch():
                return self._undivided(forward, module, args, kwargs)
        dims = learned.dims or in_front(tensors, share.total)
        part_args, part_kwargs = cut((args, kwargs), share, dims)
        self.divided, self.in_front = True, learned.dims is None
        places = learned.found.places
        before = Belongings(module, places) if places else None
        held = self._held(module)
        with OwnStream(self._rank), Unwritten((part_args, part_kwargs)):
            outputs = self._in_parts(forward, module, part_args, part_kwargs, learned.ways, dims, share)
        self.ways, self.share = learned.ways, share if self.in_front else None
        self.keeps = min(places, default="")
        self._check_kept(module, held, share)
        kept = before.left() if before is not None else []
        made = tensors_in(outputs)
        known = [*made]
        for one in kept:
            known += new_tensors(one.value, known)
        # A hook may keep the first batch only.
        whole = self._joined(known, (*learned.ways, *learned.found.kept) if kept else learned.ways, share)
        for one in kept:
            one.put(map_tensors(one.value, lambda tensor: whole[id(tensor)]))
        joined = iter([whole[id(tensor)] for tensor in made])
        return closed(map_tensors(outputs, lambda _tensor: next(joined)))

    def _held(self, module: nn.Module) -> Held | None:
        """None where nothing is known of ``module``, where the user vouches for it, and for most forwards later on."""
        if not self._anywhere or self._trusted or module not in self._left:
            return None
        self._forwards[module] = done = self._forwards.get(module, 0) + 1
        return Held(module) if done <= _LOOKED_AT or done % _LATER == 0 else None

    def _check_kept(self, module: nn.Module, held: Held | None, share: BatchShard) -> None:
        """Raise ``StrategyError`` if a forward has kept samples in an attribute or container where no trial did."""
        where = held and held.unseen(self._left[module], share.mine.stop - share.mine.start)
        if where is not None:
            raise StrategyError(
                f"{own_class(module).__name__} keeps a tensor of its samples in {where}, and did not in its first "
                "steps: each rank would keep only its own samples",
                WHOLE,
            )

    @property
    def dividing(self) -> bool:
        """Whether forwards with a batch are divided among ranks."""
        return not self._whole and self._group.size() > 1

    def sliced(
        self, forward: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], share: BatchShard
    ) -> Any:
        """The forward of a loop whose inputs are already this rank's rows of the batch."""
        self.divided = True
        flags = _flags((args, kwargs))
        if flags not in self._flags.get(module, {flags}) and share.mine.stop - share.mine.start >= self._group.size():
            self.learn(forward, module, args, kwargs, BatchShard(share.mine.stop - share.mine.start, self._group))
        if self._accumulation is None:
            held = self._held(module)
            with OwnStream(self._rank), self._padded:
                outputs = forward(*args, **kwargs)
            self._check_kept(module, held, share)
            return outputs
        size, tensors = share.mine.stop - share.mine.start, tensors_in((args, kwargs))
        learned = self._known.get(_kind(module, (args, kwargs), tensors, size))
        ways, dims = None if learned is None else learned.ways, in_front(tensors, size)
        with OwnStream(self._rank):
            return closed(self._in_parts(forward, module, args, kwargs, ways, dims, share))

    def _undivided(self, forward: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward that is not divided among ranks: one rank only, or too few samples."""
        share = self._parts(args, kwargs)
        if share is None:
            return forward(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        learned = self._known.get(_kind(module, (args, kwargs), tensors, share.total))
        learned = learned or self.learn(forward, module, args, kwargs, share)
        dims = in_front(tensors, share.total)
        return closed(
            self._in_parts(forward, module, args, kwargs, learned.ways, dims, BatchShard(share.total, self._group))
        )

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchShard | None:
        """A batch on a single rank, divided into parts for accumulation; None if it is not divided."""
        total = self._total(args, kwargs)
        if self._accumulation is None or self._group.size() > 1 or total is None or total < self._accumulation.count:
            return None
        return BatchShard(total, self._accumulation.as_ranks)

    def _in_parts(
        self,
        forward: Call,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ways: tuple[Way, ...] | None,
        dims: Dims,
        share: BatchShard,
    ) -> Any:
        """The ``opened`` outputs of this rank's rows, computed in parts with gradient accumulation."""
        forward = opening(forward)
        if self._accumulation is None or ways is None:
            with self._padded:
                return forward(*args, **kwargs)
        return self._accumulation(forward, module, args, kwargs, ways, [dim is not None for dim in dims], share)

    def learn(
        self, forward: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], share: BatchShard
    ) -> Learned:
        """Find by a trial how the outputs of the ranks are combined. Raises ``StrategyError``."""
        with self._proving:
            learned = self._learned(forward, module, args, kwargs, share)
        self._known[_kind(module, (args, kwargs), tensors_in((args, kwargs)), share.total)] = learned
        self._flags.setdefault(module, set()).add(_flags((args, kwargs)))
        self.counts |= learned.found.counts
        self._left.setdefault(module, set()).update(learned.found.places, learned.found.others)
        return learned

    def _learned(
        self, forward: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], share: BatchShard
    ) -> Learned:
        if self.replicated:
            self._check_data(module, (args, kwargs))
        tensors, dims = tensors_in((args, kwargs)), None
        found = self._agreed(self._tried(forward, module, (args, kwargs), share, in_front(tensors, share.total)))
        if isinstance(found, Refused):
            other = self._found_elsewhere(forward, module, args, kwargs, share.total)
            if other is None:
                among = "among the ranks" if self._group.size() > 1 else "in parts"
                raise StrategyError(
                    f"{own_class(module).__name__} cannot be divided {among}: {found.reason}",
                    _TRUST if found.doubted else WHOLE,
                )
            found, dims = other
        return Learned(found, dims)

    def _found_elsewhere(
        self, forward: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], total: int
    ) -> tuple[Found, Dims] | None:
        """The result of a trial with the samples in another dimension; None if that is refused, too."""
        tensors = tensors_in((args, kwargs))
        for dims in elsewhere(tensors, total) if self._anywhere and not self._trusted else ():
            share = self._over(samples_in(tensors, dims))
            found = None if share is None else self._agreed(self._tried(forward, module, (args, kwargs), share, dims))
            if found is not None and not isinstance(found, Refused):
                return found, dims
        return None

    def ready(
        self, forward: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Way, ...] | None:
        """Run the trial before the module is changed; None if there is nothing to divide."""
        share = self._share(args, kwargs) or self._parts(args, kwargs)
        if share is None or self._whole:
            return None
        return self.learn(forward, module, args, kwargs, share).ways

    def part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs that this rank's forward will get."""
        share = self._share(args, kwargs)
        if self._whole or share is None:
            return args, kwargs
        found: tuple[tuple[Any, ...], dict[str, Any]] = cut(
            (args, kwargs), share, in_front(tensors_in((args, kwargs)), share.total)
        )
        return found

    def samples_of_part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The number of samples in ``part``; None unless a loader told the size of the batch."""
        if self.samples not in [tensor.size(0) for tensor in tensors_in((args, kwargs)) if tensor.dim()]:
            return None
        share = self._share(args, kwargs)
        return self.samples if self._whole or share is None else share.mine.stop - share.mine.start

    @property
    def synchronised(self) -> bool:
        """Whether batch normalisation is synchronised in some model."""
        return any(sharing is not None for sharing in self._sharing.values())

    def shares(self, module: nn.Module, sharing: batchnorm.Sharing | None) -> None:
        """Register the synchronised batch normalisation of a root module."""
        self._sharing[id(module)] = sharing

    def whole_batch(self) -> AbstractContextManager[None]:
        """Within it, every rank gives the global batch to its batch normalisation."""
        return batchnorm.whole_batch(*self._sharing.values())

    def _share(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchShard | None:
        """The rows to divide; None if there is no batch, only one rank, or fewer samples than ranks."""
        return None if self._group.size() == 1 else self._over(self._total(args, kwargs))

    def _over(self, samples: int | None) -> BatchShard | None:
        return BatchShard(samples, self._group) if samples is not None and samples >= self._group.size() else None

    def _total(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        sizes = [tensor.size(0) for tensor in tensors_in((args, kwargs)) if tensor.dim()]
        return self.samples if self.samples in sizes else sizes[0] if sizes else None

    def _agreed(self, mine: Found | Refused) -> Found | Refused:
        return agreed(mine, self._group, "the ranks' parts")

    def _check_data(self, module: nn.Module, given: Any) -> None:
        """Raise ``StrategyError`` if the ranks have different batches."""
        check_alike(
            of_every_rank(fingerprint(given), self._group), f"data in the first batch for {own_class(module).__name__}"
        )

    def _joined(self, parts: Sequence[torch.Tensor], ways: Sequence[Way], share: BatchShard) -> dict[int, torch.Tensor]:
        """The whole tensors by the identities of their parts."""
        if len(ways) != len(parts):
            raise _other_outputs()
        return {id(part): self._whole_of(part, way, share) for part, way in zip(parts, ways, strict=True)}

    def _whole_of(self, part: torch.Tensor, way: Way, share: BatchShard) -> torch.Tensor:
        if isinstance(way, JoinedRows):
            mine = share.mine.stop - share.mine.start
            if part.dim() <= way.dim or (part.size(way.dim) != mine if way.single else part.size(way.dim) % mine):
                raise _other_outputs()
            if way.turns:
                part = part.unflatten(way.dim, (-1, mine))
                return join_rows(part, share, way.dim + 1, exact=self.exact).flatten(way.dim, way.dim + 1)
            rows = BatchShard(share.total, share.group, part.size(way.dim) // mine)
            return join_rows(part, rows, way.dim, exact=self.exact)
        if isinstance(way, AddedParts):
            return weighted(part, weight_of(part, way, share), share.group)
        return part


def _other_outputs() -> StrategyError:
    return StrategyError("the model returns, or keeps in attributes, other tensors than in its trial", WHOLE)


def weight_of(part: torch.Tensor, way: AddedParts, share: BatchShard) -> float | torch.Tensor:
    """The weight of a rank's value in the value of the global batch. A collective call if ``counted``."""
    if not way.mean:
        return 1.0
    if not way.counted:
        return share.weight
    mine = targets_of(part)
    whole = mine.clone()
    dist.all_reduce(whole, group=share.group)
    weight: torch.Tensor = mine / whole
    return weight


def targets_of(loss: torch.Tensor) -> torch.Tensor:
    """The divisor of a rank's cross entropy. Raises ``StrategyError`` if the loss is no cross entropy."""
    found: torch.Tensor | None = divisor_of(loss)
    if found is None:
        raise StrategyError("the loss was a cross entropy in the first steps and is none now", WHOLE)
    return found


def _flags(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Hashable:
    """The arguments by which a forward is told to do something else."""
    args, kwargs = given
    found = [(name, value) for name, value in (*enumerate(args), *kwargs.items()) if isinstance(value, (bool, str))]
    return tuple(sorted(found, key=str))


def _kind(
    module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], tensors: Sequence[torch.Tensor], total: int
) -> Hashable:
    """A key: equal for forwards that share one trial. Sizes of 1 differ: they say nothing about larger sizes."""
    shapes = []
    for tensor in tensors:
        batch = tensor.dim() > 0 and tensor.size(0) == total
        shapes.append((batch, *(size == 1 for size in (tensor.shape[1:] if batch else tensor.shape))))
    mode = (module.training, torch.is_autocast_enabled(), _flags(given))
    return (id(module), mode, tuple(shapes), holding(module, total))
