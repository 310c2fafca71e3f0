"""The ``Trainer`` of Hugging Face transformers in a rank: its logs are curves, one of an earlier cell sees all ranks.

Seen in transformers 5.23: ``TrainingArguments`` keeps its device and the count of processes in ``_setup_devices``, a
cached property, and in ``distributed_state``; ``rewrite_logs`` names metrics as its trackers do.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import Any

from ..afterimport import Change
from .accelerate import forget_settings, tell_strategy
from .base import TrainerRank, meet_strangers, wrap


def changes(rank: TrainerRank) -> dict[str, Change]:
    return {
        "transformers.training_args": _arguments,
        "transformers.trainer": functools.partial(_trainer, rank),
    }


def _arguments(module: ModuleType) -> None:
    """Arguments know the process that they are in, also after they went to another one."""

    def leave(self: Any) -> dict[str, Any]:
        return {**vars(self), "_setup_devices": DeviceHere()}  # a PartialState does so by itself

    def arrive(self: Any, state: dict[str, Any]) -> None:
        vars(self).update(state, distributed_state=_process(), _setup_devices=_process().device)

    module.TrainingArguments.__getstate__ = leave
    module.TrainingArguments.__setstate__ = arrive


class DeviceHere:
    """Becomes the device of the process in which it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return device_here, ()


def device_here() -> Any:
    return _process().device


def _process() -> Any:
    return importlib.import_module("accelerate.state").PartialState()


def _trainer(rank: TrainerRank, module: ModuleType) -> None:
    named: Any = importlib.import_module("transformers.integrations.integration_utils").rewrite_logs

    def log(original: Any, self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        original(self, logs, *args, **kwargs)
        if rank.number == 0:  # they are of all ranks together
            rank.draw(named(logs), self.state.global_step)

    def meet(trainer: Any) -> None:
        if rank.world_size > 1:
            _set_up_again(trainer, module)
            rank.say(
                f"the {type(trainer).__name__} was made in an earlier cell, for one process; "
                f"it was set up again for the {rank.world_size} ranks"
            )

    def accelerate(original: Any, self: Any) -> None:
        tell_strategy(rank)
        given = self.args.mixed_precision
        if given == "no":  # else it stands in the arguments
            self.args.mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        try:
            original(self)
        finally:
            self.args.mixed_precision = given

    wrap(module.Trainer, "log", log)
    wrap(module.Trainer, "create_accelerator_and_postprocess", accelerate)
    meet_strangers(module.Trainer, ("train", "evaluate", "predict"), meet)


def _set_up_again(trainer: Any, module: ModuleType) -> None:
    """What ``Trainer.__init__`` does with the ranks that it finds."""
    for name in ("optimizer", "lr_scheduler"):  # without accelerate's wrapper, which belongs to the other process
        found = getattr(trainer, name)
        setattr(trainer, name, getattr(found, "optimizer" if name == "optimizer" else "scheduler", found))
    forget_settings()
    trainer.create_accelerator_and_postprocess()
    trainer.model_wrapped = trainer.model
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    for callback in [one for one in trainer.callback_handler.callbacks if "Notebook" in type(one).__name__]:
        trainer.remove_callback(callback)  # it draws with the widgets of a kernel
        trainer.add_callback(module.ProgressCallback)
