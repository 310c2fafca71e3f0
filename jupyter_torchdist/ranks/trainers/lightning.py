"""Lightning's ``Trainer`` and ``Fabric`` in a rank: CPU ranks are found, what they log is drawn.

Seen in Lightning 2.6, whose two packages (``lightning``; ``pytorch_lightning`` and ``lightning_fabric``) hold the same
modules: ``_LoggerConnector.log_metrics``, ``_MultiProcessingLauncher.launch``,
``_SubprocessScriptLauncher``, ``callback_connector._RICH_AVAILABLE``.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...protocol.errors import UserError
from ..afterimport import Change
from .base import TrainerRank, refuse_strangers, wrap

_TRAINERS = ("lightning.pytorch", "pytorch_lightning")
_FABRICS = ("lightning.fabric", "lightning_fabric")
_LOGGERS = "trainer.connectors.logger_connector.logger_connector"
_ENTRIES = ("fit", "validate", "test", "predict")


def changes(rank: TrainerRank) -> dict[str, Change]:
    found: dict[str, Change] = {}
    for package in _TRAINERS:
        found[f"{package}.trainer.trainer"] = functools.partial(_trainer, rank)
        found[f"{package}.trainer.connectors.callback_connector"] = _without_rich
        found[f"{package}.{_LOGGERS}"] = functools.partial(_loggers, rank)
    for package in _FABRICS:
        found[f"{package}.fabric"] = functools.partial(_fabric, rank)
    for package in (*_TRAINERS, *_FABRICS):
        found[f"{package}.strategies.launchers.multiprocessing"] = _without_launcher
        found[f"{package}.strategies.launchers.subprocess_script"] = _leave_launcher
        if rank.on_cpu:
            found[f"{package}.accelerators.cpu"] = functools.partial(_count_cpus, rank)
    return found


def _count_cpus(rank: TrainerRank, module: ModuleType) -> None:
    """``devices="auto"`` is one process for each rank of this node, as it is one for each GPU."""
    module.CPUAccelerator.auto_device_count = staticmethod(lambda: rank.local_world_size)


def _trainer(rank: TrainerRank, module: ModuleType) -> None:
    _tell_nodes("PL_TRAINER_NUM_NODES", rank)
    refuse_strangers(module.Trainer, _ENTRIES, rank)


def _tell_nodes(variable: str, rank: TrainerRank) -> None:
    """For a ``Trainer`` or a ``Fabric`` without ``num_nodes``."""
    if rank.nodes > 1:
        os.environ.setdefault(variable, str(rank.nodes))


def _loggers(rank: TrainerRank, module: ModuleType) -> None:
    def log(original: Any, self: Any, metrics: Any, step: Any = None) -> None:
        rank.draw(metrics, self.trainer.global_step if step is None else step)
        original(self, metrics, step)

    wrap(module._LoggerConnector, "log_metrics", log)


def _fabric(rank: TrainerRank, module: ModuleType) -> None:
    _tell_nodes("LT_NUM_NODES", rank)
    refuse_strangers(module.Fabric, ("launch", "setup", "backward"), rank)

    def log(original: Any, self: Any, metrics: Any, step: Any = None) -> None:
        rank.draw(metrics, step)
        original(self, metrics, step)

    wrap(module.Fabric, "log_dict", log)


def _without_rich(module: ModuleType) -> None:
    """Its live display needs a terminal; the bar of tqdm is text."""
    vars(module)["_RICH_AVAILABLE"] = False


class RanksLauncher:
    """Takes the place of Lightning's launcher in a ``Trainer`` that left its ranks: in ranks it calls, else refuses."""

    is_interactive_compatible = True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return function(*args, **kwargs)
        raise UserError(
            "this Trainer was made on ranks, which have ended",
            "use it below %%distribute, or make a Trainer in this cell",
        )


def _leave_launcher(module: ModuleType) -> None:
    module._SubprocessScriptLauncher.__reduce__ = lambda self: (RanksLauncher, ())


def _without_launcher(module: ModuleType) -> None:
    def refuse(_original: Any, self: Any, *_: Any, **__: Any) -> Any:
        raise UserError(
            "this strategy of Lightning starts ranks of its own, and the cell runs on ranks already",
            'leave strategy= out, or write strategy="ddp"',
        )

    wrap(module._MultiProcessingLauncher, "launch", refuse)


def why_alone() -> str | None:
    """Whether Lightning runs: then ``devices=1`` stands in the cell."""
    if not any(f"{package}.fabric" in sys.modules for package in _FABRICS):
        return None
    return "Lightning takes one device for one process: leave devices= out"
