"""The units of a model, between which a pipeline is cut, and the stage of each call of a unit.

A unit is a module that is not cut: a repeated block, or a layer with parameters outside of blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from ...protocol.errors import StrategyError
from ..core import blocks
from ..core.scatter import map_tensors, tensors_in
from ..core.stages import MARK
from ..step.views import no_view_with_gradient

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
Call = Callable[..., Any]


class Runner(Protocol):
    """Handles the calls of units."""

    def unit(self, number: int, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Units:
    """The units of one model. While a runner is active, it handles each of their calls."""

    def __init__(self, root: nn.Module, stages: int) -> None:
        self.modules = _found(root, stages)
        self._runner: Runner | None = None
        self._inside = False
        for number, module in enumerate(self.modules):
            _intercept(self, number, module)

    @contextmanager
    def run_by(self, runner: Runner) -> Iterator[None]:
        """In this context ``runner`` handles the calls of units."""
        before, self._runner = self._runner, runner
        try:
            yield
        finally:
            self._runner = before

    def called(self, number: int, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a unit. Calls of other units inside of it are part of this call."""
        if self._runner is None or self._inside:
            return original(*args, **kwargs)
        self._inside = True
        try:
            return self._runner.unit(number, original, args, kwargs)
        finally:
            self._inside = False


def _intercept(units: Units, number: int, module: nn.Module) -> None:
    original = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return units.called(number, original, args, kwargs)

    vars(module)["forward"] = MethodType(forward, module)  # ``restore.restore`` removes it


def _found(root: nn.Module, stages: int) -> list[nn.Module]:
    """The units in the order of definition. If they are fewer than stages, blocks are split into their layers."""
    repeated = set(blocks.repeated(root))
    units = _below(root, repeated)
    while len(units) < stages and (largest := _largest_to_open(units)) is not None:
        place = units.index(largest)
        units[place : place + 1] = _below(largest, set())
    return units


