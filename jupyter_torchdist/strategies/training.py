"""What the automatic and the explicit way share: torch is patched for user code and restored at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ..torch_private.training import UNSCALING
from .core.calls import Calls
from .core.context import ParallelContext
from .core.patches import Patches
from .loop.steps import Steps
from .parallel import compiling, fsdp, precision, restore, zero1
from .sharded import noise, norms, statedicts
from .sharded.dtensor_dispatch import ByHand
from .sharded.trained_parameters import Optimized
from .step import batchnorm
from .step.finite import Guard
from .step.verifying import Connection, Verifier


class Training:
    """One job's training on this rank, until its end."""

    def __init__(
        self, context: ParallelContext, optimized: Optimized, steps: Steps, reference: Connection | None = None
    ) -> None:
        """``reference``: the process that runs the cell on one device (``--verify``), on rank 0."""
        self._context, self._group = context, context.data_group
        self._sharded = context.plan.degree("dp_shard") > 1 or context.plan.degree("tp") > 1
        self._optimized, self._steps, self._patches = optimized, steps, Patches()
        self._guard = Guard(context, optimized, lambda: steps.step + 1)
        self._verifier = Verifier(context, reference, self._guard.name)
        self._calls, self._lent, self._by_hand = Calls(), statedicts.Lent(context.say), ByHand(context.plan)
        self._models: list[nn.Module] = []
        """The models whose parameters or submodules were changed."""
        self._whole = False
        """Whether everything is unsharded again."""

    def _wrap(
        self,
        call: Callable[..., Any],
        backward: Callable[..., Any],
        iterate: Callable[..., Any],
        *,
        whole_states: bool = True,
    ) -> None:
        """Patch module calls, ``backward()``, loops over loaders, and functions that meet sharded parameters."""
        self._steps.install(self._patches)  # first: a resumed loop skips indices, not samples
        around = self._patches.around
        self._calls.install(self._patches, self._by_hand.aside(call))
        around(torch.autograd, "backward", backward)
        around(DataLoader, "__iter__", iterate)
        statedicts.install(self._patches, self._lent, whole=whole_states)
        if self._sharded:
            noise.install(self._patches)
            self._by_hand.install(self._patches)
        for place in (torch.nn.utils, torch.nn.utils.clip_grad):
            around(place, "clip_grad_norm_", self._clip)
            if self._sharded:
                around(place, "clip_grad_value_", norms.clip_grad_value_)
        around(*UNSCALING, self._unscale)

    def _unscale(self, *args: Any) -> Any:
        return precision.unscale(*args, device=self._context.device)

    def _clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """``clip_grad_norm_``: a norm over sharded gradients is one number. All ranks must call it."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        sharded = any(isinstance(parameter.grad, DTensor) for parameter in listed)
        return (norms.clip_grad_norm_ if sharded else original)(listed, *args, **kwargs)

    def steps_over(self) -> int:
        """How many steps are over, with those of a checkpoint that ``--resume`` went on from."""
        return self._steps.step

    # ---------------------------------------------------------------------------------------------------------- the end

    def finish(self, names: dict[str, Any] | None = None) -> None:
        """Restore everything, also the values of ``names``; rank 0 has them complete. All ranks must call it.

        Raises ``KeyboardInterrupt`` after an interrupt that found no step.
        """
        self._steps.finish()
        self._guard.finish()
        self._verifier.finish()
        self._come_back(names or {})

    def stop(self, error: BaseException, names: dict[str, Any]) -> None:
        """The cell ended with ``error``. As ``finish`` if an interrupt ended all ranks after the same step."""
        self._steps.if_ended_together(error, lambda: self._come_back(names))
        self.abandon()

    def abandon(self) -> None:
        """Remove the patches of torch. Sharded parameters stay sharded, because other ranks may have ended."""
        self._steps.abandon()
        self._guard.end()
        self._verifier.end()
        self._patches.undo()
        for model in self._changed():
            precision.revert(model)
            compiling.revert(model)

    def _changed(self) -> Iterator[nn.Module]:
        """Models that were distributed, whether they are sharded or not."""
        return iter(self._models)

    def _come_back(self, names: dict[str, Any]) -> None:
        raise NotImplementedError

    def _undo_replicas(self) -> None:
        for model in self._changed():
            batchnorm.revert(model)
        for optimizer in self._optimized:
            zero1.undo(optimizer)

    def _restore_optimizers(self, originals: Any) -> None:
        for optimizer in self._optimized:
            restore.restore_optimizer(optimizer, self._optimized.replaced)
        self._optimized.give_back(originals)

    def explained(self, error: BaseException) -> BaseException:
        """``error``, or an error that explains it by the strategy, with the same traceback."""
        said = self._explain(error)
        return error if said is None else said.with_traceback(error.__traceback__)

    def _explain(self, error: BaseException) -> BaseException | None:
        said = fsdp.explain(error) if self._sharded and self._models else None
        return said or precision.explain(error, self._context)
