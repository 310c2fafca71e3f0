"""The argument of rules (``Call``), their registry, and helpers for all families of rules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

from .lattice import SAME, Den, Kind, MixesError, Noise, NoRuleError, Owners, Rows, Same, Suspect, Total, uniform
from .numerals import Origin

PAIRS = "pairs samples at random; each rank pairs only its own samples"
RANDOM = "draws random numbers, different ones on each rank"
SYNCHRONISE = "batch normalisation takes its statistics over the batch: synchronise it"
FOR_POSITIONS = {
    *("select", "slice", "unbind", "squeeze", "split", "index", "index_select", "_to_copy", "detach", "alias"),
    *("sort", "scatter", "scatter_"),
}

FACTORIES = {
    *("empty", "zeros", "ones", "full", "arange", "eye", "linspace", "logspace", "scalar_tensor", "empty_strided"),
    *("tril_indices", "triu_indices", "hann_window", "hamming_window", "lift_fresh"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "_efficientzerotensor"),
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
}

IGNORED = "assumes that no target is ignored, as in the first step"
ONE_SAMPLE = "was judged by a batch of one sample, in which samples cannot be told apart"
PACK = "_pack_padded_sequence"
ATTENUATED = "a tiny constant added to a divisor counts once a rank"


class Follower(Protocol):
    """The tracker's interface for rules."""

    def kind(self, tensor: torch.Tensor) -> Kind: ...
    def number(self, thing: object) -> Hashable: ...
    def number_of(self, name: str, *parts: Hashable) -> int: ...
    def suspects_of(self, tensor: torch.Tensor) -> frozenset[Suspect]: ...
    def samples(self) -> int: ...
    def is_all_positions(self, tensor: torch.Tensor) -> bool: ...
    def owners(self, samples: int) -> Owners: ...
    def read_number(self, value: float) -> tuple[Kind, Hashable] | None: ...
    def origin(self, value: float) -> Origin: ...
    def suspect(self, value: float) -> Suspect: ...
    def is_read(self, bound: Any) -> bool: ...
    def is_known(self, value: float) -> bool: ...


class Call:
    """One executed operation: its arguments by name, and its result."""

    def __init__(self, follower: Follower, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.follower, self.func = follower, func
        self.name: str = func._schema.name.removeprefix("aten::")
        self.overload: str = func._overloadname
        self.arguments = dict(bound(func, args, kwargs))
        self.tensors = list(tensors_in(self.arguments.values()))
        self.writes = written_by(func, self.arguments) if func._schema.is_mutable else []
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.shape_before = self.writes[0].shape if self.writes else None
        self.before: torch.Tensor | None = None
        """A copy of the written tensor before the write, if it did not depend on the batch; next, of its base."""
        self.base_before: torch.Tensor | None = None
        self.out: Any = None
        self.notes: set[str] = set()
        self.suspects: set[Suspect] = set()

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def makes(self) -> bool:
        """Whether the operation is a factory: the result uses no values of tensor arguments."""
        return self.name in FACTORIES

    @property
    def numbers(self) -> Iterator[float]:
        """Python numbers passed as tensors or scalars; not sizes or dimensions."""
        for argument in self.func._schema.arguments:
            value = self.arguments[argument.name]
            if type(value) in (int, float) and (
                "number" in (kind := str(argument.type)) or kind in ("Tensor", "float")
            ):
                yield value

    @property
    def in_python(self) -> bool:
        """Whether Python code called the operator; composites in C++ pass numbers by ``Scalar`` overloads."""
        return self.overload not in {"Scalar", "Scalar_mode"}

    def kind(self, thing: object) -> Kind:
        return self.follower.kind(thing) if isinstance(thing, torch.Tensor) else SAME

    def rows(self, name: str = "self") -> tuple[torch.Tensor, Rows] | None:
        """The argument and its rows; None if it does not depend on the batch. Raises ``MixesError`` for totals."""
        tensor = self[name]
        kind = self.kind(tensor)
        if isinstance(kind, Rows):
            plain(kind)
            return tensor, kind
        refuse_totals(self.name, kind)
        return None

    def samples_token_of(self, samples: int) -> Den:
        return Den(("samples", samples), samples)


Rule = Callable[[Call], Kind | Sequence[Kind]]
R = TypeVar("R", bound=Rule)
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[R], R]:
    """Register a rule for operations with these names and their in-place forms."""

    def register(function: R) -> R:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument.name, args[index]
        elif argument.name in kwargs:
            yield argument.name, kwargs[argument.name]
        else:
            yield argument.name, argument.default_value if argument.has_default_value() else None


