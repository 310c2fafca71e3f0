"""Watches two steps of a training loop: may each rank be given only its part of the batch?

It may when no number in the loop would change: the losses are means or sums over the samples, no other number of the
batch is read, none is carried from one step to the next, and the model gets only the batch.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...torch_private.autograd import in_backward, number_of_function_modes
from ...torch_private.places import disable_current_modes, pop_function_mode, push_function_mode
from ...torch_private.tensors import TENSOR_FILE
from ...usercode.frames import is_ours, is_users, users_frame
from ..analysis.batchwise import BatchwiseTracker
from ..analysis.divisors import divisor_of, form_of
from ..analysis.lattice import Noise, Rows, Same
from ..analysis.rules import IGNORED, ONE_SAMPLE, RANDOM, SYNCHRONISE
from ..analysis.slices import Slices
from ..analysis.verdicts import Judgement, Verdict
from ..core.scatter import tensors_in
from ..step.batch_consistency import Print
from ..step.ways import AddedParts, JoinedRows, Way

STEPS = 2
"""The second step shows which tensors were kept from the first."""

_READS = {
    "item",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "numpy",
    "tolist",
    "__array__",
    "__repr__",
    "__format__",
    "__dlpack__",
    "__reduce_ex__",
    "__contains__",
    "register_hook",
    "retain_grad",
}
"""Methods that give user code the numbers of a tensor or of its gradient."""
_NUMBERS = {
    "_local_scalar_dense.default": "item",
    "equal.default": "equal",
    "allclose.default": "allclose",
    "_linalg_check_errors.default": "a check that may raise",
}
"""Operations that give Python, or an operation that takes numbers, the numbers of a tensor."""
_SIZES = {"size", "numel", "nelement", "__len__", "stride"}
_PIECES = {"unbind": 1, "split": 2, "chunk": 2, "tensor_split": 2}
"""Methods that give user code a tensor in pieces, and where they take its dimension; iteration calls the first."""


class Numbers(TorchFunctionMode):
    """Reports the tensors whose numbers or sizes user code reads."""

    def __init__(
        self, read: Callable[[torch.Tensor, str], None], sized: Callable[[torch.Tensor, int | None], None]
    ) -> None:
        super().__init__()
        self._read, self._sized = read, sized

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if args and isinstance(args[0], torch.Tensor):
            if name in _READS:
                self._read(args[0], name)
            elif name in _SIZES:
                self._sized(args[0], args[1] if len(args) > 1 and isinstance(args[1], int) else None)
            elif name in _PIECES:
                self._sized(args[0], _dimension(_PIECES[name], args, kwargs or {}))
            elif name == "__get__" and owner is torch.Tensor.shape:
                self._sized(args[0], None)
        return func(*args, **(kwargs or {}))


def _dimension(place: int, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    given = args[place] if len(args) > place else kwargs.get("dim", 0)
    return given if isinstance(given, int) else 0


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Without the function modes that watch: else torch.compile would compile again when they are gone (step 3)."""
    modes = [pop_function_mode() for _ in range(number_of_function_modes())]
    for mode in reversed(modes):
        if not isinstance(mode, (Numbers, Slices)):
            push_function_mode(mode)
    try:
        yield
    finally:
        for _ in range(number_of_function_modes()):
            pop_function_mode()
        for mode in reversed(modes):
            push_function_mode(mode)


