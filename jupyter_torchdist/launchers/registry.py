"""The available engines: those of this package, and the entry points of the group ``jupyter_torchdist.launchers``."""

from __future__ import annotations

from ..plugins.registry import Registry
from ..protocol.options.launcher import KUBERNETES, RAY, SLURM, SPARK
from ..protocol.spec import LOCAL, SSH
from .base import Launcher
from .kubernetes import KubernetesLauncher
from .local import LocalLauncher
from .ray import RayLauncher
from .slurm import SlurmLauncher
from .spark import SparkLauncher
from .ssh import SshLauncher

_LAUNCHERS: Registry[Launcher] = Registry(
    "launcher",
    {
        LOCAL: LocalLauncher,
        SSH: SshLauncher,
        SLURM: SlurmLauncher,
        RAY: RayLauncher,
        SPARK: SparkLauncher,
        KUBERNETES: KubernetesLauncher,
    },
)


def launcher(name: str) -> Launcher:
    """The engine with this name. Raises ``OptionError``, ``LaunchError`` (``plugins.registry``)."""
    return _LAUNCHERS.make(name, "--launcher")
