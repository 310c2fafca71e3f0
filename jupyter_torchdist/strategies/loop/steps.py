"""Where the steps of a cell's training end, and an interrupt that ends all ranks after the same step.

A step is over when a loop over a ``DataLoader`` asks for its next batch and an optimizer has stepped since the last
one: then all code in the loop's body has run. Outside of such loops each optimizer step is one step.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from ...checkpoint import position
from ...checkpoint.rank_agreement import Ranks
from ...checkpoint.stopping import Stop
from ..core.patches import Patches
from ..core.rng import Noise

Loader = DataLoader[Any]
Batch = TypeVar("Batch")


class Steps:
    """The steps of a job's training, the same on all ranks.

    ``say`` tells the user one line; ``patience``: seconds that an interrupt waits for the end of a step.
    """

    seed: int | None = None
    """The initial random seed of the run that is resumed."""

    _signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
    """The signals that end a training after a step."""

    def __init__(self, say: Callable[[str], None], patience: float) -> None:
        self._say, self._patience = say, patience
        self._stop: Stop | None = None
        self._stepped = False
        self._loops = 0
        self._ended_together = False
        """Whether an interrupt ended all ranks after this step."""
        self.step = 0
        """The number of steps that are over."""

    # ------------------------------------------------------------------------------------------- around the user's code

    def install(self, patches: Patches) -> None:
        """Call this before anything else patches the iteration of loaders."""
        patches.hook(register_optimizer_step_post_hook(self._optimizer_stepped))
        patches.hook(register_optimizer_step_post_hook(Noise(self._say)))
        position.watch_iterations()

    def began_with(self, seed: int) -> None:
        """The random numbers of this run began with ``seed``."""

    def finish(self) -> None:
        """The cell has ended well on every rank. Raises ``KeyboardInterrupt`` after an interrupt that found no step."""
        if self._stop is not None:
            asked = [number for number in _everyone().gather(self._stop.asked) if number is not None]
            if asked:
                self._stop.deliver(asked[0])
        self.abandon()

    def if_ended_together(self, error: BaseException, come_back: Callable[[], None]) -> None:
        """Call ``come_back`` if ``error`` is an interrupt that ended all ranks after the same step."""
        if self._ended_together and isinstance(error, KeyboardInterrupt):
            with contextlib.suppress(Exception):  # a rank has ended after all: then all stays sharded
                come_back()
                dist.barrier()

    def abandon(self) -> None:
        """Restore the signal handlers. Does not communicate, because other ranks may have ended."""
        if self._stop is not None:
            self._stop.close()

    # ----------------------------------------------------------------------------------------------------------- steps

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a loop; a step may be over when the loop asks for the next one."""
        with self._within_loop():
            for batch in batches:
                yield batch
                self.ends_step()

    @contextlib.contextmanager
    def loop(self, loader: Loader, followed: Loader, frame: FrameType) -> Iterator[None]:
        """A loop of the cell over ``loader`` begins in ``frame``; ``followed`` will give its batches."""
        with self._within_loop():
            position.share(loader, followed)  # the cell itself may call td.follow, td.save and td.load
            yield

    @contextlib.contextmanager
    def _within_loop(self) -> Iterator[None]:
        self.ends_step()  # the step of a loop that was left by ``break``
        self.begin()
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1

    def passed(self, followed: Loader) -> int:
        """How many batches the iteration that has just begun skips."""
        where = position.position_of(followed)
        return 0 if where is None else where.batches if where.live else 0

    def begins_step(self) -> None:
        """A loop over a loader gives a batch, or a model is called for training outside of such a loop."""

    def ends_step(self) -> None:
        """A step is over, if an optimizer has stepped. Raises ``KeyboardInterrupt`` if all ranks agreed to end."""
        if not self._stepped:
            return
        self._stepped = False
        self.step += 1
        number = None if self._stop is None else self._stop.at(self.step)
        self._ended_together = number is not None
        kept = self._keep(last=number is not None)
        if number is not None:
            self._say(f"all ranks stopped after step {self.step}{kept}")
            assert self._stop is not None
            self._stop.deliver(number)

    def trains(self) -> None:
        """A model that optimizers train is about to be distributed."""
        self.begin()

    def begin(self) -> None:
        """All ranks are about to train: from now on an interrupt acts at the end of a step."""
        if self._stop is None:
            self._stop = Stop(_everyone(), self._signals, self._patience)

    def _optimizer_stepped(self, *_: object) -> None:
        self._stepped = True
        if not self._loops:
            self.ends_step()

    def _keep(self, last: bool) -> str:
        """Save at the end of a step; ``last``: all ranks end after it. Returns text on where it is saved, or ""."""
        return ""


def _everyone() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