@dataclass
class LoopWatch:
    """The watched steps of one loop. ``reason``: a message why batches are not divided; None if they may be."""

    constants: tuple[float, ...] = ()
    claimed: AddedParts | None = None
    """How losses are joined, if the user has set it; then they are not judged."""
    reason: str | None = None
    steps: int = 0
    losses: AddedParts | None = None
    forms: set[tuple[str, ...]] = field(default_factory=set)
    """The forms of the losses that were judged."""
    seen: Print = field(default_factory=list)
    """The fingerprint of the first batch, to compare it between ranks."""
    _tracker: _LoopTracker | None = None
    _numbers: Numbers | None = None
    _hooks: tuple[RemovableHandle, ...] = ()
    _made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _backwards: int = 0
    _forwards: int = 0
    _counted: bool = False
    _samples: int = 0

    @property
    def done(self) -> bool:
        """True after the same number of steps on all ranks, because a branch on one rank may object only there."""
        return self.steps >= STEPS

    def begin(self, batch: Any, samples: int) -> None:
        """A step is about to begin with this batch."""
        self._samples, self._backwards, self._forwards = samples, 0, 0
        earlier = [tensor for known in self._made if (tensor := known()) is not None]
        self._tracker = _LoopTracker(self, samples, self.constants, earlier)
        self._tracker.enters(batch, samples)
        self._numbers = Numbers(self.read, self._sized)
        steps, stepped = self._tracker.steps, self._tracker.stepped
        self._hooks = register_optimizer_step_pre_hook(steps), register_optimizer_step_post_hook(stepped)

    def resume(self) -> None:
        """From now on user code works on this batch."""
        if self._tracker is not None and self._numbers is not None:
            self._tracker.__enter__()
            self._numbers.__enter__()  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        """Until ``resume`` user code works on another batch or on none."""
        if self._tracker is not None and self._numbers is not None:
            self._numbers.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._tracker.__exit__(None, None, None)

    def end(self) -> None:
        """The step is over and already paused: the loop asks for the next batch, or ends."""
        if self._tracker is None:
            return
        for hook in self._hooks:
            hook.remove()
        if not self._backwards:
            self.object("a batch was used without a call of backward()")
        if not self._forwards:
            self.object("no distributed model is called")
        self.steps += 1
        if self.steps > 1 and any(known() is not None for known in self._made):
            self.object("a tensor made from one batch is still kept in the next step")
        self._made = [weakref.ref(tensor) for tensor in self._tracker.of_the_batch()]
        self._tracker = self._numbers = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Operations in this context are not watched: the model's forward, a backward."""
        tracker, self._tracker = self._tracker, None
        try:
            with disable_current_modes(), _unseen():
                yield
        finally:
            self._tracker = tracker

    def object(self, reason: str) -> None:
        """Record why batches are not divided. The first reason is kept."""
        self.reason = self.reason or reason

    def forward(self, tensors: Sequence[torch.Tensor]) -> None:
        """A root module is called with ``tensors``."""
        if self._tracker is None:
            return
        self._forwards += 1
        batched = [tensor for tensor in tensors if tensor.dim() and tensor.size(0) == self._samples]
        rows = [self._tracker.kind(tensor) for tensor in batched]
        self._heed(frozenset().union(*(self._tracker.fact(tensor).notes for tensor in batched)))
        if not rows or not all(isinstance(kind, Rows) and kind.dim == 0 and kind.over is None for kind in rows):
            self.object("the model is called with something other than the batch")
        if any(RANDOM in self._tracker.fact(tensor).notes for tensor in tensors):
            self.object("the model is called with random numbers that the loop draws")

    def forwarded(self, outputs: Sequence[torch.Tensor], ways: Sequence[Way]) -> None:
        """The module returned ``outputs``. ``ways``: how the ranks' parts give them; empty: it was not divided."""
        if self._tracker is None:
            return
        if len(ways) != len(outputs):
            self.object("the model was called with a batch that cannot be divided")
        for output, way in zip(outputs, ways, strict=False):
            if isinstance(way, JoinedRows) and way.turns:
                self.object("an output of the model repeats all samples one after the other (first to last, and again)")
            elif isinstance(way, JoinedRows):
                self._tracker.returned(output, self._samples, way.dim)
            elif isinstance(way, AddedParts):
                self._tracker.reduced(output, self._samples, mean=way.mean)
                self._counted |= way.counted

    def backward(self, losses: Sequence[torch.Tensor], shown: Sequence[torch.Tensor]) -> None:
        """``backward`` was called on ``losses``. The tensors of ``shown`` have the global value from here on."""
        if self._tracker is None:
            return
        self._backwards += 1
        if self.claimed is not None:
            self.losses = self.claimed
        for loss in losses if self.claimed is None else ():
            verdict = self._tracker.verdict(loss)
            found = way_of(loss, verdict, counted=self._counted)
            if found is None:
                reason = _OF_SOME if verdict.judgement is Judgement.MEAN else verdict.reason
                self.object(reason + (f" ({verdict.place})" if verdict.place else ""))
                return
            self._heed(verdict.notes)
            if self.losses is not None and self.losses != found:
                self.object("one loss is a mean and another a sum")
            self.losses = found
            self.forms.add(form_of(loss))
        for value in shown:
            self._tracker.is_global(value)

    def _heed(self, notes: frozenset[str]) -> None:
        """Object to values that need all rows together: random numbers drawn for each sample, statistics."""
        if RANDOM in notes:
            self.object(f"the loop {RANDOM}")
        for note in notes & {SYNCHRONISE, ONE_SAMPLE}:
            self.object(note)

    def read(self, tensor: torch.Tensor, name: str) -> None:
        """Numbers are read by user code, or by a library that it calls. Reads by torch itself do not count."""
        if self._tracker is None or isinstance(self._tracker.kind(tensor), Same):
            return
        frame = _asking()
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame is not None and not is_ours(frame.f_code.co_filename):
            self.object(f"{_place(frame)} reads numbers of the batch ({name.strip('_')})")

    def _sized(self, tensor: torch.Tensor, dim: int | None) -> None:
        if self._tracker is None or not isinstance(kind := self._tracker.kind(tensor), Rows):
            return
        frame = _asking()
        if frame is None or not is_users(frame.f_code.co_filename):
            return
        dim = _index_taken(frame) if dim is None else dim
        if dim is None or dim % tensor.dim() == kind.dim:
            self.object(f"{_place(frame)} reads the number of samples")