def written_by(func: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    return [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in([arguments[argument.name]])
    ]


def tensors_in(things: Any) -> Iterator[torch.Tensor]:
    for thing in things:
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, (list, tuple)):
            yield from tensors_in(thing)


def plain(kind: Rows) -> Rows:
    """``kind``. Raises ``MixesError`` for shares of a sum: only linear operations have rules for them."""
    if kind.over is not None:
        raise MixesError("uses what was divided by a sum over the batch, and does not only add it up")
    return kind


def refuse_totals(name: str, *kinds: Kind) -> None:
    for kind in kinds:
        if isinstance(kind, Total):
            raise MixesError(f"of a {kind.name} is not the {kind.name.split()[0]} of {name}")


def wrapped(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def dims_of(given: Any, ndim: int) -> list[int]:
    """A ``dim`` argument as a list; None and ``[]`` mean all dimensions."""
    if given is None or given == []:
        return list(range(ndim))
    return sorted(wrapped(d, ndim) for d in ([given] if isinstance(given, int) else given))


def without(dim: int, dims: Sequence[int], keepdim: bool) -> int:
    """The index of ``dim`` after a reduction over ``dims``."""
    return dim if keepdim else dim - sum(d < dim for d in dims)


def merged(call: Call, rows: Sequence[Owners]) -> Owners:
    """The common owners of several operands. Raises ``MixesError`` if they differ."""
    first = next((owners for owners in rows if not owners.shuffled), rows[0])
    for other in rows:
        if not first.agrees(other):
            if not other.shuffled:
                raise MixesError("combines the rows of different samples")
            call.notes.add(PAIRS)
    return first


def even_operand(call: Call, tensor: torch.Tensor, kind: Kind, dim: int, owners: Owners) -> None:
    """Raise unless an operand without samples has equal values for all samples along ``dim``."""
    if any(tensor is one for one in call.writes) and call.before is not None:
        tensor = call.before
    if isinstance(kind, Noise):
        call.notes.add(RANDOM)
    elif not uniform(tensor, dim, owners):
        raise MixesError("treats a sample by its position in the batch")


def elementwise(call: Call, tensors: Sequence[torch.Tensor], ndim: int) -> Kind:
    """The kind of an elementwise result with broadcasting; ``ndim``: number of dimensions of the result."""
    kinds = [call.kind(tensor) for tensor in tensors]
    refuse_totals(call.name, *kinds)
    found = [(tensor, plain(kind)) for tensor, kind in zip(tensors, kinds, strict=True) if isinstance(kind, Rows)]
    if not found:
        return SAME
    places = {kind.dim - tensor.dim() + ndim for tensor, kind in found}
    if len(places) > 1:
        raise MixesError("broadcasts samples against samples: compare the shapes")
    (dim,) = places
    owners = merged(call, [kind.owners for _, kind in found])
    for tensor, kind in zip(tensors, kinds, strict=True):
        if isinstance(kind, Same | Noise) and (own := dim - ndim + tensor.dim()) >= 0:
            if tensor.size(own) not in (1, len(owners)):
                raise NoRuleError("broadcasts a batch of one sample")
            even_operand(call, tensor, kind, own, owners)
        if not isinstance(kind, Rows):
            _widened(call, tensor, [rows for rows, _ in found], dim - ndim)
    return Rows(dim, owners)


def _widened(call: Call, tensor: torch.Tensor, rows: Sequence[torch.Tensor], dim: int) -> None:
    """Note copies, one per sample, along another dimension than the samples: ``[B, 1] * ones(B)``. ``dim`` < 0."""
    if not any(suspect.spread for suspect in call.follower.suspects_of(tensor)):
        return
    samples = call.follower.samples()
    for at in range(-tensor.dim(), 0):
        if at != dim and tensor.size(at) % samples == 0 and all(at < -one.dim() or one.size(at) == 1 for one in rows):
            call.suspects.add(call.follower.suspect(samples))
