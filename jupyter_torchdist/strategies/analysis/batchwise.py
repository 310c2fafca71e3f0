"""Is the scalar that ``backward()`` is called on a mean over the samples of the batch, a sum, or neither?

``BatchwiseTracker`` follows each operation of the first training step, below autograd. For any tensor it tells how the
ranks' values combine to the value on one device with the global batch. No operation is run twice. An operation without
a rule gives ``Unknown``.

Limits, by construction:

* Only tensors are followed. A Python number read from a tensor is remembered by its value; after Python arithmetic,
  a list or NumPy it is not recognised. A tensor made of such data counts as the same on all ranks
  if nothing of the batch was read before it was made, else as unknown.
* For an ``if`` on a value of the batch, only the branch taken is judged; ``branch`` tells that there was one.
* The backward formulas of custom ``autograd.Function``s, and hooks, are trusted to match their forward.
* Batches with the same number of samples are assumed to be sliced in the same way.
* A batch of one sample shows less (no order, no pairs): the verdict notes it. Ask a rank with two samples.
* Verdicts of ranks may differ (a mask that is full on one rank only): act only on what all ranks agree on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...torch_private.autograd import in_backward
from ...torch_private.places import TorchDispatchMode
from ...torch_private.tensors import is_pointwise
from ...usercode.frames import is_users
from . import rules_indexing, rules_layers, rules_losses, rules_pointwise, rules_products, rules_reductions, rules_views
from .bindings import chooses, decides
from .constants import drawn, is_counting, look_for_sizes, made, refuse_numbers_read, sized, spreads
from .kinds import _sound, _still, tensors_within
from .lattice import (
    NOISE,
    SAME,
    Den,
    Fact,
    Kind,
    Mixed,
    MixesError,
    Noise,
    NoRuleError,
    Owners,
    Place,
    Positions,
    Rows,
    Same,
    Suspect,
    Total,
    Unknown,
)
from .numerals import Origin, asking, origin, user_place
from .rules import FOR_POSITIONS, ONE_SAMPLE, PACK, RANDOM, RULES, Call, elementwise, tensors_in
from .slices import Slices
from .verdicts import Verdict, judged
from .writes import Writes

_FAMILIES = (
    rules_indexing,
    rules_layers,
    rules_losses,
    rules_pointwise,
    rules_products,
    rules_reductions,
    rules_views,
)

_NO_FACT = Fact(SAME, -1, -1)

_VIEWS = frozenset({"unsqueeze", "view", "expand", "alias", "reshape", "slice"})
"""Operations that change only the shape of a tensor of all positions (``is_all_positions``)."""


class BatchwiseTracker(TorchDispatchMode):
    """Follows the batch while it is active.

    ``total``: number of samples of the global batch. ``constants``: numbers that would be the same on one device (the
    length of the dataset or the loader); a sum may be divided by them.
    """

    def __init__(self, *, total: int | None = None, constants: Collection[float] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {float(number) for number in (*constants, *(() if total is None else (total,)))}
        self._facts: Any = WeakTensorKeyDictionary()
        self._numbers: dict[Hashable, int] = {}
        self._same: Any = WeakTensorKeyDictionary()
        self._fresh = itertools.count()
        self._clock = itertools.count(1)
        self._owners: dict[int, Owners] = {}
        self._read: dict[float, tuple[Kind, Hashable]] = {}
        self._counted: dict[int, tuple[Kind, Hashable]] = {}  # how many rows masks let through
        self._sizes: list[int] = []
        self.branch: Place | None = None
        """The first line of user code that branched on a value of the batch."""
        self._writes = Writes()
        self._opposites: dict[Hashable, int] = {}
        self._raw: Any = WeakTensorKeyDictionary()
        self._positions: Any = WeakTensorKeyDictionary()
        self._slices = Slices(self._rows, self.origin, self._limited, self.is_read)
        self._alone: Any = WeakTensorKeyDictionary()  # pieces of unsafe_split: their base must not be used again

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: the wrapper would import ``torch._dynamo`` on every rank, which takes seconds."""
        return False

    def __enter__(self) -> BatchwiseTracker:
        self._slices.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._slices.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------------------------------- what the caller asks

    def enters(self, batch: object, samples: int, dim: int = 0) -> None:
        """Mark every tensor in ``batch`` (nested containers, dataclasses): dimension ``dim`` holds the ``samples``."""
        if samples not in self._sizes:
            self._sizes.append(samples)
        for tensor in tensors_within(batch):
            if tensor.dim() > dim and tensor.size(dim) == samples:
                kind: Kind = Rows(dim, self.owners(samples))
            else:
                kind = Unknown("batch", "has a tensor whose first dimension is not the samples", None)
            self.learn(tensor, kind)

    def returned(self, tensor: torch.Tensor, samples: int, dim: int) -> None:
        """Mark an output of a model: along ``dim``, the rows of the first sample, then equally many of the next…"""
        owners, each = self.owners(samples), tensor.size(dim) // samples
        if each != 1:
            owners = owners.with_vector(owners.vector.repeat_interleave(each))
        self.learn(tensor, Rows(dim, owners))

    def reduced(self, tensor: torch.Tensor, samples: int, *, mean: bool) -> None:
        """Mark a scalar output of a model: a mean or a sum over the samples."""
        den = Den(("samples", samples), samples) if mean else None
        self.learn(tensor, Total(den))

    def learn(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Mark a tensor with a kind."""
        self._learn(tensor, Fact(kind, next(self._fresh), next(self._clock)))

    def of_the_batch(self) -> list[torch.Tensor]:
        """Live tensors that depend on the batch, except parameters."""
        return [
            tensor
            for tensor, fact in self._facts.items()
            if not isinstance(fact.kind, Same | Noise) and not (tensor.is_leaf and tensor.requires_grad)
        ]

    def verdict(self, loss: torch.Tensor) -> Verdict:
        """The verdict on ``loss``. Never a guess: ``UNKNOWN``, ``MIXED`` or ``AMBIGUOUS`` if it was not followed."""
        verdict = judged(self.fact(loss), loss)
        return replace(verdict, notes=verdict.notes | {ONE_SAMPLE}) if 1 in self._sizes else verdict

    # --------------------------------------------------------------------------------------------- what rules may ask

    def kind(self, tensor: torch.Tensor) -> Kind:
        return self.fact(tensor).kind

    def suspects_of(self, tensor: torch.Tensor) -> frozenset[Suspect]:
        return self.fact(tensor).suspects

    def fact(self, tensor: torch.Tensor) -> Fact:
        known: Fact = self._facts.get(tensor, _NO_FACT)
        return self._writes.seen_through(tensor, known)

    def samples(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def is_all_positions(self, tensor: torch.Tensor) -> bool:
        return tensor in self._positions

    def owners(self, samples: int) -> Owners:
        if samples not in self._owners:
            self._owners[samples] = Owners(torch.arange(samples, device="cpu"), samples)
        return self._owners[samples]

    def read_number(self, value: float) -> tuple[Kind, Hashable] | None:
        counted = self._counted.get(value) if isinstance(value, int) else None
        return self._read.get(float(value), counted)

    def origin(self, value: float) -> Origin:
        return origin(value, self._rows)

    def _rows(self, tensor: torch.Tensor) -> Rows | None:
        kind = self.kind(tensor)
        return kind if isinstance(kind, Rows) else None

    def is_read(self, bound: Any) -> bool:
        """Whether a bound was read from the batch, or may have been computed from a number that was."""
        if isinstance(bound, torch.Tensor):
            return not isinstance(self.kind(bound), Same | Noise)
        kinds = [kind for kind, _ in self._read.values() if not isinstance(kind, Same | Noise)]
        if not kinds or not isinstance(bound, int) or not bound:
            return False
        read, found = self.read_number(abs(bound)), self.origin(abs(bound))
        from_batch = read is not None and not isinstance(read[0], Same | Noise)
        return found is Origin.OPEN or (from_batch and found is not Origin.LITERAL)

    def _limited(self, tensor: torch.Tensor, why: str) -> None:
        kind = Mixed("slice", why, user_place())
        self.learn(tensor, kind)

    def suspect(self, value: float) -> Suspect:
        return Suspect(float(value), isinstance(value, int), user_place())

    def is_known(self, value: float) -> bool:
        return float(value) in self._known

    def number(self, thing: object) -> Hashable:
        """An identity: equal for equal expressions of equal operands."""
        if isinstance(thing, torch.Tensor):
            if (fact := self.fact(thing)).number >= 0:
                return fact.number
            if thing.is_inference():  # writes to it are not counted by _version
                return (-2 - next(self._fresh),)
            if thing not in self._same:
                self._same[thing] = (-2 - next(self._fresh), thing._version)
            stamp, version = self._same[thing]
            return (stamp, version, thing._version)
        if isinstance(thing, (list, tuple)):
            return tuple(self.number(part) for part in thing)
        return (type(thing).__name__, repr(thing))

    def number_of(self, name: str, *parts: Hashable) -> int:
        """The number of an operation on operands with these numbers."""
        return self._numbers.setdefault((name, *parts), next(self._fresh))

    # ------------------------------------------------------------------------------------------------------ following

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._sizes or func.namespace == "prim":
            return func(*args, **kwargs)
        if in_backward() and not torch.is_grad_enabled():
            return self._backward(func, args, kwargs)
        call = Call(self, func, args, kwargs)
        follows = any(self.fact(tensor) is not _NO_FACT for tensor in call.tensors)
        if follows and call.writes and self._is_followed(call):
            self._remember(call)
        call.out = func(*args, **kwargs)
        if call.name.startswith("unsafe_"):
            self._alone.update(dict.fromkeys(call.out, True))
        if follows or call.draws or call.makes or sized(call):
            self._follow(call)
        if call.name in _VIEWS and args[0] in self._positions:
            self._positions[call.out] = True
        return call.out

    def _backward(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Gradients taken without a graph are not followed: mark them unknown, in case a loss uses them."""
        out = func(*args, **kwargs)
        unknown = Unknown("backward", "is a gradient taken without create_graph", None)
        for tensor in tensors_in([out]):
            if not tensor.requires_grad:
                self.learn(tensor, unknown)
        return out

    def _is_followed(self, call: Call) -> bool:
        """Whether values of the batch are written into a tensor that does not depend on the batch."""
        kinds = [self.kind(tensor) for tensor in call.tensors]
        return isinstance(self.kind(call.writes[0]), Same) and any(isinstance(kind, Rows | Total) for kind in kinds)

    def _remember(self, call: Call) -> None:
        """Copy the tensor that will be written to, and its base."""
        written = call.writes[0]
        base = written if written._base is None else written._base
        kept = base.detach().clone()
        if base in self._raw or written in self._raw:
            kept.zero_()
        call.base_before = kept
        call.before = kept if base is written else written.detach().clone()

    def _follow(self, call: Call) -> None:
        kinds = self._kinds_of_results(call)
        facts = [self.fact(tensor) for tensor in call.tensors]
        notes = frozenset(call.notes).union(*(fact.notes for fact in facts))
        suspects = frozenset(call.suspects).union(*(fact.suspects for fact in facts))
        if isinstance(call.out, bool):  # of a tensor, or of ``allclose`` and ``equal``
            for fact in facts:
                self._note_branch(fact.kind, chooses)
            return
        if call.name == "_local_scalar_dense":
            if isinstance(kind := facts[0].kind, Mixed) and kind.operation == PACK and call.out == self.samples():
                return  # the number of sequences: a size
            self._note_branch(facts[0].kind, decides)
            doubtful = Unknown(
                call.name, "reads a value that may depend on the number of this rank's samples", user_place()
            )
            self._read[float(call.out)] = (doubtful if suspects else facts[0].kind, facts[0].number)
            return
        if spreads(call):
            suspects |= {Suspect(float(self.samples()), True, user_place(), spread=True)}
        number = next(self._fresh) if call.draws or call.writes else self._numbered(call)
        for index, (tensor, kind) in enumerate(kinds):
            if isinstance(kind, Same) and not suspects and self.fact(tensor) is _NO_FACT:
                continue
            numbered = number if index == 0 else self.number_of("result", number, index)
            fact = Fact(kind, numbered, next(self._clock), notes, _still(suspects, kind, call))
            self._note_count(tensor, kind, call)
            if any(tensor is written for written in call.writes):
                self._write(tensor, fact, call.base_before)
            else:
                self._learn(tensor, fact)

    def _note_branch(self, kind: Kind, may: Callable[[FrameType], bool]) -> None:
        """Note a branch of user code. Branches of libraries do not count: both ways give the same (a full mask)."""
        frame = None if isinstance(kind, Same | Noise) else asking()
        if frame is not None and is_users(frame.f_code.co_filename) and may(frame):
            self.branch = self.branch or Place(frame.f_code.co_filename, frame.f_lineno)

    def _note_count(self, tensor: torch.Tensor, kind: Kind, call: Call) -> None:
        """Remember sizes that depend on values (rows of a mask, unique values): Python can read them unseen."""
        if isinstance(kind, Rows | Positions) and kind.owners.selection is not None:
            for size in (len(kind.owners), tensor.numel()):
                self._counted[size] = (Total(), ("rows", kind.owners.selection))
        elif isinstance(kind, Mixed) and torch.Tag.dynamic_output_shape in call.func.tags and tensor.dim():
            self._counted[tensor.size(0)] = (kind, next(self._fresh))

    def _numbered(self, call: Call) -> int:
        operands = [self.number(argument) for argument in call.arguments.values()]
        number = self.number_of(call.name, *operands)
        if call.name == "eq":
            self._opposites[number] = self.number_of("ne", *operands)
        if call.name in {"bitwise_not", "logical_not"} and operands[0] in self._opposites:
            return self._opposites[operands[0]]
        return number

    def _write(self, tensor: torch.Tensor, fact: Fact, base: torch.Tensor | None) -> None:
        if tensor.requires_grad and tensor.is_leaf:
            return  # a parameter; the optimizer gives it the same value on every rank
        alone = tensor in self._alone
        self._learn(tensor, self._writes.record(tensor, self.fact(tensor), fact, base, alone=alone))

    def _learn(self, tensor: torch.Tensor, fact: Fact) -> None:
        self._facts[tensor] = fact

    def _kinds_of_results(self, call: Call) -> list[tuple[torch.Tensor, Kind]]:
        results = list(tensors_in([call.out]))
        if not results and call.writes:
            results = list(call.writes)
        try:
            kinds = self._ruled(call, results)
        except MixesError as error:
            kinds = [Mixed(call.name, str(error), user_place())] * len(results)
        except NoRuleError as error:
            kinds = [Unknown(call.name, str(error), user_place())] * len(results)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # A rule that does not support this form of its operation must not stop the training.
            kinds = [Unknown(call.name, f"could not be followed ({error})", user_place())] * len(results)
        return [(tensor, _sound(call, tensor, kind)) for tensor, kind in zip(results, kinds, strict=True)]

    def _ruled(self, call: Call, results: list[torch.Tensor]) -> list[Kind]:
        if call.makes:
            self._raw.update({tensor: True for tensor in results if "empty" in call.name})
            self._positions.update({call.out: True} if is_counting(call) else {})
            look_for_sizes(call)
            refuse_numbers_read(call)
            return [made(call, tensor) for tensor in results]
        given = [self.kind(tensor) for tensor in call.tensors]
        for kind in given:
            if isinstance(kind, Mixed):
                return [kind] * len(results)
        for kind in given:
            if isinstance(kind, Unknown):
                return [kind] * len(results)
        look_for_sizes(call)
        refuse_numbers_read(call)
        if any(isinstance(kind, Positions) for kind in given) and call.name not in FOR_POSITIONS:
            raise MixesError("uses positions in the batch as values")
        if call.draws:
            call.notes.add(RANDOM)
        if not any(isinstance(kind, Rows | Total | Positions) for kind in given):
            if call.draws:
                return [drawn(call, tensor) for tensor in results]
            return [NOISE if Noise() in given else SAME] * len(results)
        rule = RULES.get(call.name) or RULES.get(call.name.removesuffix("_"))
        if rule is None:
            if not _is_pointwise(call.func):
                raise NoRuleError
            return [elementwise(call, call.tensors, results[0].dim())] * len(results)
        ruled = rule(call)
        return list(ruled) if isinstance(ruled, Sequence) else [ruled] * len(results)


_is_pointwise = functools.lru_cache(maxsize=1024)(is_pointwise)