def _below(module: nn.Module, repeated: set[nn.Module]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if child in repeated or (_is_whole(child, repeated) and _has_parameters(child)):
            found.append(child)
        elif _has_parameters(child):
            found += _below(child, repeated)
    return list(dict.fromkeys(found))


def _is_whole(module: nn.Module, repeated: set[nn.Module]) -> bool:
    if isinstance(module, _LISTS) or (MARK not in vars(module) and _marks(module)):
        return False
    return not any(part in repeated for part in module.modules())


def marked(root: nn.Module) -> int:
    """The number of stages for which modules were built within ``td.stage``."""
    return 1 + max((int(vars(part)[MARK]) for part in root.modules() if MARK in vars(part)), default=-1)


def _marks(module: nn.Module) -> bool:
    return any(MARK in vars(part) for part in module.modules())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _largest_to_open(units: Sequence[nn.Module]) -> nn.Module | None:
    openable = [unit for unit in units if len(_below(unit, set())) > 1]
    return max(openable, key=_parameters_of, default=None)


def _parameters_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass
class Cost:
    """The cost of one call: seconds of forward and backward, bytes of saved tensors and of training state."""

    unit: int
    seconds: float
    memory: int
    parameters: int


class Measurer:
    """Runs each call of a unit forward and backward alone, and measures time and memory."""

    def __init__(self, units: Units, now: Callable[[], float]) -> None:
        self._units, self._now = units, now
        self.costs: list[Cost] = []

    def unit(self, number: int, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As ``Runner``: returns the outputs without a graph."""
        own = [p for p in self._units.modules[number].parameters() if p.requires_grad]
        kept: dict[int, int] = {}
        known = {p.untyped_storage()._cdata for p in own}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        args, kwargs = map_tensors((args, kwargs), _leaf)
        begun = self._now()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            given = map_tensors((args, kwargs), no_view_with_gradient)
            outputs = original(*given[0], **given[1])
        made = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        asked = [tensor for tensor in (*tensors_in((args, kwargs)), *own) if tensor.requires_grad]
        if made and asked:
            torch.autograd.grad(made, asked, [torch.ones_like(tensor) for tensor in made], allow_unused=True)
        seconds = self._now() - begun
        trained = 4 * sum(p.nbytes for p in own)  # weights, gradients and the two moments of Adam
        size = _parameters_of(self._units.modules[number])
        self.costs.append(Cost(number, seconds, trained + sum(kept.values()), size))
        return map_tensors(outputs, lambda tensor: tensor.detach())


def clock(device: torch.device) -> float:
    """The time in seconds, after all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def measured(units: Units, now: Callable[[], float], forward: Callable[[], Any], rounds: int = 2) -> list[Cost]:
    """The costs of the calls of one forward, in order, with the shortest time. ``now``: the time, or the work done.

    Equal blocks get the same cost; else other load on the machine could cut ten blocks into four and six.
    """
    tries = []
    for _ in range(rounds):
        measurer = Measurer(units, now)
        with torch.no_grad(), units.run_by(measurer):
            forward()
        tries.append(measurer.costs)
    for others in tries[1:]:
        for cost, other in zip(tries[0], others, strict=True):
            cost.seconds = min(cost.seconds, other.seconds)
    kinds: dict[tuple[type, int, int], list[Cost]] = {}
    for cost in tries[0]:
        kinds.setdefault((type(units.modules[cost.unit]), cost.memory, cost.parameters), []).append(cost)
    for alike in kinds.values():
        usual = statistics.median(cost.seconds for cost in alike)
        for cost in alike:
            cost.seconds = usual
    return tries[0]


def assigned(units: Units, costs: Sequence[Cost], stages: int, balance: str | tuple[int, ...]) -> list[int]:
    """The stage of each call. Raises ``StrategyError`` if the model cannot be cut so."""
    if balance == "manual":
        return _by_marks(units, costs, stages)
    if len(costs) < stages:
        raise StrategyError(
            f"{stages} stages are more than the {len(costs)} layers of the model that can be cut apart",
            f"use a schedule with one stage a rank (gpipe, 1f1b), at most {len(costs)} ranks along pp, or a model of "
            "more blocks"
            if len(costs) > 1
            else "use --strategy ddp or fsdp, or a model of more blocks",
        )
    if isinstance(balance, tuple):
        return _by_numbers(units, costs, stages, balance)
    if balance == "parameters":
        return cut([[float(cost.parameters)] for cost in costs], stages)
    seconds, memory = sum(cost.seconds for cost in costs), sum(cost.memory for cost in costs)
    return cut([[cost.seconds / (seconds or 1), cost.memory / (memory or 1)] for cost in costs], stages)


def cut(costs: Sequence[Sequence[float]], stages: int) -> list[int]:
    """Cut a sequence into ``stages`` parts so that the largest cost of a part is minimal, by dynamic programming.

    Each item has a share of several resources (time, memory). The cost of a part is its largest sum: a pipeline is as
    slow as its slowest stage, and needs devices as large as its largest stage. See the linear partition problem in
    Skiena, The Algorithm Design Manual, section 10.7.
    """
    count = len(costs)
    prefix = [[0.0] * len(costs[0])]
    for item in costs:
        prefix.append([before + own for before, own in zip(prefix[-1], item, strict=True)])

    def part(start: int, end: int) -> float:
        return max(last - first for first, last in zip(prefix[start], prefix[end], strict=True))

    best = [[part(0, end) if end else 0.0 for end in range(count + 1)]]
    starts: list[list[int]] = [[0] * (count + 1)]
    for stage in range(1, stages):
        row, chosen = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            options = [(max(best[-1][start], part(start, end)), start) for start in range(stage, end)]
            row[end], chosen[end] = min(options)
        best.append(row)
        starts.append(chosen)
    stage_of, end = [0] * count, count
    for stage in range(stages - 1, -1, -1):
        start = starts[stage][end]
        stage_of[start:end] = [stage] * (end - start)
        end = start
    return stage_of


def _by_numbers(units: Units, costs: Sequence[Cost], stages: int, numbers: tuple[int, ...]) -> list[int]:
    """Stages by numbers of blocks. Layers before a block are in its stage, layers after the last in the last stage."""
    kinds = [type(units.modules[cost.unit]) for cost in costs]
    most = max(kinds, key=kinds.count)
    places = [place for place, kind in enumerate(kinds) if kind is most]
    if len(numbers) != stages or sum(numbers) != len(places):
        raise StrategyError(
            f"balance={','.join(map(str, numbers))} are {len(numbers)} stages of {sum(numbers)} blocks; there are "
            f"{stages} stages and {len(places)} blocks ({most.__name__})",
            "give one number a stage, which add up to the blocks",
        )
    stage_of, place = [0] * len(costs), 0
    block_stages = [stage for stage, number in enumerate(numbers) for _ in range(number)]
    for block, stage in zip(places, block_stages, strict=True):
        stage_of[place : block + 1] = [stage] * (block + 1 - place)
        place = block + 1
    stage_of[place:] = [stages - 1] * (len(costs) - place)
    return stage_of


def _by_marks(units: Units, costs: Sequence[Cost], stages: int) -> list[int]:
    stage_of: list[int] = []
    for cost in costs:
        module = units.modules[cost.unit]
        before = stage_of[-1] if stage_of else 0
        stage = vars(module).get(MARK, before)
        if stage < before:
            raise StrategyError(
                f"a {type(module).__name__} of stage {stage} is called after one of stage {before}",
                "a pipeline goes forward: number the stages in the order in which the model calls them",
            )
        stage_of.append(stage)
    if sorted(set(stage_of)) != list(range(stages)):
        raise StrategyError(
            f"the model has modules of stages {sorted(set(stage_of))}, the pipeline has the stages 0 to {stages - 1}",
            "build modules for every stage within td.stage(i), or leave -O balance=manual out",
        )
    return stage_of
