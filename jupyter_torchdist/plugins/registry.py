"""Parts that a package adds by an entry point, found by name: launchers and trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from ..protocol.errors import LaunchError, OptionError

Part = TypeVar("Part")


@dataclass(frozen=True)
class Registry(Generic[Part]):
    """The parts of one kind. Each is made without arguments.

    ``kind`` is what a part is called (``launcher``); ``ours`` are those of this package.
    """

    kind: str
    ours: Mapping[str, Callable[[], Part]]

    @property
    def group(self) -> str:
        """The group of entry points."""
        return f"jupyter_torchdist.{self.kind}s"

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted. Nothing is imported."""
        return tuple(sorted({*self.ours, *self._points()}))

    def make(self, name: str, flag: str) -> Part:
        """The part with this name, which the option ``flag`` asked for.

        Raises ``OptionError`` when the name is not registered, ``LaunchError`` when its package cannot be imported.
        """
        if name in self.ours:  # scanning all installed packages would take longer than starting a rank
            return self.ours[name]()
        found = self._points().get(name)
        if found is None:
            raise OptionError(
                f"there is no {self.kind} {name!r}",
                f"these are installed: {', '.join(self.names)}; "
                f"a package adds one with the entry point group {self.group}",
            )
        try:
            made: Part = found.load()()
        except Exception as error:  # a foreign package may raise anything at import
            raise LaunchError(
                f"{flag} {name}: {_package(found)} could not be loaded ({found.value}): {error!r}",
                f"install what it needs, or remove it; other {self.kind}s still work: "
                f"{', '.join(other for other in self.names if other != name)}",
            ) from error
        return made

    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}


def _package(point: EntryPoint) -> str:
    return f"package {point.dist.name} {point.dist.version}" if point.dist else "its package"
