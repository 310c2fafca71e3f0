"""What the adapters of all libraries need: the facts of the rank, and how a method is wrapped."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...protocol.errors import UserError
from ...protocol.strategy import StrategyPlan


@dataclass
class TrainerRank:
    """The facts of a rank that the libraries ask for, and where their metrics go."""

    number: int
    world_size: int
    local_world_size: int
    nodes: int
    on_cpu: bool
    log: Callable[[dict[str, Any], Any], None]
    """Draws scalars at a step (None: in the order of the calls)."""
    say: Callable[[str], None]
    """Shows the user one line."""
    strategy: StrategyPlan = field(default_factory=StrategyPlan)
    """The job's strategy if the code trains by itself, else ``none``. Known before user code runs."""

    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when user code has ended well, on all ranks."""

    def finish(self) -> None:
        for call in self.at_end:
            call()

    def draw(self, metrics: Mapping[str, Any], step: Any = None) -> None:
        """Draw the numbers among ``metrics``. Loggers of libraries also take texts and tables, which are no curves."""
        if found := dict(_numbers(metrics)):
            self.log(found, step)


def _numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, (int, float)) or getattr(value, "numel", lambda: 0)() == 1:
            yield str(name), value


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the method ``name`` by ``around(original, self, *args, **kwargs)``, if ``owner`` has it."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(owner, name, method)


def made_alone(what: str, rank: TrainerRank) -> UserError:
    """The error for an object that was made in the notebook, where it counted one process."""
    return UserError(
        f"{what} was made in an earlier cell, for one process: each of the {rank.world_size} ranks would train alone",
        "make it in this cell",
    )


def meet_strangers(kind: Any, entries: tuple[str, ...], meet: Callable[[Any], None]) -> None:
    """Have ``meet`` look once at each object of ``kind`` that was not made here, when one of ``entries`` is called."""
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    def make(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        known.add(self)
        original(self, *args, **kwargs)

    def begin(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in known:
            meet(self)
            known.add(self)
        return original(self, *args, **kwargs)

    wrap(kind, "__init__", make)
    for name in entries:
        wrap(kind, name, begin)


def refuse_strangers(kind: Any, entries: tuple[str, ...], rank: TrainerRank) -> None:
    """Let the methods ``entries`` of ``kind`` refuse objects that were made in the notebook, where they counted one."""

    def meet(stranger: Any) -> None:
        if stranger.world_size < rank.world_size:
            raise made_alone(f"the {type(stranger).__name__}", rank)

    meet_strangers(kind, entries, meet)
