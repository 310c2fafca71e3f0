"""This rank's part in a job, for the verbs of ``api`` that depend on its strategy. Nothing is imported for a job
without them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ...protocol.strategy import StrategyPlan

if TYPE_CHECKING:
    import torch

    from .context import ParallelContext


class Way(Protocol):
    """A way in which user code trains on many ranks."""

    SAVING: str
    """What to do so that nothing is lost when ranks are cut short."""

    def finish(self, names: dict[str, Any] | None = None) -> None:
        """Everything is plain again, whole on rank 0, and so is what ``names`` hold. All ranks call it."""

    def stop(self, error: BaseException, names: dict[str, Any]) -> None:
        """The cell ended with ``error``: as ``finish`` where an interrupt ended all ranks after the same step."""

    def abandon(self) -> None:
        """torch is as it was. What is sharded stays so: other ranks may be gone."""

    def explained(self, error: BaseException) -> BaseException:
        """``error``, or what an error of torch's has to do with the strategy, raised where it was."""

    def apart(self) -> Iterator[object]:
        """What this rank has only a part of."""

    def weight(self) -> float | None:
        """What this rank's value counts with in the mean of the data ranks; None: as much as any other's."""


class AutomaticWay(Way, Protocol):
    """``--strategy`` on an unmodified cell."""

    def note_captured(self) -> None:
        """The bundle is loaded."""

    def stand_aside(self, why: str) -> None:
        """Leave the cell to itself, and tell the user ``why``."""


class PreparedWay(Way, Protocol):
    """``td.prepare``."""

    def take(self, things: Sequence[Any]) -> None:
        """Make them distributed, in place. Raises ``StrategyError``."""


class RankContext:
    """What the worker knows of the job.

    ``say`` tells the user one line, once a job; ``patience``: seconds that an interrupt waits for the end of a step.
    """

    def __init__(
        self, plan: StrategyPlan, device: torch.device, say: Callable[[str], None], patience: float = 2.5
    ) -> None:
        self.device, self.patience = device, patience
        self._plan, self._say = plan, say
        self.automatic: AutomaticWay | None = None
        self.prepared: PreparedWay | None = None

    @property
    def has_mesh(self) -> bool:
        """Whether the job has a strategy; without one all ranks are data ranks."""
        return self._plan.name != "none"

    @cached_property
    def context(self) -> ParallelContext:
        """The strategy asked for, or ``ddp`` where none is; all ranks ask for it at the same moment."""
        from .context import make_context

        plan = self._plan
        if not self.has_mesh:
            ranks = int(os.environ["WORLD_SIZE"])
            plan = StrategyPlan("ddp", {"dp_replicate": ranks} if ranks > 1 else {})
        context = make_context(plan, self.device, self._say)
        self._plan = plan
        return context

    def place(self, dimension: str) -> int | None:
        """This rank's number along a dimension of the mesh, ``dp`` for both data dimensions; None without a mesh."""
        if not self.has_mesh:
            return None
        context = self.context
        if (context.data_ranks if dimension == "dp" else context.plan.degree(dimension)) == 1:
            return 0
        mesh = context.data_mesh if dimension == "dp" else context.mesh[dimension]
        return int(mesh.get_local_rank())


current: RankContext | None = None
"""None in a process that is no rank of a job."""


def take(part: RankContext | None) -> None:
    """The worker's: what this process is part of."""
    global current
    current = part
