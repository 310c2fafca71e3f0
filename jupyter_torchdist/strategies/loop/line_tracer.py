"""Which lines of user code run while a loop is watched."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ...torch_private.places import function_modes
from ...usercode.frames import is_users
from .watching import Numbers

_HOLD_NOTHING = (
    int, float, complex, str, bytes, type(None), type, ModuleType, FunctionType, MethodType, torch.device, torch.dtype,
    nn.Module, nn.Parameter, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, DataLoader, Dataset,
    torch.amp.GradScaler,
)  # fmt: skip


class LinesRun:
    """Records which lines of user code run, in the frame of a loop and in the functions that it calls."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self.lines: dict[CodeType, set[int]] = {frame.f_code: set()}
        self.aside: dict[CodeType, set[int]] = {}
        """Lines run in a model's forward or in a backward, which are divided in the same way with whole batches."""
        self.given: dict[CodeType, set[str]] = {}
        """The function parameters whose values had a tensor in them."""
        self._on = self._watching = False

    def start(self) -> bool:
        """False if a debugger or a coverage tool uses ``sys.settrace`` already."""
        if sys.gettrace() is not None:
            return False
        self._watching = is_watched()
        self._frame.f_trace = self._line
        sys.settrace(self._call)
        self._on = True
        return True

    def stop(self) -> None:
        if self._on:
            sys.settrace(None)
            self._frame.f_trace = None
            self._on = False
            # Before Python 3.13 tracing keeps a copy of a function's variables, and so keeps the batch alive.
            _ = self._frame.f_locals

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not is_users(code.co_filename):
            return None
        if self._watching and not is_watched():
            self.aside.setdefault(code, set()).add(frame.f_lineno)
            return self._line_aside
        self.lines.setdefault(code, set()).add(frame.f_lineno)
        known = self.given.setdefault(code, set())
        values = frame.f_locals
        known |= {one for one in _parameters_of(code) if one not in known and _may_hold(values.get(one))}
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return self._line

    def _line_aside(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.aside.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return self._line_aside


def is_watched() -> bool:
    return any(isinstance(mode, Numbers) for mode in function_modes())


def _parameters_of(code: CodeType) -> tuple[str, ...]:
    """The parameters without ``self``: values in an object are followed by the names of its attributes."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[:count]
    return names[1:] if names[:1] in (("self",), ("cls",)) else names


def _may_hold(value: Any, depth: int = 4) -> bool:
    """Whether ``value`` has a tensor that is no parameter. Plain numbers do not count: reading them is noticed."""
    if isinstance(value, _HOLD_NOTHING):
        return False
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__") or not depth:
        return True
    if isinstance(value, Mapping):
        return any(_may_hold(one, depth - 1) for one in [*value.values()][:64])
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_may_hold(one, depth - 1) for one in [*value][:64])
    inside = [*getattr(value, "__dict__", {}).values()]
    inside += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ()) if isinstance(name, str)]
    return any(_may_hold(one, depth - 1) for one in inside)
