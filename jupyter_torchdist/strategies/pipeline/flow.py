"""Which tensors flow from stage to stage of a model, and one stage's part of its forward.

Every rank runs the user's own ``forward`` with all its Python code. It computes real values for its stage, and for
tensors that depend only on the inputs (masks, positions). All else is computed on fake tensors, which have shapes but
no values. A first run only on fake tensors finds the stage of each operation: the latest stage of its inputs, the stage
of its unit, or 0 if it first reads a parameter or draws random numbers. A tensor of an earlier stage that a later one
uses is received where the forward would create it, and the stages between pass it on. So skip connections, encoder
memory and tied weights need no special code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...protocol.errors import StrategyError
from ...torch_private.places import (
    FakeTensor,
    TorchDispatchMode,
    current_function_mode,
    pop_function_mode,
    push_function_mode,
)
from ...torch_private.tensors import GROUPED_MM
from ..core.outputs import opened, without_tensors
from ..core.scatter import map_tensors, tensors_in
from ..step.views import versions
from .stand_ins import Fakes
from .units import Call, Units

_TENSOR_PROPERTIES = ("T", "H", "mT", "mH", "data", "real", "imag", "grad")

_OF_NO_VALUE = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "__len__"),
    *("is_contiguous", "is_inference", "element_size", "get_device", "__repr__", "__format__", "__hash__", "type"),
    "__set__",
)
"""Functions that read or set properties that fake tensors also have."""

_RANDOM = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like", "dropout", "alpha_dropout", "feature_dropout"),
    *("uniform_", "normal_", "bernoulli_", "exponential_", "random_", "geometric_", "log_normal_", "cauchy_"),
)
"""Functions that draw random numbers."""
ALWAYS = -1
"""In place of a stage: computed on every rank, only from the inputs."""

OTHER_PATH = StrategyError(
    "the model's forward does other operations than in its trial: it depends on random numbers or on earlier calls",
    "let the forward do the same for all inputs of one shape, or use --strategy ddp or fsdp",
)

OTHER_LOSS = StrategyError(
    "the loss was a cross entropy in the first steps and is none now",
    "compute the same loss in all steps, or use --strategy ddp or fsdp",
)


def _in_place(what: str) -> StrategyError:
    return StrategyError(
        f"a pipeline cannot follow changes in place (+=, relu_, inplace=True): {what}",
        "write x = x + y instead of x += y there, and inplace=False; or use --strategy ddp or fsdp",
    )


@dataclass(frozen=True)
class Value:
    """A tensor that goes from one stage to the next."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class FlowStep:
    """One operation outside of units, or one call of a unit, with the numbers of its results."""

    name: str
    stage: int
    numbers: tuple[int, ...] = ()
    template: Any = None
    """The return value of a unit; tensors from its arguments are ``_Passed``."""


@dataclass(frozen=True)
class _Passed:
    position: int


@dataclass
class Flow:
    """All steps of a forward for inputs of one kind."""

    steps: list[FlowStep] = field(default_factory=list)
    entering: list[list[Value]] = field(default_factory=list)
    """The tensors that each stage receives."""
    outputs: Any = None
    """The return value of the forward, opened, with fake tensors."""
    left_out: list[str] = field(default_factory=list)
    """Classes of objects in the outputs that exist only on the ranks of their stages; None here."""
    holders: dict[nn.Parameter, set[int]] = field(default_factory=dict)
    """The stages that use a parameter."""
    units: dict[int, set[int]] = field(default_factory=dict)
    """The stages in which a unit is called."""
    draws: bool | None = None
    """Whether random numbers are drawn; None while unknown."""
    may_draw: bool = True
    """False if no operation of the trial draws random numbers."""
    _silent: dict[int, list[bool]] = field(default_factory=dict)

    def leaving(self, stage: int) -> set[int]:
        """The numbers of the tensors that a stage passes to the next stage."""
        return {value.number for value in self.entering[stage + 1]} if stage + 1 < len(self.entering) else set()

    def silent(self, stage: int) -> list[bool]:
        """For each step: True if the stage neither receives nor passes on its results. All False if it ends at once."""
        if stage not in self._silent:
            leaving = self.leaving(stage)
            crossing = leaving | {value.number for value in self.entering[stage]}
            goes_on = bool(leaving) or stage + 1 == len(self.entering)
            self._silent[stage] = [goes_on and crossing.isdisjoint(step.numbers) for step in self.steps]
        return self._silent[stage]