def way_of(loss: torch.Tensor, verdict: Verdict, *, counted: bool) -> AddedParts | None:
    """How the ranks' values of a loss are joined; None if they cannot be. ``counted``: the model computed the mean."""
    if verdict.judgement is Judgement.SUM:
        return AddedParts(mean=False)
    if verdict.judgement in (Judgement.MEAN, Judgement.RATIO):
        divisor = divisor_of(loss)
        if counted:
            return AddedParts(mean=True, counted=True)
        if divisor is not None and verdict.weight is not None and float(divisor) == float(verdict.weight):
            return AddedParts(mean=True, counted=True)
        if verdict.judgement is Judgement.MEAN and IGNORED not in verdict.notes:
            return AddedParts(mean=True)
    return None


_OF_SOME = "the loss is a mean over the samples or targets that a mask or ignore_index leaves"
_TORCH = torch.__file__.rpartition("/")[0] + "/"
_OVERRIDES = (torch.overrides.__file__, TENSOR_FILE)


class _LoopTracker(BatchwiseTracker):
    """Follows the loop's own operations. The model's forward is judged elsewhere."""

    def __init__(
        self, watch: LoopWatch, samples: int, constants: tuple[float, ...], earlier: Sequence[torch.Tensor]
    ) -> None:
        """``earlier``: what the step before has computed of its batch."""
        super().__init__(total=samples, constants=constants)
        self._watch, self._stepping = watch, False
        self._earlier = {id(tensor): weakref.ref(tensor) for tensor in earlier}

    def steps(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step of one of PyTorch's optimizers begins: many operations, and none uses a batch but in a closure."""
        self._stepping = type(optimizer).__module__.startswith("torch.optim.") and len(args) == 1 and not kwargs

    def stepped(self, *_: object) -> None:
        """It has ended."""
        self._stepping = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._stepping:
            return func(*args, **(kwargs or {}))
        if not in_backward():
            self._look_for_strangers(args)
            self._look_for_the_past(args)
            if (name := _NUMBERS.get(func.__name__)) is not None:  # ``counts[label, guess]`` calls no method of a label
                for tensor in tensors_in(args):
                    self._watch.read(tensor, name)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def is_global(self, loss: torch.Tensor) -> None:
        """From here on ``loss``, and tensors that share its memory, have the global value on every rank."""
        for tensor in list(self._facts):
            if tensor is loss or (tensor.numel() == 1 and tensor.data_ptr() == loss.data_ptr()):
                self._facts.pop(tensor, None)

    def _look_for_strangers(self, args: Sequence[Any]) -> None:
        """Object to tensors as long as the batch but not made from it (noise, indices): their length would be wrong."""
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        kinds = [self.kind(one) for one in tensors]
        if not any(isinstance(kind, Rows) for kind in kinds):
            return
        for tensor, kind in zip(tensors, kinds, strict=True):
            as_long = tensor.dim() > 0 and tensor.size(0) == self.samples() > 1
            if as_long and isinstance(kind, Same | Noise) and not isinstance(tensor, torch.nn.Parameter):
                self._watch.object("a tensor has as many rows as the batch but is not made from it")

    def _look_for_the_past(self, args: Sequence[Any]) -> None:
        for tensor in tensors_in(args) if self._earlier else ():
            known = self._earlier.get(id(tensor))
            if known is not None and known() is tensor:
                self._watch.object("a tensor made from one batch is used in the next step")


def _asking() -> FrameType | None:
    """The frame that called the current function of a tensor: below the frames of ``Numbers`` and torch's overrides."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Numbers.__torch_function__.__code__:
        frame = frame.f_back
    while frame is not None and (
        frame.f_code is Numbers.__torch_function__.__code__ or frame.f_code.co_filename in _OVERRIDES
    ):
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> str:
    """The line of user code that ``frame`` runs for."""
    users = users_frame(frame)
    return f"line {users.f_lineno}" if users is not None else "a library"


def _index_taken(frame: FrameType) -> int | None:
    """``1`` if the code continues as ``x.shape[1]``; None if it takes the whole shape, or if this is unknown."""
    after = [one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti]
    after = [one for one in after if one.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG")][:2]
    if len(after) == 2 and after[0].opname == "LOAD_CONST" and after[1].opname in ("BINARY_SUBSCR", "BINARY_OP"):
        index = after[0].argval
        return index if isinstance(index, int) else None
    return None
