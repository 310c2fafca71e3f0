"""What a cell left behind, in a form that two runs of it can be compared in: numbers, words, and who is whose."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-5
"""Of fp32: largest difference of two tensors by the largest absolute value in the reference (at least by 0.1)."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf")


@dataclass
class Trace:
    """One run; keyed by paths such as ``model.0.weight`` and ``optimizer.0.2.exp_avg``."""

    values: dict[str, Tensor] = field(default_factory=dict)
    """Numbers, lists of numbers, and the tensors of modules, optimizers and schedulers, in float64."""
    kinds: dict[str, str] = field(default_factory=dict)
    """What modules, parameters, buffers and numbers are: class, dtype, attributes of the instance, hooks, gradients."""
    sharing: dict[str, int] = field(default_factory=dict)
    """Parameters that are one object have one number, in modules and optimizers alike."""
    printed: tuple[str, ...] = ()


def trace(names: Mapping[str, Any], printed: str = "") -> Trace:
    """Of the names that the cell bound, those that a user would look at."""
    tracer = _Tracer(Trace(printed=tuple(printed.splitlines())))
    for name, value in names.items():
        if not name.startswith("_"):
            tracer.follow(name, value)
    return tracer.found


class _Tracer:
    def __init__(self, found: Trace) -> None:
        self.found = found
        self._known: dict[int, int] = {}

    def follow(self, path: str, value: Any, above: frozenset[int] = frozenset()) -> None:
        if isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(path, value)
        elif isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
            self.follow(path, value.state_dict(), above)
        elif isinstance(value, (bool, int, float)):
            self._numbers(path, torch.tensor(float(value)), type(value).__name__)
        elif isinstance(value, (list, tuple)) and all(isinstance(item, (bool, int, float)) for item in value):
            kinds = " ".join(sorted({type(item).__name__ for item in value}))
            self._numbers(path, torch.tensor([float(item) for item in value], dtype=torch.float64), kinds)
        elif isinstance(value, Tensor):  # not its numbers: of a batch, a rank may have its part
            self.found.kinds[path] = f"{type(value).__name__} {value.dtype} {value.device}"
        elif isinstance(value, (list, tuple, dict)) and id(value) not in above:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self.follow(f"{path}.{key}", item, above | {id(value)})

    def _module(self, path: str, module: nn.Module) -> None:
        for name, part in module.named_modules(prefix=path, remove_duplicate=False):
            hooks = [key for key, item in vars(part).items() if "hook" in key and isinstance(item, dict) and item]
            attributes = sorted(vars(part).keys() - {"_compiled_call_impl"})  # FSDP2 leaves it, and Module drops it
            words = f"{type(part).__name__} of {attributes} with {hooks}, training {part.training}"
            self.found.kinds[name] = words
        for name, tensor in [*module.named_parameters(path, remove_duplicate=False), *module.named_buffers(path)]:
            self._tensor(name, tensor)
            self._shared(name, tensor)

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        self.found.kinds[path] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                self._shared(f"{path}.{index}.{number}", parameter)
                for key, item in optimizer.state.get(parameter, {}).items():
                    if isinstance(item, Tensor):
                        self._tensor(f"{path}.{index}.{number}.{key}", item)
            for key, item in group.items():
                if isinstance(item, (int, float)):
                    self._numbers(f"{path}.{index}.{key}", torch.tensor(float(item)), type(item).__name__)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        kind = f"{type(tensor).__name__} {tensor.dtype} {tensor.device} gradient {tensor.requires_grad}"
        self._numbers(path, tensor.detach().to_dense(), kind)

    def _numbers(self, path: str, numbers: Tensor, kind: str) -> None:
        numbers = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
        self.found.values[path] = numbers.to(torch.float64, copy=True)
        self.found.kinds[path] = kind

    def _shared(self, path: str, tensor: Tensor) -> None:
        self.found.sharing[path] = self._known.setdefault(id(tensor), len(self._known))


# ------------------------------------------------------------------------------------------------ comparing two of them


def differences(
    found: Trace, wanted: Trace, tolerance: float = TOLERANCE, leave_out: tuple[str, ...] = ()
) -> list[str]:
    """One line for each thing in which ``found`` is not what ``wanted`` is; ``leave_out`` are first parts of paths."""
    lines = [*_other_values(found, wanted, tolerance), *_other_words(found.kinds, wanted.kinds)]
    lines += _other_words(found.sharing, wanted.sharing)
    return [line for line in lines if line.partition(":")[0].partition(".")[0] not in leave_out] + [
        *_other_lines(found.printed, wanted.printed, max(tolerance, 1e-4))
    ]


def _other_values(found: Trace, wanted: Trace, tolerance: float) -> Iterator[str]:
    for path in wanted.values.keys() | found.values.keys():
        one, other = found.values.get(path), wanted.values.get(path)
        if one is None or other is None:
            yield f"{path}: {'missing' if one is None else 'too much'}"
        elif one.shape != other.shape:
            yield f"{path}: shape {tuple(one.shape)} instead of {tuple(other.shape)}"
        elif (off := deviation(one, other)) > tolerance:
            yield f"{path}: differs by {off:.1e} of its scale"


def deviation(one: Tensor, other: Tensor) -> float:
    """The largest difference by the largest absolute value of ``other``, or by 0.1 where that is smaller."""
    if other.numel() == 0:
        return 0.0
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    one, other = one.nan_to_num(), other.nan_to_num()
    return float((one - other).abs().max() / other.abs().max().clamp(min=0.1))


def _other_words(found: Mapping[str, object], wanted: Mapping[str, object]) -> Iterator[str]:
    for path in wanted.keys() | found.keys():
        if found.get(path) != wanted.get(path):
            yield f"{path}: {found.get(path)!r} instead of {wanted.get(path)!r}"


def _other_lines(found: tuple[str, ...], wanted: tuple[str, ...], tolerance: float) -> Iterator[str]:
    """Every line of the reference must be there, in order; lines of the strategy's own may stand between."""
    rest = iter(found)
    for line in wanted:
        if not any(same_line(other, line, tolerance) for other in rest):
            yield f"printed: no line {line!r} in its place among {list(found)}"
            return


def same_line(one: str, other: str, tolerance: float = 1e-4) -> bool:
    """Equal words, and numbers that differ by no more than one in their last digit printed (or ``tolerance``)."""
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(first == second or _near(first, second, tolerance) for first, second in pairs)


def _near(first: str, second: str, tolerance: float) -> bool:
    one, other = float(first), float(second)
    mantissa, _, exponent = second.lower().partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) if "." in mantissa else 0.0
    return abs(one - other) <= max(1.01 * last_digit, tolerance * abs(other) if "." in mantissa else 0.0)
