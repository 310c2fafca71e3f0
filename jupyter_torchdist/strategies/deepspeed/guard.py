"""Guards parameters whose gradients, master weights or values are in DeepSpeed's buffers.

Outside the engine such a parameter has no gradient, values written to it are lost at the next step, and with ZeRO-3 it
is empty. The cell would get wrong results, so such operations raise an error.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...protocol.errors import StrategyError
from ...torch_private.places import DisableTorchFunctionSubclass
from ...usercode.frames import is_users

_OURS = str(Path(__file__).parents[1]) + os.sep
_MEANT = ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "is_meta", "ndim", "names")
"""Attributes that can be read from a parameter without its values."""
_WRITES = ("__setitem__", "requires_grad_")
_HINT = "write model.load_state_dict(…) instead, or use --strategy fsdp or ddp"


def guard(parameters: Iterable[nn.Parameter], is_busy: Callable[[], bool]) -> None:
    """Make ``parameters`` refuse operations that DeepSpeed would not see, unless ``is_busy``, until ``unguard``."""
    _Guarded.is_busy = staticmethod(is_busy)
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = _Guarded


def unguard(parameters: Iterable[nn.Parameter]) -> None:
    """Make ``parameters`` plain again."""
    for parameter in parameters:
        if type(parameter) is _Guarded:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


class _Guarded(nn.Parameter):
    """A parameter that the only DeepSpeed engine of this process trains."""

    is_busy: Callable[[], bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        with DisableTorchFunctionSubclass():
            if cls.is_busy() or _knows(caller):
                return func(*args, **(kwargs or {}))
            what, sets = _asked(func)
            own = next((one for one in args if type(one) is _Guarded), None)
            if own is not None and args[0] is own:
                if what == "grad" and is_users(caller):
                    raise StrategyError(
                        "the cell reads the gradient of a parameter, which DeepSpeed keeps in parts in its own buffers",
                        "clip by torch.nn.utils.clip_grad_norm_, or use --strategy fsdp or ddp",
                    )
                if sets or what in _WRITES or (what.endswith("_") and not what.endswith("__")):
                    raise StrategyError(f"{what} changes a parameter, and DeepSpeed would not see it", _HINT)
            if own is not None and _is_elsewhere(own):
                return _of_elsewhere(own, what)
            found = func(*args, **(kwargs or {}))
            if what in ("data", "detach") and isinstance(found, torch.Tensor):
                return found.as_subclass(_Unwritten)
            return found


class _Unwritten(torch.Tensor):
    """The values of a parameter, or a view of them. They can be read like any tensor, but not written."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what, _ = _asked(func)
        with DisableTorchFunctionSubclass():
            writes = what == "__setitem__" or (what.endswith("_") and not what.endswith("__"))
            if writes and type(args[0]) is _Unwritten:
                raise StrategyError(f"{what} changes a parameter, and DeepSpeed would not see it", _HINT)
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found._is_view():
                return found.as_subclass(_Unwritten)
            return found


def _asked(func: Any) -> tuple[str, bool]:
    """The name of the function or attribute, and whether an attribute is set."""
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__"):
        return str(getattr(func.__self__, "__name__", "")), name == "__set__"
    return name, False


def _is_elsewhere(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 has the parameter's values partitioned at the moment."""
    return parameter.numel() != getattr(parameter, "ds_numel", parameter.numel())


def _of_elsewhere(parameter: nn.Parameter, what: str) -> Any:
    """The sizes of the full parameter; raises ``StrategyError`` for values."""
    whole = torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta")  # type: ignore[attr-defined]
    if what in ("numel", "size", "dim", "stride", "nelement", "element_size", "__len__", "is_floating_point"):
        return getattr(whole, what)()
    if what in ("shape", "ndim"):
        return getattr(whole, what)
    if what in _MEANT:
        return getattr(torch.Tensor, what).__get__(parameter)
    raise StrategyError(
        f"{what} of a parameter outside the model's forward, where each rank of ZeRO-3 has only a part of it",
        "compute it within forward(), read model.state_dict(), or use stage 2",
    )


@cache
def _knows(filename: str) -> bool:
    """Whether code of this file can handle partitioned parameters."""
    found = importlib.util.find_spec("deepspeed")
    rooms = tuple(f"{place}{os.sep}" for place in (found.submodule_search_locations or ())) if found else ()
    return filename.startswith((_OURS, *rooms))
