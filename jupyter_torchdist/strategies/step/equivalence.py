"""Compares a model before and after its layers are divided: one forward and backward each.

Tensor and context parallelism (``tensor``, ``context``) recognise layers by their form; they do not see the user code
between layers. So the same rows go through both models, without dropout. Outputs and gradients must be equal up to
rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ...protocol.errors import StrategyError
from ..core.context import ParallelContext
from ..core.dtensors import fill, local, whole
from ..core.rng import undone
from ..core.scatter import map_tensors, tensors_in
from ..core.side_effects import other_notes
from .halves import without_chance
from .no_trace import no_trace


@dataclass(frozen=True)
class Measure:
    """The norm of a tensor, and its products with a few vectors of random signs.

    For two tensors, the mean squared difference of their products estimates the squared norm of their difference
    (Achlioptas, *Database-friendly random projections*, 2003).
    """

    norm: float
    products: tuple[float, ...]

    def distance(self, other: Measure) -> float:
        """An estimate of the norm of the difference."""
        squares = [(one - two) ** 2 for one, two in zip(self.products, other.products, strict=True)]
        return math.sqrt(sum(squares) / len(squares))


@dataclass(frozen=True)
class Measures:
    """Measures of the outputs of a forward and of the gradients of parameters, by name."""

    outputs: dict[str, Measure]
    gradients: dict[str, Measure]
    notes: dict[str, Any] = field(default_factory=dict)
    """Side effects of a forward in training mode."""


FEW = 2
"""How many samples of a batch are compared. The undivided model and its gradients are in memory: more samples could
need more memory than any later step."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

ROUNDING = {torch.bfloat16: 0.2, torch.float16: 0.03, torch.float32: 5e-3, torch.float64: 1e-6}
"""Relative tolerance between two results; a wrong result differs by a tenth or more."""
NOISE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}
"""Tolerance relative to the largest norm: for gradients that are zero up to rounding."""

_PRODUCTS, _COLUMNS = 8, 4096
_INSTEAD = {
    "tp": "leave those layers whole (-O tp_plan=MODULE:STYLE,… names the others), or use --strategy fsdp",
    "cp": (
        "compute positions and masks before the blocks, where sequences are whole, and pass them in as arguments "
        "(sequence x width); compute what looks at all tokens (a mean over them) after the blocks; or use --strategy "
        "fsdp"
    ),
}


class Equivalence:
    """Measures a model before it is changed. Checks nothing if a rank lacks the weights or the memory."""

    def __init__(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        inputs: Inputs,
        samples: int | None,
        context: ParallelContext,
    ) -> None:
        """``samples``: how many samples ``inputs`` hold (only ``FEW`` are used); None: unknown. A collective call."""
        self._forward, self._module, self._inputs = forward, module, inputs
        self._before = Measures({}, {})
        self._lacking = any(parameter.is_meta for parameter in module.parameters())
        self._zero = [] if self._lacking else [name for name, one in module.named_parameters() if not one.any()]
        if not self._lacking and _someone(not self._fits(samples), context.device):
            self._lacking = True
            context.say(
                f"{type(module).__name__} is divided unchecked: the check needs a step of {FEW} samples of the "
                "undivided model, and there is not enough memory for it"
            )

    def _fits(self, samples: int | None) -> bool:
        """Measure ``FEW`` samples, or all if the model does not accept so few. False if out of memory."""
        given = self._inputs
        try:
            if samples is not None and samples > FEW:
                self._inputs = map_tensors(given, functools.partial(few, samples=samples))
                try:
                    self._before = self._measured()
                    return True
                except torch.OutOfMemoryError:
                    raise
                except Exception:  # noqa: BLE001  # the model has a fixed batch size
                    self._inputs = given
            self._before = self._measured()
        except torch.OutOfMemoryError:
            return False
        return True

    def compare(self, what: str, explain: Callable[[BaseException], StrategyError | None]) -> None:
        """Raise ``StrategyError`` if the model fails or computes something else after ``what`` has changed it."""
        if self._lacking:
            return
        try:
            after = self._measured()
        except StrategyError:
            raise
        except Exception as error:
            raise explain(error) or StrategyError(
                f"{type(self._module).__name__} cannot be computed once {what} has divided it: "
                f"{type(error).__name__}: {error}",
                _INSTEAD[what],
            ) from error
        where = other_notes(self._before.notes, after.notes)
        if where is not None:
            raise StrategyError(
                f"{type(self._module).__name__} stores something in {where} beside its outputs, "
                f"and with {what} a rank would store only the values of its part",
                "return it from the model's forward, or use --strategy fsdp",
            )
        kinds = [_kind_of(parameter) for parameter in self._module.parameters()] + _of_autocast(self._module)
        within, noise = max(ROUNDING[kind] for kind in kinds), max(NOISE[kind] for kind in kinds)
        earlier = self._before
        for before, now in ((earlier.outputs, after.outputs), (earlier.gradients, after.gradients)):
            least = noise * max((one.norm for one in before.values()), default=0.0)
            for name, one in before.items():
                other = now.get(name)
                if other is None or not one.distance(other) <= within * one.norm + least:
                    change = (
                        "missing"
                        if other is None
                        else f"off by {one.distance(other) / (one.norm or 1.0):.2g} of its norm"
                    )
                    raise StrategyError(
                        f"{what} would change what {type(self._module).__name__} computes: {name} is {change}",
                        _INSTEAD[what],
                    )

    def _measured(self) -> Measures:
        module, zero = self._module, self._zero
        with no_trace(module), undone(), _gradients_aside(module), _not_zero(module, zero), torch.enable_grad():
            module.eval()
            args, kwargs = map_tensors(self._inputs, lambda tensor: tensor.detach().clone())
            outputs = [one for one in tensors_in(self._forward(*args, **kwargs)) if one.is_floating_point()]
            found = {f"output {number}": _measure(output) for number, output in enumerate(outputs)}
            trained = [_signed_sum(output) for output in outputs if output.requires_grad]
            if trained:
                torch.autograd.backward([torch.stack(trained).sum()])
            gradients = {
                f"the gradient of {name}": _measure(parameter.grad)
                for name, parameter in self._module.named_parameters()
                if parameter.grad is not None
            }
        return Measures(found, gradients, self._noted())

    def _noted(self) -> dict[str, Any]:
        """The side effects of a forward in training mode; none if it draws random numbers."""
        args, kwargs = map_tensors(self._inputs, lambda tensor: tensor.detach().clone())
        with no_trace(self._module) as belongings, undone(), without_chance(self._module):
            state = torch.get_rng_state()
            made = self._forward(*args, **kwargs)
            by_chance = not torch.equal(state, torch.get_rng_state())
            del made
            notes: dict[str, Any] = {} if by_chance else belongings.noted() | belongings.changed()
            copied: dict[str, Any] = map_tensors(notes, lambda tensor: whole(tensor.detach()).clone())
            return copied


