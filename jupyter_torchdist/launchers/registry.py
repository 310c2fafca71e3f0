"""The available engines: the entry points of the group ``jupyter_torchdist.launchers``, by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from ..protocol.errors import LaunchError, OptionError
from ..protocol.options.launcher import SLURM
from ..protocol.spec import LOCAL, SSH
from .base import Launcher
from .local import LocalLauncher
from .slurm import SlurmLauncher
from .ssh import SshLauncher

_OURS: dict[str, Callable[[], Launcher]] = {LOCAL: LocalLauncher, SSH: SshLauncher, SLURM: SlurmLauncher}

GROUP = "jupyter_torchdist.launchers"


def names() -> tuple[str, ...]:
    """Every name that ``--launcher`` takes, sorted. No launcher is imported."""
    return tuple(sorted({*_OURS, *_points()}))


def launcher(name: str) -> Launcher:
    """The engine with this name.

    Raises ``OptionError`` when the name is not registered, ``LaunchError`` when its package cannot be imported.
    """
    if name in _OURS:  # scanning all installed packages would take longer than starting a rank
        return _OURS[name]()
    found = _points().get(name)
    if found is None:
        raise OptionError(
            f"there is no launcher {name!r}",
            f"these are installed: {', '.join(names())}; a package adds one with the entry point group {GROUP}",
        )
    try:
        made: Launcher = found.load()()
    except Exception as error:  # a foreign package may raise anything at import
        raise LaunchError(
            f"--launcher {name}: {_package(found)} could not be loaded ({found.value}): {error!r}",
            f"install what it needs, or remove it; other launchers still work: "
            f"{', '.join(other for other in names() if other != name)}",
        ) from error
    return made


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _package(point: EntryPoint) -> str:
    return f"package {point.dist.name} {point.dist.version}" if point.dist else "its package"
