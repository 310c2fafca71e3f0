"""``--verify K``: the first K optimizer steps of a cell are compared with the steps of one device.

Rank 0 has a child process (``ranks/reference.py``) that runs the whole cell again without a strategy. It sends each
step's losses, gradients and parameters, and waits until rank 0 has taken them. Gradients tell a wrong step from
rounding: an optimizer such as Adam makes a large step of a gradient that is zero up to rounding.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...protocol.errors import StrategyError, TrainingError
from ...torch_private.autograd import in_backward
from ...usercode.frames import users_frame
from ..core.agreement import of_every_rank
from ..core.context import ParallelContext
from ..core.dtensors import whole
from ..core.loading import trained_by
from ..core.patches import Patches
from ..core.rng import OwnStream
from .equivalence import NOISE, ROUNDING

LEAVE_OUT = "leave --verify out"
_LOSSES = 1e-3
"""Relative tolerance between two losses."""


class Connection(Protocol):
    """One end of a pipe to another process. Objects go as bytes: a tensor's memory is not shared."""

    def send_bytes(self, data: bytes, /) -> None: ...
    def recv_bytes(self) -> bytes: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Loss:
    """The value of a loss and the line of its ``backward()``; None for a loss that is no number."""

    line: str
    value: float | None


@dataclass(frozen=True)
class Taken:
    """An optimizer step: the losses since the one before it, gradients and parameters in the optimizer's order."""

    names: list[str]
    losses: tuple[Loss, ...]
    gradients: list[Tensor | None]
    parameters: list[Tensor]


@dataclass(frozen=True)
class Ended:
    """The cell has ended on one device after ``steps``; ``error``: its exception in words, ``full``: of memory."""

    steps: int
    error: str = ""
    full: bool = False


class StepNotes:
    """Calls ``taken`` after each optimizer step of this process."""

    def __init__(self, taken: Callable[[Taken], None], name: Callable[[nn.Parameter], str] = lambda _: "") -> None:
        self._taken, self._name = taken, name
        self._losses: list[Loss] = []

    def install(self, patches: Patches) -> None:
        """Call it after everything else that patches ``backward()``: losses are then the ones of the whole batch."""
        patches.around(torch.autograd, "backward", self._backward)
        patches.hook(register_optimizer_step_post_hook(self._stepped))

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
        original(tensors, *args, **kwargs)
        frame = users_frame(sys._getframe(1))
        if frame is None or in_backward():
            return
        line = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        for loss in [tensors] if isinstance(tensors, Tensor) else list(tensors):
            self._losses.append(Loss(line, float(whole(loss.detach())) if loss.numel() == 1 else None))

    @torch.no_grad()
    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = trained_by(optimizer)
        gradients = [None if one.grad is None else _copied(one.grad) for one in parameters]
        losses, self._losses = tuple(self._losses), []
        names = [self._name(one) for one in parameters]
        self._taken(Taken(names, losses, gradients, [_copied(one) for one in parameters]))


def _copied(tensor: Tensor) -> Tensor:
    """The full values on the CPU; a collective call if ``tensor`` is sharded."""
    full = whole(tensor.detach())
    return (full.to_dense() if full.is_sparse else full).cpu().clone()


class Verifier:
    """Compares this job's first ``count`` steps, with ``reference`` on rank 0. ``name``: of a trained parameter."""

    def __init__(
        self, context: ParallelContext, reference: Connection | None, name: Callable[[nn.Parameter], str]
    ) -> None:
        self._context, self._reference = context, reference
        self._count, self._done, self._worst = context.plan.verify, 0, 0.0
        self._notes = StepNotes(self._compare, name)

    def begin(self, seed: int, patches: Patches) -> None:
        """The cell is about to run; ``seed``: of all ranks. Call it after everything else that patches torch."""
        if self._count:
            OwnStream.drew = False
            self._notes.install(patches)
        if self._reference is not None:
            self._reference.send_bytes(pickle.dumps(seed))

    def refuse(self, why: str) -> None:
        """The strategy does nothing. Raises ``StrategyError`` if steps were to be compared."""
        if self._count:
            raise StrategyError(f"--verify compares what the strategy does, but {why}", LEAVE_OUT)

    def finish(self) -> None:
        """The cell has ended well: one device must have ended, too. All ranks must call it."""
        if not self._count:
            return
        if not self._done:
            raise StrategyError(
                "--verify: the cell made no optimizer step, so there is nothing to compare with one device", LEAVE_OUT
            )
        said = None
        if self._reference is not None and not isinstance(self._next(), Ended):
            said = f"one device makes more steps than the {self._done} that the ranks made"
        self._all_told(said)
        self._say(f"{self._done} steps, all that the cell made")

    def end(self) -> None:
        """End the process of the reference."""
        self._count = 0
        if self._reference is not None:
            self._reference.close()
            self._reference = None

    def _say(self, what: str) -> None:
        distance = f"to {self._worst:.0e}".replace("e-0", "e-") if self._worst else "in every bit"
        self._context.say(f"verified {what}: equal {distance}")
        self.end()

    def _compare(self, mine: Taken) -> None:
        if not self._count:
            return
        if any(of_every_rank(OwnStream.drew)):
            raise StrategyError(
                "--verify: the model draws random numbers (dropout, noise), and each rank draws its own, so its steps "
                "cannot be the ones of one device",
                f"set the probability to 0, or {LEAVE_OUT}",
            )
        self._done += 1
        said = None
        if self._reference is not None:
            other = self._next()
            if isinstance(other, Ended):
                said = _ended(other)
            else:
                distance, said = compared(mine, other)
                self._worst = max(self._worst, distance)
        self._all_told(said)
        if self._done == self._count:
            self._say(f"{self._done} step{'s' if self._done > 1 else ''}")

    def _next(self) -> Any:
        assert self._reference is not None
        try:
            return pickle.loads(self._reference.recv_bytes())
        except EOFError:
            return Ended(self._done, "its process was killed")

    def _all_told(self, said: str | None) -> None:
        """Raise on all ranks what rank 0 has found."""
        found = of_every_rank(said)[0]
        if found is None:
            return
        self.end()
        if found.startswith(_REFUSED):
            raise StrategyError(f"--verify: {found}", LEAVE_OUT)
        raise TrainingError(
            f"--verify: step {self._done} is not the step of one device: {found}",
            "what the ranks compute otherwise begins at that line; options that trust the cell (-O trust_model, "
            "-O trust_loss, -O loss) may be wrong for it",
        )


