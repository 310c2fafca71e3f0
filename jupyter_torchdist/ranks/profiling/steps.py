"""Where a step of user code ends, for code that was written without us.

A step ends with ``optimizer.step()``. Code without an optimizer ends it with ``backward()``, else with ``td.log``,
else with an item of ``td.progress``. Nothing is installed before somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..streams.metrics import Recorder

UNITS = ("optimizer.step()", "backward()", "td.log()", "td.progress()")
"""What may end a step; the first one that a loop has counts."""


class Steps:
    """``ended`` is called at each of ``UNITS`` with its number and which of its kind it was, in the thread of the code.

    A loop may have several optimizers or losses: the one that was met first ends the step.
    """

    def __init__(self, recorder: Recorder, ended: Callable[[int, object], None]) -> None:
        self._recorder, self._ended = recorder, ended
        self._hook: Any = None
        self._follows = False

    def follow(self) -> None:
        """From now on; may be called in any thread."""
        self._follows = True
        self._recorder.told = self._recorded
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._stepped)

    def leave(self) -> None:
        """The optimizers' hook stays, because it may be running: torch goes through its hooks meanwhile."""
        self._follows, self._recorder.told = False, None

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._follows:
            self._ended(0, id(optimizer))

    def _recorded(self, unit: str, which: object) -> None:
        self._ended(UNITS.index(unit), which)