class _Draws(TorchDispatchMode):
    """Records whether an operation draws random numbers. Runs grouped matmul in bfloat16, the only dtype for fakes."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
            return func(*(one.bfloat16() for one in args[:2]), *args[2:], **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _counts(function: Any) -> bool:
    """Whether a function is a step: it makes or changes tensors."""
    name = function.__name__
    if name == "__get__":
        return getattr(function.__self__, "__name__", "") in _TENSOR_PROPERTIES
    return name not in _OF_NO_VALUE


def _results(function: Any, args: tuple[Any, ...], result: Any) -> list[Tensor]:
    """The tensors that an operation made or wrote to."""
    made = tensors_in(result)
    return made if made or function.__name__ not in ("__setitem__", "copy_") else [args[0]]


class Planner(TorchFunctionMode):
    """The run on fake tensors. ``calls``: the unit and the stage of each call of a unit, in order."""

    def __init__(self, units: Units, fakes: Fakes, calls: Sequence[tuple[int, int]], stages: int) -> None:
        super().__init__()
        self._units, self._fakes, self._calls, self._stages = units, fakes, calls, stages
        self._numbers: dict[int, int] = {}
        self._born: list[Tensor] = []
        self._stage_of: list[int] = []
        self._last_use: dict[int, int] = {}
        self._next_call = 0
        self._inside = False
        self._draws, self._began_with = _Draws(), torch.get_rng_state()  # type: ignore[no-untyped-call]
        self.flow = Flow()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or not _counts(func):
            return func(*args, **kwargs)
        used = tensors_in((args, kwargs))
        stage = max((self._stage(tensor) for tensor in used), default=ALWAYS)
        if stage == ALWAYS and (func.__name__ in _RANDOM or any(isinstance(t, nn.Parameter) for t in used)):
            stage = 0
        if stage == ALWAYS:
            self.flow.steps.append(FlowStep(func.__name__, ALWAYS))
            return func(*args, **kwargs)
        self._use(used, stage)
        before = versions(used)
        result = self._fakes.run(self._noting(func), args, kwargs)
        for tensor, now, version in zip(used, versions(used), before, strict=True):
            if now != version and len(self._views(tensor, stage)) > 1:
                raise _in_place(f"{func.__name__} changes a tensor of another stage that has a view")
        made = _results(func, args, result)
        if any(not isinstance(tensor, FakeTensor) for tensor in made):
            raise StrategyError(
                f"the model's forward writes into a tensor that all stages have, such as a buffer ({func.__name__})",
                "write into a copy (x = x * 2 instead of x *= 2), or use --strategy ddp or fsdp",
            )
        self.flow.steps.append(FlowStep(func.__name__, stage, self._number(made, stage)))
        return result

    def unit(self, number: int, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As ``Runner``."""
        if self._next_call >= len(self._calls) or self._calls[self._next_call][0] != number:
            raise OTHER_PATH
        stage = self._calls[self._next_call][1]
        self._next_call += 1
        used, module = tensors_in((args, kwargs)), self._units.modules[number]
        self._use([*used, *module.parameters()], stage)
        before = versions(used)
        self.flow.units.setdefault(number, set()).add(stage)
        places = {id(tensor): place for place, tensor in enumerate(used)}

        def stand_in(tensor: Tensor) -> Any:
            return _Passed(places[id(tensor)]) if id(tensor) in places else tensor.detach()

        self._inside = True
        try:
            with self._fakes.inside(module):
                outputs = self._noting(original)(*args, **kwargs)
            template = map_tensors(outputs, stand_in)
        finally:
            self._inside = False
        if versions(used) != before:
            raise _in_place(f"the forward of {type(module).__name__} changes its input")
        new = [tensor for tensor in tensors_in(outputs) if id(tensor) not in places]
        self.flow.steps.append(FlowStep(f"unit {number}", stage, self._number(new, stage), template))
        return outputs

    def _views(self, tensor: Tensor, stage: int) -> set[int]:
        """Tensors of earlier stages with the memory of ``tensor``: each is received with a memory of its own."""
        key = tensor.untyped_storage()._cdata
        born = zip(self._born, self._stage_of, strict=True)
        return {id(one) for one, at in born if at < stage and one.untyped_storage()._cdata == key}

    def _noting(self, function: Call) -> Call:
        """``function`` that records whether it draws. Call it on fakes, because their mode must be below this one."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            with self._draws:
                return function(*args, **kwargs)

        return noted

    def ends(self, outputs: Any) -> Flow:
        """The complete flow. Call it before random numbers are undone. The outputs are in the last stage."""
        self.flow.may_draw = self._draws.seen or not torch.equal(torch.get_rng_state(), self._began_with)
        outputs, self.flow.left_out = without_tensors(opened(outputs))
        self._use(tensors_in(outputs), self._stages - 1)
        self.flow.outputs = map_tensors(outputs, lambda tensor: tensor)
        self.flow.entering = [
            [
                Value(number, tensor.shape, tensor.dtype, tensor.requires_grad)
                for number, (tensor, born) in enumerate(zip(self._born, self._stage_of, strict=True))
                if born < stage <= self._last_use.get(number, ALWAYS)
            ]
            for stage in range(self._stages)
        ]
        return self.flow

    def _stage(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        return ALWAYS if number is None else self._stage_of[number]

    def _use(self, tensors: Sequence[Tensor], stage: int) -> None:
        for tensor in tensors:
            number = self._numbers.get(id(tensor))
            if number is not None:
                self._last_use[number] = max(stage, self._last_use.get(number, ALWAYS))
            elif isinstance(tensor, nn.Parameter):
                self.flow.holders.setdefault(tensor, set()).add(stage)

    def _number(self, tensors: Sequence[Tensor], stage: int) -> tuple[int, ...]:
        first = len(self._born)
        for tensor in tensors:
            self._numbers[id(tensor)] = len(self._born)
            self._born.append(tensor)
            self._stage_of.append(stage)
        return tuple(range(first, len(self._born)))


class _Done(BaseException):
    """Ends a forward when a stage has all tensors to pass on: the rest belongs to later stages."""


class StageRun(TorchFunctionMode):
    """One stage's part of a forward. ``received``: the tensors from the previous stage, by number."""

    def __init__(self, flow: Flow, stage: int, fakes: Fakes, received: dict[int, Tensor]) -> None:
        super().__init__()
        self._flow, self._stage, self._fakes, self._received = flow, stage, fakes, received
        self._leaving, self._silent = flow.leaving(stage), flow.silent(stage)
        self._last = stage + 1 == len(flow.entering)
        self._next = 0
        self._inside = False
        self.passed: dict[int, Tensor] = {}
        """The tensors for the next stage, by number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or not _counts(func):
            return func(*args, **kwargs)
        step = self._step(func.__name__)
        if step.stage not in (ALWAYS, self._stage):
            result = self._fakes.run(func, args, kwargs)
        else:
            self._check_real(tensors_in((args, kwargs)), func.__name__)
            result = func(*args, **kwargs)
        return self._noted(result, step, _results(func, args, result))

    def unit(self, number: int, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As ``Runner``. Operations inside of a unit are not steps.

        For speed this mode is removed inside, unless the cell has its own mode on top of it: this runs for every unit
        of each microbatch. Most units of other stages only return a fake tensor here.
        """
        step, silent = self._step(f"unit {number}"), self._silent[self._next - 1]
        if silent and step.stage != self._stage and isinstance(step.template, Tensor):
            return step.template
        above = current_function_mode() is self
        self._inside = True
        if above:
            pop_function_mode()
        try:
            return self._unit(step, silent, original, args, kwargs)
        finally:
            self._inside = False
            if above:
                push_function_mode(self)

    def _unit(self, step: FlowStep, silent: bool, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_in(args)
        if kwargs:
            given += tensors_in(kwargs)
        if step.stage == self._stage:
            self._check_real(given, step.name)
            outputs = original(*args, **kwargs)
            if silent:
                return outputs
            known = {id(tensor) for tensor in given}
            return self._noted(outputs, step, [one for one in tensors_in(outputs) if id(one) not in known])
        outputs = _filled(step.template, given)
        return outputs if silent else self._noted(outputs, step, tensors_in(step.template))

    def run(self, forward: Call, units: Units, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the stage: returns the outputs in the last stage, None in other stages."""
        try:
            with self, units.run_by(self):
                outputs = opened(forward(*args, **kwargs))
        except _Done:
            return None
        if not self._last:
            raise OTHER_PATH
        self._check_real(tensors_in(outputs), "the end")
        return outputs

    def _step(self, name: str) -> FlowStep:
        if self._next >= len(self._flow.steps) or self._flow.steps[self._next].name != name:
            raise OTHER_PATH
        self._next += 1
        return self._flow.steps[self._next - 1]

    def _noted(self, result: Any, step: FlowStep, made: Sequence[Tensor]) -> Any:
        """The result, with received tensors in place of fakes. Keeps tensors for the next stage."""
        if not self._received.keys().isdisjoint(step.numbers):
            numbers = {id(tensor): number for tensor, number in zip(made, step.numbers, strict=False)}
            result = map_tensors(result, lambda t: self._received.get(numbers.get(id(t), -1), t))
        for tensor, number in zip(made, step.numbers, strict=False):
            if number in self._leaving:
                self.passed[number] = self._received.get(number, tensor)
        if not self._last and len(self.passed) == len(self._leaving):
            raise _Done
        return result

    def _check_real(self, tensors: Sequence[Tensor], where: str) -> None:
        for tensor in tensors:
            if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
                continue
            raise StrategyError(
                f"at {where}, stage {self._stage} needs a tensor of another stage that was not sent to it (is a "
                "tensor changed in place, or a view of it?)",
                "write x = x + y instead of x += y between the blocks, or use --strategy ddp or fsdp",
            )


def _filled(template: Any, inputs: Sequence[Tensor]) -> Any:
    if isinstance(template, _Passed):
        return inputs[template.position]
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*(_filled(item, inputs) for item in template))
    if type(template) in (list, tuple):
        return type(template)(_filled(item, inputs) for item in template)
    if type(template) is dict:
        return {key: _filled(item, inputs) for key, item in template.items()}
    return template
