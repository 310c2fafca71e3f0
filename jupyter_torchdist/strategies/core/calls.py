"""Calls of modules: the outermost is a strategy's affair, those within it are as without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ...usercode.frames import NOWHERE
from .patches import Patches

Call = Callable[..., Any]


class Calls:
    """In place of ``nn.Module.__call__``. ``depth``: of the calls that the strategy is within."""

    def __init__(self) -> None:
        self.depth = 0
        self._within = _Within(self)

    def install(self, patches: Patches, outermost: Call) -> None:
        """``outermost(original, module, ...)`` is asked where none is within; a step calls each layer, so no more."""

        def calling(original: Call) -> Call:
            @functools.wraps(original)
            def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                if self.depth:
                    return original(module, *args, **kwargs)
                return outermost(original, module, *args, **kwargs)

            # torch.compile passes over our files (autolog): it would end a graph at every layer.
            call.__code__ = call.__code__.replace(co_filename=NOWHERE)  # type: ignore[attr-defined]
            return call

        patches.replace(nn.Module, "__call__", calling)

    def within(self) -> AbstractContextManager[None]:
        """Calls in this block are of the strategy, or of a forward that it has taken care of."""
        return self._within


class _Within(AbstractContextManager[None]):
    """One for all blocks: a generator for each would cost a step more than the rest of a call."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.depth += 1

    def __exit__(self, *_: object) -> None:
        self._calls.depth -= 1
