"""Model outputs other than tensors and containers: distributions, objects of the cell's own classes, numbers.

To cut and join rows, such an object is converted to ``Opened``, a dict of its attributes. After the join, ``closed``
builds a similar object.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from inspect import getattr_static, signature
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MixtureSameFamily

from ...protocol.errors import StrategyError
from .scatter import map_others, map_parts, map_tensors, others_in, tensors_in
from .side_effects import is_users_own

_CACHES = "transformers.cache_utils"
"""Key-value caches for later calls; a training loop does not use them."""
_DEPTH = 6
_INNER = {
    Independent: ("base_dist", "reinterpreted_batch_ndims"),
    MixtureSameFamily: ("_mixture_distribution", "_component_distribution"),
}
"""Distributions made of other distributions: their attributes in the order of the constructor's arguments."""


class Opened(dict[str, Any]):
    """The attributes of the object ``whole`` by name; for a distribution, its constructor arguments."""

    whole: Any


def opening(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with ``opened`` outputs."""
    return lambda *args, **kwargs: opened(forward(*args, **kwargs))


def opened(outputs: Any) -> Any:
    """Convert objects in ``outputs`` to ``Opened``. Raises ``StrategyError`` if one could not be rebuilt."""
    return outputs if isinstance(outputs, Tensor) else map_others(outputs, _opened)


def closed(outputs: Any) -> Any:
    """The reverse of ``opened``: outputs as the model returns them."""
    return outputs if isinstance(outputs, Tensor) else map_parts(outputs, Opened, _closed)


def changed(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Outputs with ``change`` applied to every tensor, also within objects."""
    return closed(map_tensors(opened(outputs), change))


def numbers_in(outputs: Any) -> list[Any]:
    """Numbers, strings and similar values in ``opened`` outputs."""
    return [one for one in others_in(outputs) if not isinstance(one, (Distribution, nn.Module)) and not callable(one)]


def without_tensors(outputs: Any) -> tuple[Any, list[str]]:
    """``opened`` outputs, with None for objects whose tensors cannot be followed, and the classes of these objects."""
    classes: list[str] = []

    def left_out(value: Any) -> Any:
        if not _holds_tensors(value, _DEPTH):
            return value
        classes.append(type(value).__name__)
        return None

    return map_others(outputs, left_out), classes


def _opened(value: Any) -> Any:
    parts: dict[str, Any] | None = None
    if isinstance(value, Distribution):
        parts = _made_of(value)
    elif isinstance(value, SimpleNamespace) or is_users_own(value):
        parts = vars(value)
    if parts is not None:
        found = {name: map_others(one, _opened) for name, one in parts.items() if one is not value}
        if not tensors_in(found):
            return value
        one = Opened(found)
        one.whole = value
        return one
    if type(value).__module__ != _CACHES and _holds_tensors(value, _DEPTH):
        raise StrategyError(
            f"it returns {_a(type(value).__name__)}, which cannot be put together from the results for parts of the "
            "batch; return tensors, tuples, dicts, dataclasses, objects of the cell's own classes without __slots__, "
            "or the usual torch.distributions"
        )
    return value


def _made_of(value: Distribution) -> dict[str, Any] | None:
    if type(value) in _INNER:
        return {name: getattr(value, name) for name in _INNER[type(value)]}
    asked = signature(type(value).__init__).parameters.keys() - {"self", "validate_args"}
    if not asked <= value.arg_constraints.keys():
        return None
    own = vars(value).keys() | {name for name in asked if isinstance(getattr_static(value, name, None), property)}
    given = {name: getattr(value, name) for name in (*vars(value), *sorted(own)) if name in asked & own}
    if "logits" in given and "probs" in given:  # the later one was computed from the other
        del given[max("logits", "probs", key=list(given).index)]
    return given or None


def _closed(one: Opened) -> Any:
    parts = {name: closed(part) for name, part in one.items()}
    if not isinstance(one.whole, Distribution):
        made = copy.copy(one.whole)
        vars(made).update(parts)
        return made
    make: Callable[..., Any] = type(one.whole)
    made = make(*parts.values(), validate_args=False) if make in _INNER else make(**parts, validate_args=False)
    made._validate_args = one.whole._validate_args
    return made


def _holds_tensors(value: Any, depth: int) -> bool:
    """Whether ``value`` holds tensors, or may yield some later (a generator)."""
    if isinstance(value, (Tensor, Iterator)):
        return True
    if depth == 0 or isinstance(value, (nn.Module, type)):
        return False
    return any(_holds_tensors(one, depth - 1) for one in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def _a(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOUaeiou" else f"a {name}"
