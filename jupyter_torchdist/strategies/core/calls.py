"""Calls of modules: a strategy handles the outermost call; nested calls run unchanged."""

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
    """Replaces ``nn.Module.__call__``. ``depth``: how many ``within`` blocks are open."""

    def __init__(self) -> None:
        self.depth = 0
        self._within = _Within(self)

    def install(self, patches: Patches, outermost: Call) -> None:
        """Outermost calls go to ``outermost(original, module, ...)``. Kept cheap: a step calls every layer."""

        def calling(original: Call) -> Call:
            @functools.wraps(original)
            def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                if self.depth:
                    return original(module, *args, **kwargs)
                return outermost(original, module, *args, **kwargs)

            # torch.compile skips our files (autolog): without this, the graph would break at every layer.
            call.__code__ = call.__code__.replace(co_filename=NOWHERE)  # type: ignore[attr-defined]
            return call

        patches.replace(nn.Module, "__call__", calling)

    def within(self) -> AbstractContextManager[None]:
        """Module calls in this block belong to the strategy, or to a forward that the strategy handles already."""
        return self._within


class _Within(AbstractContextManager[None]):
    """One object for all blocks: a new generator for each block would be slower than the rest of a call."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.depth += 1

    def __exit__(self, *_: object) -> None:
        self._calls.depth -= 1
