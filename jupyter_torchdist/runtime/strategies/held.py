"""A model whose layers are divided, held against itself as it was: one forward and backward before, one after.

What divides a model's inside (``tensor``, ``context``) recognises layers by their form, and user code between them may
do what cannot be seen from there. So the same rows go through both, without dropout, and outputs and gradients must
be the same but for rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...protocol.errors import StrategyError
from .base import Setting
from .dtensors import whole
from .leavings import no_trace
from .shares import map_tensors, tensors_in
from .streams import undone

Measures = dict[str, tuple[float, float, float]]
"""By what was measured: norm, sum, number of elements."""

FEW = 2
"""Samples of a batch, which stand for all. The whole model is there, with gradients: more would need more memory than
any later step."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

ROUNDING = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 2e-3, torch.float64: 1e-6}


class Held:
    """Measures of a model, taken before it is changed. Nothing where a rank lacks the weights, or the memory."""

    def __init__(
        self, forward: Callable[..., Any], module: nn.Module, inputs: Inputs, samples: int | None, setting: Setting
    ) -> None:
        """``samples`` that ``inputs`` have, of which two are enough; None: not known. All ranks call it."""
        self._forward, self._module, self._inputs = forward, module, inputs
        self._before: Measures = {}
        self._lacking = any(parameter.is_meta for parameter in module.parameters())
        if not self._lacking and _someone(not self._fits(samples), setting.device):
            self._lacking = True
            setting.say(
                f"{type(module).__name__} is divided unchecked: what it is held against, a step of {FEW} samples by "
                "the undivided model, takes more memory than there is"
            )

    def _fits(self, samples: int | None) -> bool:
        """Measure two samples; all, where the model does not take two. False without the memory for that."""
        given = self._inputs
        try:
            if samples is not None and samples > FEW:
                self._inputs = map_tensors(given, functools.partial(few, samples=samples))
                try:
                    self._before = self._measured()
                    return True
                except torch.OutOfMemoryError:
                    raise
                except Exception:  # noqa: BLE001  # a batch size that is written in the model
                    self._inputs = given
            self._before = self._measured()
        except torch.OutOfMemoryError:
            return False
        return True

    def compare(self, what: str, explain: Callable[[BaseException], StrategyError | None]) -> None:
        """Raise ``StrategyError`` where the changed model computes something else, or nothing; ``what`` changed it."""
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
                _INSTEAD,
            ) from error
        within = max(ROUNDING.get(parameter.dtype, 2e-3) for parameter in self._module.parameters())
        for name, (norm, total, count) in self._before.items():
            other = after.get(name)
            scale = within * norm + 1e-6
            if other is None or abs(other[0] - norm) > scale or abs(other[1] - total) > scale * max(1.0, count**0.5):
                was = "missing" if other is None else f"{other[0]:.6g}"
                raise StrategyError(
                    f"{what} would change what {type(self._module).__name__} computes: the norm of {name} is {was}, "
                    f"on one device {norm:.6g}",
                    _INSTEAD,
                )

    def _measured(self) -> Measures:
        with no_trace(self._module), undone(), _gradients_aside(self._module), torch.enable_grad():
            self._module.eval()
            args, kwargs = map_tensors(self._inputs, lambda tensor: tensor.detach())
            outputs = [one for one in tensors_in(self._forward(*args, **kwargs)) if one.is_floating_point()]
            found = {f"output {number}": _measure(output) for number, output in enumerate(outputs)}
            trained = [_weighted(output) for output in outputs if output.requires_grad]
            if trained:
                torch.autograd.backward([torch.stack(trained).sum()])
            for name, parameter in self._module.named_parameters():
                if parameter.grad is not None:
                    found[f"the gradient of {name}"] = _measure(parameter.grad)
            return found


def few(tensor: torch.Tensor, samples: int | None, count: int = FEW) -> torch.Tensor:
    """The first samples of a tensor of a batch; another as it is."""
    is_of_the_batch = tensor.dim() and tensor.size(0) == samples and not isinstance(tensor, nn.Parameter)
    return tensor[:count] if is_of_the_batch else tensor


def _someone(lacks: bool, device: torch.device) -> bool:
    """Whether any rank of the job does; all ask."""
    told = torch.tensor(float(lacks), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told.item())


_INSTEAD = "leave those layers whole (-O tp_plan=MODULE:STYLE,… names the others), or use --strategy fsdp"


def _weighted(output: torch.Tensor) -> torch.Tensor:
    """A number into which every element enters differently, the same ones on all ranks."""
    full = whole(output)
    weights = torch.linspace(-1.0, 2.0, full.numel(), device=full.device).cos().view(full.shape)
    return (full.float() * weights).mean()


def _measure(tensor: torch.Tensor) -> tuple[float, float, float]:
    values = tensor.detach().double()
    return float(whole(values.square().sum())) ** 0.5, float(whole(values.sum())), float(tensor.numel())


@contextmanager
def _gradients_aside(module: nn.Module) -> Iterator[None]:
    """The gradients of within are forgotten, those of before come back."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
