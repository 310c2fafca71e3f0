"""``-O nonfinite``: a step whose gradients hold NaN or infinity is noticed by all ranks, before the optimizer takes it.

The gradients are looked at where an optimizer's step begins. So whatever the cell has done with them is seen, and a
step that a ``GradScaler`` leaves out is not counted. Ranks with all gradients find the same without a word; ranks with
shards, layers or stages agree by one number. On a GPU the flags are copied without waiting, and are read when the next
step begins; where the step must be stopped or left out, they are waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...protocol.errors import TrainingError
from ...protocol.options.strategy import chosen
from ...torch_private.tensors import all_finite, norms
from ..core.agreement import of_every_rank
from ..core.context import ParallelContext
from ..core.dtensors import local
from ..core.loading import trained_by
from ..core.patches import Patches
from ..sharded.trained_parameters import Optimized
from .origin import GRADIENTS, OUTPUTS, WIDE, Origin, Origins

GO_ON, STOP, SKIP = "go-on", "stop", "skip"
_DIVIDED = ("dp_shard", "tp", "pp")
"""Dimensions along which ranks have gradients of different parameters, or of parts of them."""
_SHOWN = 6
"""How many samples a sentence names."""


@dataclass
class _Looked:
    """What was found in the gradients of one step; ``vector`` has a number for each, finite if the gradient is.

    ``anywhere``: 1 if a gradient of some rank is not finite. ``ready``: the copies to the CPU, on a GPU.
    """

    step: int
    line: str
    parameters: list[nn.Parameter]
    vector: Tensor
    anywhere: Tensor | None
    origin: Callable[[], Origin]
    ready: Any = None


class Guard:
    """Looks at the gradients of a job's optimizers. ``step``: the number of the current step, the first is 1."""

    def __init__(self, context: ParallelContext, optimized: Optimized, step: Callable[[], int]) -> None:
        self._context, self._optimized, self._step = context, optimized, step
        self._mode = str(chosen(context.plan, "nonfinite"))
        self._exchanges = any(context.plan.degree(one) > 1 for one in _DIVIDED)
        self.later = context.device.type != "cpu" and self._mode == GO_ON
        """Whether flags are read when the next step begins."""
        self.origins = Origins(context.device)
        self._models: list[nn.Module] = []
        self._names: dict[nn.Parameter, str] = {}
        self._looked: _Looked | None = None
        self._held: dict[nn.Parameter, Tensor] = {}
        self._odd: list[int] = []
        self._new = False

    def install(self, patches: Patches) -> None:
        """Call it after everything else that acts when an optimizer's step begins."""
        patches.hook(register_optimizer_step_pre_hook(self._before))
        patches.hook(register_optimizer_step_post_hook(self._after))
        self.origins.install(patches)

    def knows(self, model: nn.Module, names: Mapping[str, nn.Parameter]) -> None:
        """``model`` is distributed; ``names``: its parameters as the cell has made them."""
        self._models.append(model)
        for name, parameter in names.items():
            self._names.setdefault(parameter, name)
        self._new = True

    def finish(self) -> None:
        """The cell has ended well: read the last flags, and say how many steps there were. All ranks must call it."""
        self._read_last()
        if len(self._odd) > 1:
            self._context.say(
                f"gradients were not finite in {len(self._odd)} steps, from step {self._odd[0]} to step {self._odd[-1]}"
            )

    def end(self) -> None:
        """Remove the hooks of parameters."""
        self.origins.end()

    # ------------------------------------------------------------------------------------------- an optimizer's step

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Looks at the gradients; with a closure, which computes them, each time that it was called."""
        if not self._models or all(known is not optimizer for known in self._optimized):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._look(optimizer)
            return None

        def looking() -> Any:
            loss = closure()
            self._look(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": looking}
        return (args[0], looking, *args[2:]), kwargs

    def _after(self, *_: object) -> None:
        for parameter, gradient in self._held.items():
            parameter.grad = gradient
        self._held.clear()

    @torch.no_grad()
    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler leaves the choice to the optimizer's own kernel
        self._read_last()
        if self._new:
            self.origins.look_at(self._models, self._in_order(self._optimized.parameters()))
            self._new = False
        parameters = [one for one in trained_by(optimizer) if one.grad is not None and not one.grad.is_meta]
        vector = _measured([_values(one.grad) for one in parameters], self._context.device)
        origin = self.origins.now()
        if vector is None and not self._exchanges:
            return
        vector = torch.zeros(len(parameters), device=self._context.device) if vector is None else vector
        looked = _Looked(self._step(), self.origins.line, parameters, vector, None, origin)
        if self._exchanges:
            looked.anywhere = (~torch.isfinite(vector)).any().to(torch.float32)
            dist.all_reduce(looked.anywhere, dist.ReduceOp.MAX)
        if self.later:
            _copy_aside(looked)
            self._looked = looked
        elif self._tell(looked) and self._mode == SKIP:
            for parameter in parameters:  # optimizers leave out what has no gradient, with its state and its steps
                self._held.setdefault(parameter, parameter.grad)  # type: ignore[arg-type]
                parameter.grad = None

    def _read_last(self) -> None:
        looked, self._looked = self._looked, None
        if looked is not None:
            self._tell(looked)

    # ------------------------------------------------------------------------------------------------------ in words

    def _tell(self, looked: _Looked) -> bool:
        """Whether the gradients of some rank were not finite. Says it the first time, or raises ``TrainingError``."""
        if looked.ready is not None:
            looked.ready.synchronize()
        odd = ~torch.isfinite(looked.vector)
        if not bool(odd.any() if looked.anywhere is None else looked.anywhere):
            return False
        first = not self._odd
        if looked.step not in self._odd[-1:]:
            self._odd.append(looked.step)
        if first:
            mine = [one for one, is_odd in zip(looked.parameters, odd.tolist(), strict=True) if is_odd]
            names = list(dict.fromkeys(self._names.values()))
            found = of_every_rank(([self.name(one) for one in mine], looked.origin()))
            sentence = in_words(looked.step, looked.line, names, found, staged=self._context.plan.degree("pp") > 1)
            if self._mode == STOP:
                raise TrainingError(
                    f"stopped before the optimizer's step, as -O nonfinite=stop asks: {sentence}",
                    "look at those samples and that layer; -O nonfinite=skip leaves such steps out",
                )
            self._context.say(f"{sentence}. {_DONE[self._mode]}")
        return True

    def name(self, parameter: nn.Parameter) -> str:
        """The name in the cell's model, for a parameter that may have replaced another one."""
        earlier = {
            new: old for places in (self._optimized.replaced, self._optimized.unseen) for old, new in places.items()
        }
        while parameter not in self._names and parameter in earlier:
            parameter = earlier[parameter]
        return self._names.get(parameter, "a parameter outside of the model")

    def _in_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        order = {name: place for place, name in enumerate(dict.fromkeys(self._names.values()))}
        return sorted(dict.fromkeys(parameters), key=lambda one: order.get(self.name(one), len(order)))