_REFUSED = "on one device "


def _ended(other: Ended) -> str:
    if other.full:
        return f"{_REFUSED}there is not enough memory for the whole training: {other.error}"
    if other.error:
        return f"{_REFUSED}the cell fails after {other.steps} steps: {other.error}"
    return f"one device makes no more than {other.steps} steps"


def compared(mine: Taken, other: Taken) -> tuple[float, str | None]:
    """The largest relative distance of a parameter, and what differs by more than rounding, if anything does."""
    lines = [one.line for one in mine.losses], [one.line for one in other.losses]
    if lines[0] != lines[1]:
        return 0.0, f"backward() ran at {_listed(lines[0])}, and on one device at {_listed(lines[1])}"
    shapes = [one.shape for one in mine.parameters], [one.shape for one in other.parameters]
    if shapes[0] != shapes[1]:
        return 0.0, "the optimizer trains other parameters"
    worst, parameter = _of_parameters(mine, other)
    pairs = zip(mine.losses, other.losses, strict=True)
    said = next((_of_loss(ours, theirs) for ours, theirs in pairs if not _close(ours.value, theirs.value)), None)
    if said is None and parameter is not None and mine.losses:
        said = f"the loss at {mine.losses[-1].line} is the same"
    return worst, "; ".join(filter(None, [said, parameter])) or None


def _of_loss(ours: Loss, theirs: Loss) -> str:
    return f"the loss at {ours.line} is {ours.value:.6g}, and {theirs.value:.6g} on one device"


def _of_parameters(mine: Taken, other: Taken) -> tuple[float, str | None]:
    most = max((_norm(one) for one in other.gradients if one is not None), default=0.0)
    worst = 0.0
    rows = zip(mine.names, mine.gradients, other.gradients, mine.parameters, other.parameters, strict=True)
    for name, gradient, wanted, parameter, expected in rows:
        if (gradient is None) != (wanted is None):
            return worst, f"{name} has {'no' if gradient is None else 'a'} gradient, unlike on one device"
        within, least = ROUNDING.get(expected.dtype, 5e-3), NOISE.get(expected.dtype, 1e-6) * most
        if gradient is not None and wanted is not None:
            if (distance := _distance(gradient, wanted)) > within * _norm(wanted) + least:
                return worst, f"the gradient of {name} differs by {_part(distance, wanted)}"
            if _norm(wanted) <= 10 * least:
                continue  # rounding alone: an optimizer may make a step of any size of it
        distance = _distance(parameter, expected)
        if distance > within * max(_norm(expected), _norm(parameter)):
            return worst, f"{name} differs by {_part(distance, expected)} after the step"
        worst = max(worst, distance / (_norm(expected) or 1.0))
    return worst, None


def _listed(lines: Sequence[str]) -> str:
    return " and ".join(lines) or "no line"


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_LOSSES, abs_tol=NOISE[torch.float32]) or (
        not math.isfinite(one) and not math.isfinite(other)
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double().nan_to_num(0.0, 0.0, 0.0)))


def _distance(one: Tensor, other: Tensor) -> float:
    """Values that are not finite in both count as equal."""
    odd = ~torch.isfinite(one) & ~torch.isfinite(other)
    return float(torch.linalg.vector_norm(torch.where(odd, 0.0, one.double() - other.double())).nan_to_num(math.inf))


def _part(distance: float, of: Tensor) -> str:
    return f"{100 * distance / (_norm(of) or 1.0):.2g} % of its norm"
