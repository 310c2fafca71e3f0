"""``--checkpoint DIR --resume`` without changes in the cell: the automatic way calls this while it trains."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from ...checkpoint import position, saving, shared
from ...checkpoint.loading import Opened, open_latest
from ...checkpoint.objects import kind_of
from ...checkpoint.rank_agreement import Ranks, all_ranks, apart
from ...checkpoint.variables import Variables
from ...protocol.errors import CheckpointError
from ..core.context import ParallelContext
from ..sharded.statedicts import as_they_are

_MINUTES = 10.0
_KEEP = 2
TENSORS = "tensors"
"""Name of the cell's own tensors among the objects of a checkpoint."""


class Checkpointer:
    """Saves while a cell trains, and resumes the training in a later run. Every rank makes the same calls.

    The order of calls: ``register`` every object before its training loop begins; ``arrive`` before the first step that
    was not done, unless a registered loader calls it; then ``go_on``; ``after_step`` when a step is over.

    Options of the plan: ``checkpoint_steps``, ``checkpoint_minutes`` (10 without steps), ``checkpoint_keep`` (2).

    How an unmodified loop is resumed: ``for epoch in range(…): for batch in loader: …`` runs from its beginning. A
    registered loader gives no batch in the epochs that were over. In the interrupted epoch it gives only the batches
    that were not seen. So the bodies of loops over loaders do not run twice. The code around them does, without any
    batch: an average over batches divides by zero, a line is printed again. ``enumerate`` begins at 0 in the resumed
    epoch. Data that the cell reads without loaders (tensors sliced by hand, ``while`` over an existing iterator)
    cannot be skipped; the models are still restored.
    """

    def __init__(self, context: ParallelContext) -> None:
        assert context.plan.checkpoint is not None
        options = context.plan.options
        self.directory = Path(context.plan.checkpoint).absolute()
        self._say = context.say
        self._ranks = all_ranks()
        self._keep = int(options.get("checkpoint_keep", _KEEP))
        self._cadence = Cadence(self._ranks, options.get("checkpoint_steps"), options.get("checkpoint_minutes"))
        self._objects: dict[str, Any] = {}
        self._variables: Variables | None = None
        self.seed: int | None = None
        """The initial random seed of the run; a resumed run begins with the same seed."""
        self.arrived = self.went_on = False
        """Whether the state was restored, and whether the training has changed it since."""
        self.last: int | None = None
        """The step of the newest checkpoint that this run saved or started from."""
        shared.check(self._ranks, self.directory)
        self._opened = self._open(context.plan.since) if context.plan.resume else None

    def _open(self, since: float) -> Opened | None:
        opened = open_latest(self.directory, "", since)
        if opened is None:
            self._say(f"nothing to resume in {self.directory}: beginning at step 0")
            return None
        self.seed, self.last = opened.own.get("seed"), opened.step
        return opened

    @property
    def step(self) -> int:
        """The step of the checkpoint that is resumed; 0 without one."""
        return 0 if self._opened is None else self._opened.step or 0

    @property
    def on_the_way(self) -> bool:
        """Whether a step that was done already would be done again."""
        return self._opened is not None and not self.went_on

    @property
    def led(self) -> bool:
        """Whether a loader in the checkpoint skips to the position where it was saved."""
        return self._opened is not None and "loader" in self._opened.content.kinds.values()

    def knows(self, name: str) -> bool:
        """Whether the checkpoint that is resumed has an object of that name."""
        return self._opened is not None and name in self._opened.content.kinds

    def register(self, name: str, value: Any) -> None:
        """Save ``value`` under ``name`` from now on: everything that ``td.save`` takes, and ``Variables`` of a cell.

        A loader that is in the checkpoint skips to its saved position. A name that is registered again means the new
        object: a loader that is built again in each epoch continues the count.
        """
        if isinstance(value, Variables):
            self._variables = value
            return
        earlier = self._objects.get(name)
        self._objects[name] = value
        if not isinstance(value, DataLoader):
            return
        if isinstance(earlier, DataLoader) and earlier is not value:
            position.hand_on(earlier, value)
            return
        where = position.follow(value)
        if self._opened is not None and earlier is None and name in self._opened.own:
            where.go_to(self._opened.own[name], self.arrive)

    def arrive(self) -> None:
        """Restore everything that is registered from the checkpoint, if there is one.

        A later call restores again, until ``go_on``: code around finished loops has run in between.
        Raises ``CheckpointError`` as ``td.load`` does, before anything is changed.
        """
        opened = self._opened
        if opened is None or self.went_on:
            return
        known = {name: value for name, value in self._objects.items() if self.knows(name)}
        known = {name: value for name, value in known.items() if not isinstance(value, DataLoader)}
        values = opened.restore(known)
        opened.restore_random()
        if self._variables is not None:
            self._variables.restore(values.get(TENSORS, {}))
            self._variables.restore(opened.own.get("variables", {}))
        if not self.arrived:
            self._tell(opened)
        self.arrived = True

    def _tell(self, opened: Opened) -> None:
        for note in opened.notes:
            self._say(f"{opened.path.name}: {note}")
        self._say(f"resumed at step {self.step} from {opened.path}")
        if not any(isinstance(one, position.Saved) for one in opened.own.values()):
            self._say(
                f"{opened.path.name} has no position of a DataLoader: a loop such as `for step in range(N)` starts "
                "again at 0, and trains all N steps"
            )

    def go_on(self) -> None:
        """The training continues from the restored state. Raises ``CheckpointError`` when the optimizers differ."""
        if self._opened is None or self.went_on:
            return
        self.went_on = True
        there = {name for name, kind in self._opened.content.kinds.items() if kind == "optimizer"}
        here = {name for name, one in self._objects.items() if kind_of(one) == "optimizer"}
        if here != there:
            names = sorted(there - here), sorted(here - there)
            is_there = f"has {names[0][0]}, which this cell does not have" if names[0] else f"has no {names[1][0]}"
            raise CheckpointError(
                f"{self._opened.path} was saved by a different cell: it {is_there}",
                "resume the cell that was interrupted, or give --checkpoint another directory",
            )
        lost = [name for name in self._opened.content.kinds if name not in self._objects and name != TENSORS]
        if lost:
            self._say(
                f"{self._opened.path.name} has {', '.join(lost)}, which this cell has not created yet: not loaded"
            )

    def after_step(self, step: int) -> None:
        """``step`` steps are done. Saves when it is due. Raises ``CheckpointError`` when an earlier save failed."""
        if self._cadence.due(step):
            self.save(step)

    def save(self, step: int, *, complete: bool = False) -> None:
        """Save everything that is registered; ``complete``: return when it is on disk."""
        if step != self.last:
            own: dict[str, Any] = {"seed": self.seed}
            objects = self._objects
            if self._variables is not None:
                own["variables"] = self._variables.changed()
                objects = {**objects, TENSORS: self._variables.changed_tensors()}
            with as_they_are():
                saving.save_named(self.directory, objects, step, self._keep, True, self._say, own)
            self.last = step
        if complete:
            saving.wait()


class Cadence:
    """When to save: after a number of steps, of minutes, or both. The answer is the same on every rank."""

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
        """Rank 0 decides by its clock, because clocks differ. It decides again after half of the time left."""
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
