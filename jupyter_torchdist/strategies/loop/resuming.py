"""A training that is saved when a step ends (``--checkpoint``), and continues from there (``--resume``).

It saves the state of all objects that the cell has built; a later run skips to that step (``checkpoint``).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from ...checkpoint.variables import Variables
from ..core.context import ParallelContext
from ..core.patches import Patches
from .checkpointer import Checkpointer
from .steps import Loader, Steps
from .training_objects import TrainingObjects


class Resuming(Steps):
    """The steps of a job that saves checkpoints; they include the steps of the run that is resumed."""

    _signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(
        self, context: ParallelContext, made: TrainingObjects, namespace: dict[str, Any], patience: float
    ) -> None:
        super().__init__(context.say, patience)
        self._made, self._namespace = made, namespace
        self._checkpointer = Checkpointer(context)
        self.step = self._checkpointer.step
        self.seed = self._checkpointer.seed

    # ------------------------------------------------------------------------------------------- around the user's code

    def install(self, patches: Patches) -> None:
        super().install(patches)
        self._made.watch(patches)

    def began_with(self, seed: int) -> None:
        self._checkpointer.seed = seed

    def finish(self) -> None:
        """Save the final state. Raises ``CheckpointError`` as a save does."""
        checkpointer = self._checkpointer
        self._register()
        checkpointer.arrive()  # if the training had ended before, no loader has called it
        if not checkpointer.on_the_way:
            self.step += self._stepped
        if checkpointer.last is None and not self.step:
            self._say("no checkpoint was saved: no optimizer of the cell made a step")
        else:
            checkpointer.save(self.step, complete=True)
        super().finish()

    # ----------------------------------------------------------------------------------------------------------- steps

    @contextlib.contextmanager
    def loop(self, loader: Loader, followed: Loader, frame: FrameType) -> Iterator[None]:
        with super().loop(loader, followed, frame):
            checkpointer, name = self._checkpointer, self._made.name_of_loader(loader, frame)
            if checkpointer.on_the_way and checkpointer.led and not checkpointer.knows(name):
                checkpointer.arrive()  # this loop had not begun when the checkpoint was saved
            checkpointer.register(name, followed)
            yield

    def begins_step(self) -> None:
        if self._checkpointer.arrived or not self._checkpointer.led:
            self._checkpointer.go_on()

    def ends_step(self) -> None:
        if not self._checkpointer.on_the_way:
            super().ends_step()

    def trains(self) -> None:
        super().trains()
        if not self._loops and not self._checkpointer.led:
            self._checkpointer.arrive()
            self.begins_step()

    def begin(self) -> None:
        if self._stop is None:
            self._checkpointer.register("variables", Variables(self._namespace))
        super().begin()
        self._register()

    def _register(self) -> None:
        for name, thing in self._made.objects().items():
            self._checkpointer.register(name, thing)
            if self._checkpointer.on_the_way and isinstance(thing, torch.optim.Optimizer):
                # Else schedulers warn that no optimizer step came before; the steps were in the previous run.
                thing._opt_called = True  # type: ignore[attr-defined]

    def _keep(self, last: bool) -> str:
        if not last:
            self._checkpointer.after_step(self.step)
            return ""
        self._checkpointer.save(self.step, complete=True)
        return f"; saved in {self._checkpointer.directory}"