def few(tensor: torch.Tensor, samples: int | None, count: int = FEW) -> torch.Tensor:
    """The first samples of a batched tensor; other tensors unchanged."""
    is_of_the_batch = tensor.dim() and tensor.size(0) == samples and not isinstance(tensor, nn.Parameter)
    return tensor[:count] if is_of_the_batch else tensor


def _someone(lacks: bool, device: torch.device) -> bool:
    """Whether any rank of the job ``lacks`` something; a collective call."""
    told = torch.tensor(float(lacks), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told.item())


def _signed_sum(output: torch.Tensor) -> torch.Tensor:
    """The sum of all elements with random signs, which are equal on all ranks."""
    full = whole(output).float()
    columns, rows = _signs(full.numel(), full.device)
    signs = (rows[:, :1] * columns[:, 0]).flatten()[: full.numel()].view(full.shape)
    total: torch.Tensor = (full * signs).sum() / math.sqrt(max(1, full.numel()))
    return total


@torch.no_grad()
def _measure(tensor: torch.Tensor) -> Measure:
    values = whole(tensor.detach()).flatten().float().nan_to_num(0.0, 0.0, 0.0)  # infinities of a mask
    columns, rows = _signs(values.numel(), values.device)
    padded = functional.pad(values, (0, len(rows) * len(columns) - len(values)))
    products = ((padded.view(len(rows), len(columns)) @ columns) * rows).sum(0)
    return Measure(float(values.norm()), tuple(products.tolist()))


def _signs(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random signs of columns and rows; their products are the signs of ``count`` elements. Equal at each call."""
    generator = torch.Generator().manual_seed(2003)
    columns, rows = (
        torch.randint(2, (size, _PRODUCTS), generator=generator).mul(2).sub(1).float().to(device)
        for size in (_COLUMNS, max(1, -(-count // _COLUMNS)))
    )
    return columns, rows


def _kind_of(parameter: torch.Tensor) -> torch.dtype:
    """The dtype that limits the precision of computations with ``parameter``."""
    tensor_cores = parameter.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    rounded = torch.float16 if tensor_cores else parameter.dtype  # TF32 has the precision of fp16
    return rounded if rounded in ROUNDING else torch.float32


def _of_autocast(module: nn.Module) -> list[torch.dtype]:
    """The dtypes of the cell's active autocast contexts."""
    devices = {parameter.device.type for parameter in module.parameters()}
    found = [torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)]
    return [kind for kind in found if kind in ROUNDING]


@contextmanager
def _not_zero(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Give random values to parameters that are all zero: they would hide errors in the layers before them."""
    parameters = [parameter for name, parameter in module.named_parameters() if name in names]
    generator = torch.Generator().manual_seed(2003)
    for parameter in parameters:
        scale = max(1, *parameter.shape[-1:]) ** -0.5
        values = torch.randn(parameter.shape, generator=generator).mul(scale).to(parameter.device)
        if isinstance(parameter, DTensor):
            fill(parameter, values)
        else:
            parameter.data.copy_(values)
    try:
        yield
    finally:
        for parameter in parameters:
            local(parameter).data.zero_()


@contextmanager
def _gradients_aside(module: nn.Module) -> Iterator[None]:
    """Discard gradients computed within, without hooks of the cell; restore the previous ones afterwards."""
    kept = [(parameter, parameter.grad, parameter._backward_hooks) for parameter in module.parameters()]
    for parameter, _, _ in kept:
        parameter.grad = parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, gradient, hooks in kept:
            parameter.grad, parameter._backward_hooks = gradient, hooks
