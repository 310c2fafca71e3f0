"""Where the steps of a cell's training are, to stop all ranks at one of them, to save there, and to go on from there.

A step is over when a loop over a ``DataLoader`` asks for its next batch and an optimizer has stepped since the last
one: everything in the loop's body is done then, whatever it does. Outside of such loops each step of an optimizer is
one. With ``--checkpoint`` the state of all that the cell has ``made`` is saved there, and ``--resume`` leads a later
run there (``runtime/checkpoint``).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from ..checkpoint import position
from ..checkpoint.checkpointer import Checkpointer
from ..checkpoint.ranks import Ranks
from ..checkpoint.stopping import Stop
from ..checkpoint.variables import Variables
from .base import Setting
from .made import Made
from .patches import Patches

Loader = DataLoader[Any]


class Resuming:
    """The steps of a job's training, the same on all ranks.

    ``patience``: seconds that an interrupt waits for the end of a step.
    """

    def __init__(self, setting: Setting, made: Made, namespace: dict[str, Any], patience: float) -> None:
        self._say, self._made, self._namespace, self._patience = setting.say, made, namespace, patience
        self._checkpointer = Checkpointer(setting) if setting.plan.checkpoint is not None else None
        self._stop: Stop | None = None
        self._stepped = self._begun = False
        self._loops = 0
        self.ended_together = False
        """Whether an interrupt ended all ranks after this step, and none went on."""
        self.step = 0 if self._checkpointer is None else self._checkpointer.step
        """Steps that are over, those of the run that is resumed among them."""

    # ------------------------------------------------------------------------------------------- around the user's code

    def install(self, patches: Patches) -> None:
        """Before anyone else wraps the iteration of loaders."""
        patches.hook(register_optimizer_step_post_hook(self._optimizer_stepped))
        position.watch_iterations()
        if self._checkpointer is not None:
            self._made.watch(patches)

    @property
    def seed(self) -> int | None:
        """With which the run began that is resumed."""
        return None if self._checkpointer is None else self._checkpointer.seed

    def began_with(self, seed: int) -> None:
        """The random numbers of this run."""
        if self._checkpointer is not None:
            self._checkpointer.seed = seed

    def finish(self) -> None:
        """The cell has ended well on every rank: save what it has come to.

        Raises ``KeyboardInterrupt`` after an interrupt that found no further step, ``CheckpointError`` as a save does.
        """
        checkpointer, stop = self._checkpointer, self._stop
        if checkpointer is not None:
            self._register()
            checkpointer.arrive()  # a training that had ended: nothing has led there
            if not checkpointer.on_the_way:
                self.step += self._stepped
            if checkpointer.last is None and not self.step:
                self._say("no checkpoint was saved: no optimizer of the cell made a step")
            else:
                checkpointer.save(self.step, complete=True)
        if stop is not None:
            asked = [number for number in _everyone().gather(stop.asked) if number is not None]
            if asked:
                stop.deliver(asked[0])
        self.abandon()

    def abandon(self) -> None:
        """The signals are as they were. Talks to nobody: other ranks may be gone."""
        if self._stop is not None:
            self._stop.close()

    # ----------------------------------------------------------------------------------------------------------- steps

    @contextlib.contextmanager
    def loop(self, loader: Loader, followed: Loader, frame: FrameType) -> Iterator[None]:
        """A loop of the cell over ``loader`` begins, whose batches ``followed`` will give."""
        self._step_is_over()  # of a loop that was left by ``break``
        self._begin()
        position.share(loader, followed)  # the cell itself may call td.follow, td.save and td.load
        if self._checkpointer is not None:
            name = self._made.name_of_loader(loader, frame)
            if self._checkpointer.on_the_way and self._checkpointer.led and not self._checkpointer.knows(name):
                self._checkpointer.arrive()  # it had not begun when the others had ended
            self._checkpointer.register(name, followed)
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1

    def passed(self, followed: Loader) -> int:
        """Batches that an iteration which has just begun passes over."""
        where = position.position_of(followed)
        return 0 if where is None else where.batches if where.live else 0

    def begins_step(self) -> None:
        """A loop over a loader gives a batch, or a model is called to be trained outside of one."""
        if self._checkpointer is not None and (self._checkpointer.arrived or not self._checkpointer.led):
            self._checkpointer.go_on()

    def ends_step(self) -> None:
        """The loop asks for the next batch. Raises ``KeyboardInterrupt`` at the step that all ranks agreed to end."""
        self._step_is_over()

    def trains(self) -> None:
        """A model that optimizers train is about to be distributed."""
        self._begin()
        if self._checkpointer is not None and not self._loops and not self._checkpointer.led:
            self._checkpointer.arrive()
            self.begins_step()

    def _begin(self) -> None:
        if self._stop is None:
            signals = (signal.SIGINT,) if self._checkpointer is None else (signal.SIGINT, signal.SIGTERM)
            self._stop = Stop(_everyone(), signals, self._patience)
            if self._checkpointer is not None:
                self._checkpointer.register("variables", Variables(self._namespace))
        self._register()

    def _register(self) -> None:
        if self._checkpointer is not None:
            for name, thing in self._made.objects().items():
                self._checkpointer.register(name, thing)
                if self._checkpointer.on_the_way and isinstance(thing, torch.optim.Optimizer):
                    # Schedulers warn that no step came before theirs; the steps were made in the run before.
                    thing._opt_called = True  # type: ignore[attr-defined]

    def _optimizer_stepped(self, *_: object) -> None:
        self._stepped = True
        if not self._loops:
            self._step_is_over()

    def _step_is_over(self) -> None:
        checkpointer = self._checkpointer
        if not self._stepped or (checkpointer is not None and checkpointer.on_the_way):
            return
        self._stepped = False
        self.step += 1
        number = None if self._stop is None else self._stop.at(self.step)
        self.ended_together = number is not None
        if checkpointer is not None:
            if number is None:
                checkpointer.after_step(self.step)
            else:
                checkpointer.save(self.step, complete=True)
        if number is not None:
            saved = "" if checkpointer is None else f"; saved in {checkpointer.directory}"
            self._say(f"all ranks stopped after step {self.step}{saved}")
            assert self._stop is not None
            self._stop.deliver(number)


def _everyone() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
