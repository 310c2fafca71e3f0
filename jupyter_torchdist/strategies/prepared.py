"""``td.prepare``: the explicit way. Models, optimizers, loaders and schedulers become distributed where it is called.

It uses the same parts as the automatic way, but without the analysis. A rank's loop sees this rank's rows of each
batch and computes only with them. Gradients equal the single-device result: they are averaged over the ranks, and each
loss is weighted by its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from ..protocol.errors import StrategyError
from ..protocol.options.strategy import chosen
from ..torch_private.autograd import in_backward
from . import preparing
from .analysis.divisors import divisor_of
from .backwards import creates_graph
from .core import loading, meta, optimizers
from .core.holders import all_of
from .core.hooks import Before
from .core.rng import OwnStream
from .core.scatter import to_device
from .loop import prepared_loader
from .loop.steps import Steps
from .parallel import activations, compiling, fsdp, precision, replicate, restore, transforms, zero1
from .sharded import statedicts
from .sharded.trained_parameters import Optimized
from .step import batchnorm
from .step.divided import weight_of
from .step.origin import Rows
from .step.ways import AddedParts
from .training import Training

if TYPE_CHECKING:
    from .core.context import ParallelContext


class ExplicitWay(Training):
    """Everything that a job has prepared, until its end."""

    SAVING = "td.save saves while a cell trains, td.load goes on from there"

    def __init__(self, context: ParallelContext, patience: float) -> None:
        """``patience``: seconds that an interrupt waits for the end of a step."""
        preparing.check_plan(context.plan)
        super().__init__(context, Optimized(context.device), Steps(context.say, patience))
        self._losses = AddedParts(mean=context.plan.options.get("loss") != "sum")
        self._sharing: dict[int, batchnorm.Sharing | None] = {}
        self._parts: dict[int, tuple[str, str]] = {}
        self._schedulers: list[Any] = []
        self.loaders = prepared_loader.Loaders(context)
        self._wrap(self._call, self._backward, self._iterate)
        self._patches.around(ReduceLROnPlateau, "step", self._plateau)
        self._guard.install(self._patches)

    # ------------------------------------------------------------------------------------------------- what is prepared

    def take(self, things: Sequence[Any]) -> None:
        """Prepare ``things`` in place, on all ranks. Raises ``StrategyError`` before anything is changed."""
        preparing.check(things, self._context, self._models, self.loaders)
        described = preparing.described(things, self._context)
        for model in (thing for thing in things if isinstance(thing, nn.Module)):
            self._distribute(model)
        for thing in things:
            if isinstance(thing, torch.optim.Optimizer):
                self._follow(thing)
            elif isinstance(thing, DataLoader):
                self.loaders.add(thing)
            elif isinstance(thing, ReduceLROnPlateau):
                self._schedulers.append(thing)
        if self._models:
            self._steps.begin()
        for line in described:
            self._context.say(line)

    def _distribute(self, model: nn.Module) -> None:
        context, before = self._context, optimizers.by_name(model)
        self._note_optimizers([model])
        self._note_parts(model)
        if context.plan.degree("dp_shard") == context.plan.degree("tp") == 1:
            meta.fill(model)  # sharded models get their values one parameter at a time
        loading.move(model, context.device)
        for _, parallelism in transforms.divisions(context):
            parallelism.apply(model, context)
        self._sharing[id(model)] = batchnorm.convert(model, context)
        if context.plan.activation_checkpointing:
            activations.apply(model, context)
        if context.plan.compile:
            compiling.apply(model, context)
        if context.plan.degree("dp_shard") > 1:
            fsdp.apply(model, context)
        else:
            if context.data_ranks == 1 or context.plan.degree("tp") == 1:
                precision.apply(model, context)
            if context.data_ranks > 1:
                replicate.apply(model, context)
        self._optimized.follow(optimizers.replaced(before, model), (before,))
        self._guard.knows(model, before)
        self._models.append(model)

    def _note_optimizers(self, models: Sequence[nn.Module]) -> None:
        """Record all optimizers that train a parameter of ``models``; an earlier cell may have built them."""
        known = {id(parameter) for model in models for parameter in model.parameters()}
        for optimizer in all_of(torch.optim.Optimizer):
            if any(id(parameter) in known for parameter in loading.trained_by(optimizer)):
                self._optimized.note(optimizer)

    def _note_parts(self, model: nn.Module) -> None:
        """Record submodules that must not be called alone: DDP averages gradients only of the complete model."""
        plan = self._context.plan
        if self._context.data_ranks > 1 and plan.degree("dp_shard") == plan.degree("tp") == 1:
            for name, module in model.named_modules():
                if name and any(parameter.requires_grad for parameter in module.parameters()):
                    self._parts[id(module)] = (type(model).__name__, name)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimized.note(optimizer)
        if chosen(self._context.plan, "zero1"):
            zero1.apply(optimizer, self._group)

    # ------------------------------------------------------------------------------------------ around the user's code

    def _iterate(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Iterator[Any]:
        """``iter(loader)`` of user code."""
        batches = self.loaders.iterate(original, loader)
        return self._steps.over(batches) if loader in self.loaders else batches

    def _call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A prepared model's forward: inputs on its device; a separate dropout stream if the rank has its own rows."""
        self._lent.keep()
        if id(module) not in self._sharing:
            if id(module) in self._parts and torch.is_grad_enabled():
                model, name = self._parts[id(module)]
                raise StrategyError(
                    f"{name} of the prepared {model} is called by itself: ddp would not average its gradients",
                    f"call the {model}, prepare {name} instead of it, or use --strategy none and your own DDP",
                )
            return original(module, *args, **kwargs)
        args, kwargs = to_device((args, kwargs), self._context.device)
        outputs = self._forward(original, module, args, kwargs)
        shares = {id(batch): batch.rows for batch in self.loaders.in_flight()}
        if len(shares) == 1:
            self._guard.origins.watch(outputs, Rows.of(*shares.values(), joined=False))
        return outputs

    def _forward(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        with self._calls.within():
            if self._has_whole_batch():
                with batchnorm.whole_batch(self._sharing[id(module)]):
                    return original(module, *args, **kwargs)
            if not module.training:
                return original(module, *args, **kwargs)
            with OwnStream(self._group.rank()):
                return original(module, *args, **kwargs)

    def _has_whole_batch(self) -> bool:
        batches = self.loaders.in_flight()
        return bool(batches) and all(batch.rows is None for batch in batches)

    def weight(self) -> float | None:
        """The weight of this rank's mean in the mean of the current batch; None: the same as on other ranks.

        Raises ``StrategyError`` when two loops give batches that the ranks divide differently.
        """
        weights = {batch.weight for batch in self.loaders.in_flight()}
        if len(weights) > 1:
            totals = ", ".join(str(batch.total) for batch in self.loaders.in_flight())
            raise StrategyError(
                f"batches of {totals} samples are used in one step, and {self._group.size()} ranks divide them "
                "differently: the weight of a rank's loss is unknown",
                "give both loaders batch sizes that the ranks divide, and drop_last=True",
            )
        return weights.pop() if weights else None

    def _backward(
        self, original: Callable[..., Any], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """In place of ``torch.autograd.backward``: each loss is weighted by the number of its rows."""
        if self._calls.depth or in_backward():
            original(tensors, grad_tensors, *args, **kwargs)  # a backward within a forward or a backward
            return
        if self._group.size() > 1:
            losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            factors = [self._factor(loss) for loss in losses]
            if any(factor is not None for factor in factors):
                given = _listed(grad_tensors, len(losses))
                grad_tensors = [
                    grad if factor is None else (torch.ones_like(loss) if grad is None else grad) * factor
                    for loss, grad, factor in zip(losses, given, factors, strict=True)
                ]
                tensors = losses
        before = Before(self._optimized.parameters(), anew=False)
        try:
            original(tensors, grad_tensors, *args, **kwargs)
        except BaseException:
            before.undo()
            raise
        before.follow(create_graph=creates_graph(*args, **kwargs))

    def samples(self) -> int | None:
        """Samples of the batch that a prepared loader has given since the last call."""
        return self.loaders.taken()

    def _factor(self, loss: torch.Tensor) -> float | torch.Tensor | None:
        """The factor for a loss's gradient that makes the mean over the ranks the single-device result."""
        weight = self.weight()
        if weight is None:
            return None
        ranks = int(self._group.size())
        if not self._losses.mean:
            return float(ranks)
        if divisor_of(loss) is not None:  # targets may be ignored or have weights
            share = next(batch.rows for batch in self.loaders.in_flight() if batch.rows is not None)
            return weight_of(loss, AddedParts(mean=True, counted=True), share) * ranks
        return None if weight * ranks == 1.0 else weight * ranks

    def _plateau(self, original: Callable[..., Any], scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        """``ReduceLROnPlateau.step``: every rank decides with the same number."""
        if any(scheduler is known for known in self._schedulers):
            from .reducing import reduce_mean

            metrics = reduce_mean(metrics)
        original(scheduler, metrics, *args, **kwargs)

    # ---------------------------------------------------------------------------------------------------------- the end

    def _come_back(self, names: dict[str, Any]) -> None:
        self._lent.keep()
        self.abandon()
        self._note_optimizers(self._models)  # optimizers that were built later
        originals = self._optimized.originals(self._models)
        if self._sharded:
            statedicts.whole_values(names, originals)
        self._undo_replicas()
        for model in self._models:
            if self._sharded:
                restore.restore(model, self._optimized.replaced)
            else:
                restore.strip(model)
        if self._sharded:
            self._restore_optimizers(originals)
        self._whole = True

    def apart(self) -> Iterator[object]:
        """Modules, parameters and optimizers of which this rank may have only a part."""
        if self._whole:
            return
        if self._sharded:
            yield from (*self._models, *self._optimized.replaced, *self._optimized.unseen)
        yield from filter(zero1.is_divided, self._optimized)

    def _explain(self, error: BaseException) -> BaseException | None:
        if "Expected to have finished reduction" in str(error):
            return StrategyError(
                "parameters of a prepared model took no part in the loss, and ddp waits for their gradients",
                "-O find_unused_parameters=1 looks for them in each step",
            )
        return super()._explain(error)


def _listed(grads: Any, count: int) -> list[Any]:
    if grads is None:
        return [None] * count
    return [grads] if isinstance(grads, torch.Tensor) else list(grads)
