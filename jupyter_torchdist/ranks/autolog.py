"""Draws scalars on which ``backward()`` is called: one curve per call site, named as in the source.

Where ``td.log`` beside it draws the same value, there is only that curve.
"""

from __future__ import annotations

import ast
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from ..strategies.core.losses import UNSCALED
from ..usercode import positions
from ..usercode.frames import users_frame
from .afterimport import after_import
from .streams.metrics import Recorder

_NAME_LIMIT = 40
_SAME = ("item", "detach", "cpu", "float", "clone")
"""Methods that give the same value."""


@dataclass
class Site:
    """One place in the user's code that calls ``backward``."""

    name: str
    drawn: bool = True
    calls: int = 0


class _Within(threading.local):
    """Whether this thread is inside ``backward``."""

    backward = False


class Autolog:
    """Logs the value of each scalar loss. The step of a curve is the number of calls at its site."""

    def __init__(self, recorder: Recorder, samples: Callable[[], int | None] = lambda: None) -> None:
        """``samples``: how many samples the batch has that user code was given since the last call; None: unknown."""
        self._recorder, self._samples = recorder, samples
        self._sites: dict[tuple[CodeType, int], Site | None] = {}
        self._names: Counter[str] = Counter()
        self._within = _Within()
        self._scaling = False

    def install(self) -> None:
        """Wrap ``Tensor.backward`` and ``GradScaler.scale`` of this process."""
        original: Any = torch.Tensor.backward

        @functools.wraps(original)
        def backward(self_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._within.backward:  # nested call from a tensor subclass
                return original(self_, *args, **kwargs)
            self._within.backward = True
            try:
                original(self_, *args, **kwargs)
                # After the backward: by then a strategy has set the loss of the whole batch.
                self.note(self_, sys._getframe(1))
            finally:
                self._within.backward = False

        torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]
        scale: Any = torch.amp.GradScaler.scale

        @functools.wraps(scale)
        def scale_and_remember(self_: Any, outputs: Any) -> Any:
            scaled: Any = scale(self_, outputs)
            if scaled is not outputs and isinstance(outputs, torch.Tensor):
                setattr(scaled, UNSCALED, outputs.detach())
                self._scaling = True
            return scaled

        torch.amp.GradScaler.scale = scale_and_remember  # type: ignore[method-assign,assignment]
        # torch.compile must not trace our functions: skipped, they cause a graph break, as ``backward`` itself does.
        after_import({"torch._dynamo.trace_rules": lambda module: module.add(__name__.partition(".")[0])})

    def backwards(self) -> int:
        """How often user code has called ``backward`` on a scalar. May be called in any thread."""
        return sum(site.calls for site in list(self._sites.values()) if site is not None)

    def note(self, loss: torch.Tensor, caller: FrameType | None) -> None:
        """Log ``loss`` if it is a scalar and ``caller``, or a frame above it, is user code."""
        if loss.numel() != 1 or (site := self._site(caller)) is None:
            return
        site.calls += 1
        self._recorder.trained(self._samples() or 0)
        value = getattr(loss, UNSCALED, loss) if self._scaling else loss
        self._recorder.log({site.name: value}, site.calls, auto=True, drawn=site.drawn)

    def _site(self, caller: FrameType | None) -> Site | None:
        frame = users_frame(caller)
        if frame is None:
            return None
        key = (frame.f_code, frame.f_lasti)
        if key not in self._sites:
            span = positions.running(frame)
            file, line = frame.f_code.co_filename, frame.f_lineno
            name = loss_name(file, line, span, direct=frame is caller)
            drawn = not logs_beside(file, line, name)
            if drawn and any(keyword.arg == name for keyword in _logged(positions.tree_of(file))):
                name = f"{name}.backward()"
            self._names[name] += 1
            self._sites[key] = Site(name if self._names[name] == 1 else f"{name} (line {line})", drawn)
        return self._sites[key]


def loss_name(filename: str, line: int, span: positions.Span | None = None, *, direct: bool = True) -> str:
    """The name of the tensor in the source: ``d_loss`` in ``d_loss.backward()`` and ``fabric.backward(d_loss)``.

    ``span``: position of the call, if known. ``direct``: False if a library called ``backward``; then only an argument
    can be the loss. Returns ``loss`` if the source does not tell the name.
    """
    calls = [call for call in _backward_calls(filename) if call.lineno <= line <= (call.end_lineno or call.lineno)]
    exact = [call for call in calls if span and span.end == positions.span_of(call).end]
    for call in exact or calls:
        assert isinstance(call.func, ast.Attribute)
        if direct:
            return _words(call.func.value)
        if call.args:
            return _words(call.args[0])
    return "loss"


def logs_beside(filename: str, line: int, name: str) -> bool:
    """Whether ``td.log`` is called as often as ``backward`` on this line, with the loss that has this name.

    It is when it stands in the same block: ``td.log(train_loss=loss.item())``.
    """
    for node in ast.walk(positions.tree_of(filename) or ast.Module([], [])):
        for part in ("body", "orelse", "finalbody"):
            block = getattr(node, part, None)
            calls = [one for one in block if isinstance(one, ast.Expr)] if isinstance(block, list) else []
            if any(one.lineno <= line <= (one.end_lineno or line) for one in calls):
                return any(_words(_plain(keyword.value)) == name for one in calls for keyword in _logged(one))
    return False


def _logged(tree: ast.AST | None) -> list[ast.keyword]:
    """The curves of ``td.log(…)``."""
    calls = [node for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, ast.Call)]
    logs = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) == "log"]
    return [keyword for call in logs for keyword in call.keywords if keyword.arg not in (None, "step")]


def _plain(value: ast.expr) -> ast.expr:
    """``loss`` of ``loss.detach().item()`` and of ``float(loss)``."""
    while isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute) and value.func.attr in _SAME and not value.args:
            value = value.func.value
        elif isinstance(value.func, ast.Name) and value.func.id == "float" and len(value.args) == 1:
            value = value.args[0]
        else:
            break
    return value


def _backward_calls(filename: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(positions.tree_of(filename) or ast.Module([], []))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    ]


def _words(value: ast.expr) -> str:
    """A short name for an expression; for ``scaler.scale(loss)``, the name of its argument."""
    if isinstance(value, ast.Call):
        scaled = isinstance(value.func, ast.Attribute) and value.func.attr == "scale" and value.args
        return _words(value.args[0] if scaled else value.func)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
        return value.attr
    text = ast.unparse(value)
    if len(text) <= _NAME_LIMIT:
        return text
    return next((node.id for node in ast.walk(value) if isinstance(node, ast.Name)), "loss")
