"""The available trackers: those of this package, and the entry points of the group ``jupyter_torchdist.trackers``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..plugins.registry import Registry
from .base import Tracker
from .mlflow import MlflowTracker
from .tensorboard import TensorboardTracker
from .wandb import WandbTracker

_TRACKERS: Registry[Tracker] = Registry(
    "tracker", {"mlflow": MlflowTracker, "tensorboard": TensorboardTracker, "wandb": WandbTracker}
)


def tracker(name: str) -> Tracker:
    """The tracker with this name. Raises ``OptionError``, ``LaunchError`` (``plugins.registry``)."""
    return _TRACKERS.make(name, "--track")


def check(names: Iterable[str], environ: Mapping[str, str]) -> None:
    """Raises ``OptionError``, ``LaunchError`` if a job with these variables cannot be tracked by all of them."""
    for name in names:
        tracker(name).check(environ)
