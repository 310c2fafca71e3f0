"""``--checkpoint DIR --resume`` without a line in the cell: what the automatic way calls while it trains."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from ...protocol.errors import CheckpointError
from ..strategies.base import Setting
from . import position, saving
from .loading import Opened, open_latest
from .ranks import Ranks, all_ranks, apart
from .stopping import Stop
from .variables import Variables

_MINUTES = 10.0
_KEEP = 2


class Checkpointer:
    """Saves while a loop trains, and brings a later run to where it was. Every rank has one and calls it alike.

    In order: make it; ``register`` every object, a loader before the loop over it begins; ``resume`` once the models
    and optimizers have their distributed form; ``after_step`` when an optimizer step is over; ``finish`` at the end, or
    ``close`` when an exception ended it.

    Options of the plan: ``checkpoint_steps``, ``checkpoint_minutes`` (10 without steps), ``checkpoint_keep`` (2).

    How an unmodified loop comes back: ``for epoch in range(…): for batch in loader: …`` runs from its beginning, and a
    registered loader gives nothing in the iterations that were over and only the batches that were not seen in the one
    that was under way. So the bodies of loops over loaders do not run twice; what stands around them does: once an
    epoch, with no batch seen (an average over no batches divides by zero; a line is printed again). ``enumerate``
    begins at 0 again in the epoch that is resumed. What the cell reads outside of loaders (tensors cut by hand,
    ``while`` over an iterator made before) cannot be led anywhere; its models are restored all the same.
    """

    def __init__(self, setting: Setting, directory: str | Path | None = None) -> None:
        chosen = directory if directory is not None else setting.plan.checkpoint
        if chosen is None:
            raise CheckpointError("no directory for checkpoints", "--checkpoint DIR")
        options = setting.plan.options
        self.directory = Path(chosen).absolute()
        self._say = setting.say
        self._ranks = all_ranks()
        self._keep = int(options.get("checkpoint_keep", _KEEP))
        self._cadence = Cadence(self._ranks, options.get("checkpoint_steps"), options.get("checkpoint_minutes"))
        self._objects: dict[str, Any] = {}
        self._variables: Variables | None = None
        self._arrived = False
        self._last: int | None = None
        self._opened = self._open() if setting.plan.resume else None
        self._stop = Stop(self._ranks)

    def _open(self) -> Opened | None:
        opened = open_latest(self.directory, "")
        if opened is None:
            self._say(f"nothing to resume in {self.directory}: beginning at step 0")
        return opened

    @property
    def step(self) -> int:
        """The step of the checkpoint that is resumed; 0 without one."""
        return 0 if self._opened is None else self._opened.step or 0

    def register(self, name: str, value: Any) -> None:
        """Save ``value`` under ``name`` from now on: whatever ``td.save`` takes, and ``Variables`` of a cell.

        A loader or variables that are in the checkpoint are led there from here on; ``resume`` does the rest. A name
        that is registered again means the new object: a loader that is made anew in each epoch goes on counting.
        """
        earlier = self._objects.get(name)
        if isinstance(value, Variables):
            self._variables = value
            return
        self._objects[name] = value
        if not isinstance(value, DataLoader):
            return
        if isinstance(earlier, DataLoader) and earlier is not value:
            position.hand_on(earlier, value)
            return
        where = position.follow(value)
        if self._opened is not None and earlier is None and name in self._opened.own:
            where.go_to(self._opened.own[name], self._arrive)

    def resume(self) -> int:
        """Fill what is registered from the checkpoint and give its step; 0 without one.

        Random numbers and variables are set when the first loader arrives where it was, before its batch is loaded,
        or here when none is on the way. Raises ``CheckpointError`` as ``td.load`` does; nothing is changed then.
        """
        if self._opened is None:
            return 0
        self._opened.restore({name: one for name, one in self._objects.items() if not isinstance(one, DataLoader)})
        loaders = [one for one in self._objects.values() if isinstance(one, DataLoader)]
        if not any(position.follow(loader).goal for loader in loaders):
            self._arrive()
        for note in self._opened.notes:
            self._say(f"{self._opened.path.name}: {note}")
        self._say(f"resumed at step {self.step} from {self._opened.path}")
        return self.step

    def _arrive(self) -> None:
        if self._arrived or self._opened is None:
            return
        self._arrived = True
        self._opened.restore_random()
        if self._variables is not None:
            self._variables.restore(self._opened.own.get("variables", {}))

    def after_step(self, step: int) -> None:
        """``step`` optimizer steps are done. Saves when it is time to.

        After an interrupt or SIGTERM of any rank: saves at the step that all agree on, waits until that is complete,
        and lets the signal act. Raises ``KeyboardInterrupt`` then, and ``CheckpointError`` when an earlier save failed.
        """
        signal = self._stop.at(step)
        if self._cadence.due(step) or signal is not None:
            self._save(step)
        if signal is not None:
            saving.wait()
            self._say(f"stopped at step {step}; saved in {self.directory}")
            self._stop.deliver(signal)

    def _save(self, step: int) -> None:
        if step == self._last:
            return
        own = {} if self._variables is None else {"variables": self._variables.changed()}
        saving.save_named(self.directory, self._objects, step, self._keep, True, self._say, own)
        self._last = step

    def finish(self, step: int) -> None:
        """The training is over on every rank, after ``step`` steps: wait for the last save, give the signals back.

        A signal of any rank that found no further step acts now, after a save. Raises what ``after_step`` raises.
        """
        saving.wait()
        asked = [signal for signal in self._ranks.gather(self._stop.asked) if signal is not None]
        if asked:
            self._save(step)
            saving.wait()
            self._stop.deliver(asked[0])
        self._stop.close()

    def close(self) -> None:
        """Give the signals back, and talk to nobody: this rank's training ended with an exception."""
        self._stop.close()


class Cadence:
    """When to save: every so many steps, every so many minutes, or both. The same answer on every rank."""

    def __init__(self, ranks: Ranks, steps: int | None, minutes: float | None) -> None:
        self._steps = steps
        if steps is None and minutes is None:
            minutes = _MINUTES
        self._ranks = ranks if minutes is None else apart(ranks)
        self._seconds = None if minutes is None else 60 * minutes
        self._begun: tuple[int, float] | None = None
        self._look = 0
        self._saved = time.monotonic()

    def due(self, step: int) -> bool:
        by_steps = self._steps is not None and step % self._steps == 0
        return self._by_minutes(step) or by_steps

    def _by_minutes(self, step: int) -> bool:
        """Clocks differ, so rank 0's counts; it is asked at few steps, at half the time that is left each."""
        if self._seconds is None:
            return False
        if self._begun is None:
            self._begun, self._look = (step, time.monotonic()), step + 2
        if step < self._look:
            return False
        save, self._look = self._ranks.by_first(lambda: self._decide(step))
        return save

    def _decide(self, step: int) -> tuple[bool, int]:
        assert self._begun is not None and self._seconds is not None
        now = time.monotonic()
        each = max((now - self._begun[1]) / max(1, step - self._begun[0]), 1e-6)
        left = self._saved + self._seconds - now
        save = left <= each / 2
        if save:
            self._saved, left = now, self._seconds
        return save, step + max(1, int(left / each / 2))