_DONE = {
    GO_ON: "The optimizer took them (said once; -O nonfinite=skip leaves such steps out, =stop ends the job there)",
    SKIP: "The step was left out: parameters and optimizer are as before it (said once)",
}


def _values(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    values = local(gradient)
    values = values.coalesce().values() if values.is_sparse else values
    return torch.view_as_real(values) if values.is_complex() else values


def _measured(gradients: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """A number for each gradient, which is finite exactly if the gradient is: one pass over them, no memory.

    None: all are finite.
    """
    if not gradients:
        return None
    if all(one.is_cuda and one.numel() for one in gradients):
        return torch.stack([one.to(torch.float32) for one in norms(list(gradients), float("inf"))])
    if all(one.is_cpu and one.is_floating_point() for one in gradients):
        with contextlib.suppress(RuntimeError):  # elements that share memory
            if all_finite(list(gradients)):
                return None
    sums = torch.tensor([_number(one) for one in gradients])
    for number in (~torch.isfinite(sums)).nonzero().flatten().tolist():
        if bool(torch.isfinite(gradients[number]).all()):  # the sum has overflowed
            sums[number] = 0.0
    return sums.to(device)


def _number(gradient: Tensor) -> float:
    return float(abs(gradient.sum(dtype=WIDE.get(gradient.dtype)).item()))


def _copy_aside(looked: _Looked) -> None:
    """Begin to copy the flags to the CPU."""
    if looked.vector.is_cuda:
        event = torch.cuda.Event()
        for name in ("vector", "anywhere"):
            source = getattr(looked, name)
            if source is not None:
                there = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                setattr(looked, name, there.copy_(source, non_blocking=True))
        event.record()
        looked.ready = event


def in_words(
    step: int, line: str, names: Sequence[str], found: Sequence[tuple[list[str], Origin]], *, staged: bool
) -> str:
    """``step 3: the gradients of 4 of 6 parameters are not finite, …``. ``found``: layers and origin of each rank.

    ``staged``: each rank has layers of its own.
    """
    place = {name: number for number, name in enumerate(names)}
    odd = sorted({name for layers, _ in found for name in layers}, key=lambda name: place.get(name, -1))
    said = f"step {step}: the gradients of {len(odd)} of {len(names)} parameters are not finite, in the backward first "
    said += odd[-1] if odd else "an unknown one"
    if line:
        said += f"; the loss is at {line}"
    origins = [origin for _, origin in found]
    what = OUTPUTS if any(origin.what == OUTPUTS for origin in origins) else GRADIENTS
    ranks = [rank for rank, origin in enumerate(origins) if origin.samples and origin.what == what]
    if ranks:
        samples = sorted({sample for rank in ranks for sample in origins[rank].samples})
        what += f" are not finite for {_counted('sample', samples)} of the batch"
        return f"{said}; from {_ranks(ranks, len(found))}: {what}"
    ranks = [rank for rank, origin in enumerate(origins) if origin.near]
    if staged:
        ranks = [rank for rank, (layers, _) in enumerate(found) if odd[-1:] and odd[-1] in layers]
    return f"{said}; from {_ranks(ranks, len(found))}" if ranks else said


def _ranks(ranks: Sequence[int], world: int) -> str:
    return "all ranks" if len(ranks) == world > 1 else _counted("rank", ranks)


def _counted(noun: str, numbers: Sequence[int]) -> str:
    """``sample 3``, ``samples 3 and 5``, ``samples 0, 1, 2, 3, 4, 5 … (40 in all)``."""
    shown = [str(number) for number in numbers[:_SHOWN]]
    if len(numbers) == 1:
        return f"{noun} {shown[0]}"
    if len(numbers) > _SHOWN:
        return f"{noun}s {', '.join(shown)} … ({len(numbers)} in all)"
    return f"{noun}s {', '.join(shown[:-1])} and {shown[-1]}"
