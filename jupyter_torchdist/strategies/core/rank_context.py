"""This rank's part in a job, for the functions of ``api`` that depend on the strategy. Imports torch lazily."""

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
    """How user code trains on many ranks."""

    SAVING: str
    """What to do so that nothing is lost when ranks are cut short."""

    def finish(self, names: dict[str, Any] | None = None) -> None:
        """Make everything plain again, full on rank 0, also the objects in ``names``. A collective call."""

    def stop(self, error: BaseException, names: dict[str, Any]) -> None:
        """The cell ended with ``error``; as ``finish`` if an interrupt ended all ranks after the same step."""

    def abandon(self) -> None:
        """Remove all patches of torch. Shards stay sharded, because other ranks may be gone."""

    def explained(self, error: BaseException) -> BaseException:
        """``error``, or an error that explains it by the strategy, with the same traceback."""

    def apart(self) -> Iterator[object]:
        """Objects of which this rank holds only a part."""

    def weight(self) -> float | None:
        """The weight of this rank's value in a mean over the data ranks; None: all ranks weigh the same."""

    def samples(self) -> int | None:
        """Samples of the batch of all ranks that user code was given since the last call; None if unknown."""


class AutomaticWay(Way, Protocol):
    """``--strategy`` on an unmodified cell."""

    def note_captured(self) -> None:
        """Called when the bundle is loaded."""

    def stand_aside(self, why: str) -> None:
        """Do not distribute the cell, and tell the user ``why``."""


class PreparedWay(Way, Protocol):
    """``td.prepare``."""

    def take(self, things: Sequence[Any]) -> None:
        """Distribute ``things`` in place. Raises ``StrategyError``."""


class RankContext:
    """The worker's knowledge of the job.

    ``say`` prints a line for the user, once a job. ``proves`` hears that the first steps are being proved (0), and
    then the seconds that it took. ``patience``: seconds that an interrupt waits for the end of a step.
    """

    def __init__(
        self,
        plan: StrategyPlan,
        device: torch.device,
        say: Callable[[str], None],
        proves: Callable[[float], None] = lambda _seconds: None,
        patience: float = 2.5,
    ) -> None:
        self.device, self.patience = device, patience
        self._plan, self._say, self._proves = plan, say, proves
        self.automatic: AutomaticWay | None = None
        self.prepared: PreparedWay | None = None

    @property
    def has_mesh(self) -> bool:
        """Whether the job has a strategy; without one all ranks are data ranks."""
        return self._plan.name != "none"

    @property
    def alone(self) -> bool:
        """Whether the job has one rank."""
        return int(os.environ["WORLD_SIZE"]) == 1

    @cached_property
    def context(self) -> ParallelContext:
        """The context of the requested strategy, or of ``ddp`` by default. The first access is collective."""
        from .context import make_context

        plan = self._plan
        if not self.has_mesh:
            ranks = int(os.environ["WORLD_SIZE"])
            plan = StrategyPlan("ddp", {"dp_replicate": ranks} if ranks > 1 else {})
        context = make_context(plan, self.device, self._say, self._proves)
        self._plan = plan
        return context

    def place(self, dimension: str) -> int | None:
        """This rank's index along a mesh dimension (``dp``: both data dimensions together); None without a mesh."""
        if not self.has_mesh:
            return None
        context = self.context
        if (context.data_ranks if dimension == "dp" else context.plan.degree(dimension)) == 1:
            return 0
        mesh = context.data_mesh if dimension == "dp" else context.mesh[dimension]
        return int(mesh.get_local_rank())


current: RankContext | None = None
"""None in a process that is not a rank of a job."""


def take(part: RankContext | None) -> None:
    """Set ``current``; called by the worker."""
    global current
    current = part
