"""``td.prepare``: the explicit way. Models, optimizers, loaders and schedulers become distributed where it is called.

Over the same parts as the automatic way, without its proofs: a rank's loop sees this rank's rows of each batch, and
what it computes of them is its own. Gradients are those of one device: their mean over the ranks, in which each loss
counts with its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from ..protocol.errors import StrategyError
from ..protocol.strategy import StrategyPlan
from ..protocol.strategy_options import chosen
from ..torch_private.autograd import in_backward
from ..torch_private.training import UNSCALING
from .analysis.divisors import divisor_of
from .backwards import creates_graph
from .core import agreement, loading, meta, optimizers
from .core.agreement import of_every_rank
from .core.calls import Calls
from .core.holders import all_of
from .core.hooks import Before
from .core.patches import Patches
from .core.rng import OwnStream
from .core.scatter import to_device
from .loop import prepared_loader
from .loop.steps import Steps
from .parallel import activations, compiling, fsdp, precision, replicate, restore, transforms, zero1
from .sharded import noise, norms, statedicts
from .sharded.dtensor_dispatch import ByHand
from .sharded.trained_parameters import Optimized
from .step import batchnorm
from .step.divided import weight_of
from .step.ways import AddedParts

if TYPE_CHECKING:
    from .core.context import ParallelContext

_OF_THE_AUTOMATIC_WAY = ("batch", "model", "trust_loss", "trust_model")


class ExplicitWay:
    """All that a job has prepared, until its end."""

    SAVING = "td.save saves while a cell trains, td.load goes on from there"

    def __init__(self, setting: ParallelContext, patience: float) -> None:
        """``patience``: seconds that an interrupt waits for the end of a step."""
        _check_plan(setting.plan)
        self._setting, self._group = setting, setting.data_group
        self._sharded = setting.plan.degree("dp_shard") > 1 or setting.plan.degree("tp") > 1
        self._losses = AddedParts(mean=setting.plan.options.get("loss") != "sum")
        self._models: list[nn.Module] = []
        self._whole = False
        """Whether all has come back."""
        self._sharing: dict[int, batchnorm.Sharing | None] = {}
        self._parts: dict[int, tuple[str, str]] = {}
        self._optimized = Optimized(setting.device)
        self._schedulers: list[Any] = []
        self.loaders = prepared_loader.Loaders(setting)
        self._steps = Steps(setting.say, patience)
        self._calls, self._lent, self._by_hand = Calls(), statedicts.Lent(setting.say), ByHand(setting.plan)
        self._patches = Patches()
        self._install()

    def _install(self) -> None:
        self._steps.install(self._patches)  # first: a loop that is resumed passes over indices, not samples
        around = self._patches.around
        self._calls.install(self._patches, self._by_hand.aside(self._call))
        around(torch.autograd, "backward", self._backward)
        around(DataLoader, "__iter__", self._iterate)
        around(ReduceLROnPlateau, "step", self._plateau)
        statedicts.install(self._patches, self._lent)
        if self._sharded:
            noise.install(self._patches)
            self._by_hand.install(self._patches)
            for place in (torch.nn.utils, torch.nn.utils.clip_grad):
                around(place, "clip_grad_norm_", _clip)
                around(place, "clip_grad_value_", norms.clip_grad_value_)
            unscale = partial(precision.unscale, device=self._setting.device)
            around(*UNSCALING, unscale)

    # ------------------------------------------------------------------------------------------------- what is prepared

    def take(self, things: Sequence[Any]) -> None:
        """Prepare them in place; all ranks. Raises ``StrategyError`` before anything is changed."""
        self._check(things)
        described = self._described(things)
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
            self._setting.say(line)

    def _check(self, things: Sequence[Any]) -> None:
        kinds = of_every_rank([type(thing).__name__ for thing in things])
        other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:
            raise StrategyError(
                f"the ranks prepare different things: {kinds[0]} on rank 0, {kinds[other]} on rank {other}",
                "call td.prepare on all ranks, with the same arguments",
            )
        models = [*self._models]
        for thing in things:
            if isinstance(thing, nn.Module):
                self._check_model(thing, models)
                models.append(thing)
            elif isinstance(thing, DataLoader):
                if thing in self.loaders or sum(thing is other for other in things) > 1:
                    raise StrategyError("this DataLoader is prepared already", "prepare each loader once")
                prepared_loader.check(thing)
            elif not isinstance(thing, (torch.optim.Optimizer, LRScheduler, ReduceLROnPlateau)):
                raise StrategyError(
                    f"td.prepare takes models, optimizers, DataLoaders and schedulers, and was given "
                    f"{type(thing).__name__}",
                    "leave it out: losses, gradient scalers, data sets and tensors need no preparing",
                )
        for thing in things:
            optimizer = getattr(thing, "optimizer", thing)
            if isinstance(optimizer, torch.optim.Optimizer):
                self._check_optimizer(optimizer, models)

    def _check_model(self, model: nn.Module, before: Sequence[nn.Module]) -> None:
        setting, name = self._setting, type(model).__name__
        parameters = list(model.parameters())
        if not parameters:
            raise StrategyError(
                f"{name} has no parameters: there is nothing to distribute",
                "prepare the models that are trained; a loss or an activation needs no preparing",
            )
        for other in before:
            if other is model:
                raise StrategyError(f"this {name} is prepared already", "prepare each model once")
            known = {id(parameter) for parameter in other.parameters()}
            if any(id(parameter) in known for parameter in parameters):
                raise StrategyError(
                    f"{name} shares parameters with the {type(other).__name__} that is prepared",
                    "prepare one module that holds both, or the outer one alone",
                )
        agreement.check_untouched(model)
        agreement.same_on_all_ranks(model, setting)
        transforms.check(model, setting)
        if setting.plan.degree("dp_shard") == 1 and setting.data_ranks > 1:
            replicate.check(model, setting)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        known = {id(parameter) for model in models for parameter in model.parameters()}
        strange = [parameter for parameter in loading.trained_by(optimizer) if id(parameter) not in known]
        if strange:
            raise StrategyError(
                f"{type(optimizer).__name__} trains {len(strange)} parameters of no prepared model (the first has the "
                f"shape {list(strange[0].shape)}): their gradients would be each rank's own",
                "prepare the model that they are of, in the same call or before; make a lone one a parameter of it",
            )
        optimizers.check(optimizer, self._sharded)
        if chosen(self._setting.plan, "zero1"):
            zero1.check(optimizer)

    def _distribute(self, model: nn.Module) -> None:
        setting, before = self._setting, optimizers.by_name(model)
        self._note_optimizers([model])
        self._note_parts(model)
        if setting.plan.degree("dp_shard") == setting.plan.degree("tp") == 1:
            meta.fill(model)  # what is sharded gets its values one parameter at a time
        loading.move(model, setting.device)
        for _, parallelism in transforms.divisions(setting):
            parallelism.apply(model, setting)
        self._sharing[id(model)] = batchnorm.convert(model, setting)
        if setting.plan.activation_checkpointing:
            activations.apply(model, setting)
        if setting.plan.compile:
            compiling.apply(model, setting)
        if setting.plan.degree("dp_shard") > 1:
            fsdp.apply(model, setting)
        else:
            if setting.data_ranks == 1 or setting.plan.degree("tp") == 1:
                precision.apply(model, setting)
            if setting.data_ranks > 1:
                replicate.apply(model, setting)
        self._optimized.follow(optimizers.replaced(before, model), (before,))
        self._models.append(model)

    def _note_optimizers(self, models: Sequence[nn.Module]) -> None:
        """Those that train a parameter of ``models``, wherever they are: an earlier cell may have built them."""
        known = {id(parameter) for model in models for parameter in model.parameters()}
        for optimizer in all_of(torch.optim.Optimizer):
            if any(id(parameter) in known for parameter in loading.trained_by(optimizer)):
                self._optimized.note(optimizer)

    def _note_parts(self, model: nn.Module) -> None:
        """What must not be called by itself: DDP averages gradients of forwards of the whole model."""
        plan = self._setting.plan
        if self._setting.data_ranks > 1 and plan.degree("dp_shard") == plan.degree("tp") == 1:
            for name, module in model.named_modules():
                if name and any(parameter.requires_grad for parameter in module.parameters()):
                    self._parts[id(module)] = (type(model).__name__, name)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimized.note(optimizer)
        if chosen(self._setting.plan, "zero1"):
            zero1.apply(optimizer, self._group)

    def _described(self, things: Sequence[Any]) -> list[str]:
        """What is done, in two lines at the most."""
        data, lines = self._setting.data_ranks, []
        models = [
            f"{type(thing).__name__} ({sum(one.numel() for one in thing.parameters()):,} parameters)"
            for thing in things
            if isinstance(thing, nn.Module)
        ]
        if models:
            name, ranks = self._setting.plan.name, dist.get_world_size()
            lines.append(f"prepared for {name} on {ranks} ranks: {', '.join(models)}")
        if any(isinstance(thing, DataLoader) for thing in things):
            lines.append(
                f"each of {data} data ranks loads its rows of every batch; a loss is that of a rank's rows, "
                "td.reduce_mean(loss) the whole batch's"
                if data > 1
                else "every rank loads whole batches: no dimension of the mesh divides them"
            )
        return lines

    # ------------------------------------------------------------------------------------------ around the user's code

    def _iterate(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Iterator[Any]:
        """``iter(loader)`` of user code."""
        batches = self.loaders.iterate(original, loader)
        return self._steps.over(batches) if loader in self.loaders else batches

    def _call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A prepared model's forward: inputs on its device; dropout of the rank's own, where its rows are."""
        self._lent.keep()
        if id(module) not in self._sharing:
            if id(module) in self._parts and torch.is_grad_enabled():
                model, name = self._parts[id(module)]
                raise StrategyError(
                    f"{name} of the prepared {model} is called by itself: ddp would not average its gradients",
                    f"call the {model}, prepare {name} instead of it, or use --strategy none for a DDP of your own",
                )
            return original(module, *args, **kwargs)
        args, kwargs = to_device((args, kwargs), self._setting.device)
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
        """What this rank's mean counts with in that of the batch in flight; None: as much as the others'.

        Raises ``StrategyError`` where two loops give batches that the ranks divide differently.
        """
        weights = {batch.weight for batch in self.loaders.in_flight()}
        if len(weights) > 1:
            totals = ", ".join(str(batch.total) for batch in self.loaders.in_flight())
            raise StrategyError(
                f"batches of {totals} samples are in flight, which {self._group.size()} ranks divide differently: what "
                "the loss counts with is not to be seen",
                "give both loaders drop_last=True, or batch sizes that the ranks divide",
            )
        return weights.pop() if weights else None

    def _backward(
        self, original: Callable[..., Any], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """In place of ``torch.autograd.backward``: each loss counts with the rows that it is of."""
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

    def _factor(self, loss: torch.Tensor) -> float | torch.Tensor | None:
        """By what the gradient of a loss is multiplied, such that the mean over the ranks is one device's."""
        weight = self.weight()
        if weight is None:
            return None
        ranks = int(self._group.size())
        if not self._losses.mean:
            return float(ranks)
        if divisor_of(loss) is not None:  # targets may be left out, or weigh more than others
            share = next(batch.rows for batch in self.loaders.in_flight() if batch.rows is not None)
            return weight_of(loss, AddedParts(mean=True, counted=True), share) * ranks
        return None if weight * ranks == 1.0 else weight * ranks

    def _plateau(self, original: Callable[..., Any], scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        """``ReduceLROnPlateau.step``: every rank decides by the same number."""
        if any(scheduler is known for known in self._schedulers):
            from .reducing import reduce_mean

            metrics = reduce_mean(metrics)
        original(scheduler, metrics, *args, **kwargs)

    # ---------------------------------------------------------------------------------------------------------- the end

    def finish(self, names: dict[str, Any] | None = None) -> None:
        """Everything is plain again, whole on rank 0, and so is what ``names`` hold. All ranks call it.

        Raises ``KeyboardInterrupt`` after an interrupt that found no step.
        """
        self._steps.finish()
        self._come_back(names)

    def _come_back(self, names: dict[str, Any] | None) -> None:
        self._lent.keep()
        self.abandon()
        self._note_optimizers(self._models)  # those that were built since
        originals = self._optimized.originals(self._models)
        if self._sharded:
            statedicts.whole_values(names or {}, originals)
        for model in self._models:
            batchnorm.revert(model)
        for optimizer in self._optimized:
            zero1.undo(optimizer)
        for model in self._models:
            if self._sharded:
                restore.restore(model, self._optimized.replaced)
            else:
                restore.strip(model)
        if self._sharded:
            for optimizer in self._optimized:
                restore.restore_optimizer(optimizer, self._optimized.replaced)
            self._optimized.give_back(originals)
        self._whole = True

    def stop(self, error: BaseException, names: dict[str, Any]) -> None:
        """The cell ended with ``error``: as ``finish`` where an interrupt ended all ranks after the same step."""
        self._steps.if_ended_together(error, lambda: self._come_back(names))
        self.abandon()

    def apart(self) -> Iterator[object]:
        """Modules, parameters and optimizers of which this rank may have no more than a part."""
        if self._whole:
            return
        if self._sharded:
            yield from (*self._models, *self._optimized.replaced, *self._optimized.unseen)
        yield from filter(zero1.is_divided, self._optimized)

    def abandon(self) -> None:
        """torch is as it was. What is sharded stays so: other ranks may be gone."""
        self._steps.abandon()
        self._patches.undo()
        for model in self._models:
            precision.revert(model)
            compiling.revert(model)

    def explained(self, error: BaseException) -> BaseException:
        """``error``, or what an error of torch's has to do with what was prepared, raised where it was."""
        said = fsdp.explain(error) if self._sharded else None
        said = said or precision.explain(error, self._setting)
        if "Expected to have finished reduction" in str(error):
            said = StrategyError(
                "parameters of a prepared model took no part in the loss, and ddp waits for their gradients",
                "-O find_unused_parameters=1 looks for them in each step",
            )
        return error if said is None else said.with_traceback(error.__traceback__)


def _check_plan(plan: StrategyPlan) -> None:
    """Raise ``StrategyError`` for what is asked for and cannot act through ``td.prepare``."""
    if plan.degree("pp") > 1:
        raise StrategyError(
            "td.prepare cannot cut a model into the stages of a pipeline: where, its first batch shows",
            "leave td.prepare out of the cell: --strategy pp takes the plain loop",
        )
    if plan.options.get("uneven_inputs"):
        raise StrategyError(
            "-O uneven_inputs: td.prepare divides each batch of a loader, so no rank has a batch more than another; "
            "in loops over anything else it cannot see where ranks that have no batch left must wait for the others",
            "prepare the loader and leave -O uneven_inputs out; or --strategy none, DistributedDataParallel and "
            "torch.distributed.algorithms.Join around the loop",
        )
    parts = ("ddp", "fsdp", "hsdp", "tp", "cp")
    asked = [f"--strategy {name}" for name in plan.name.split("+") if name not in parts]
    asked += ["--checkpoint"] if plan.checkpoint else []
    asked += ["--grad-accumulation"] if plan.grad_accumulation > 1 else []
    asked += [f"-O {name}" for name in _OF_THE_AUTOMATIC_WAY if name in plan.options]
    if asked:
        raise StrategyError(
            f"{', '.join(asked)}: of the automatic way, and the cell calls td.prepare",
            "leave out one of the two; td.save and td.load keep what was prepared",
        )


def _clip(original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """``clip_grad_norm_``: a norm over sharded gradients is one number; every rank calls it."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    sharded = any(isinstance(parameter.grad, DTensor) for parameter in listed)
    return (norms.clip_grad_norm_ if sharded else original)(listed, *args, **kwargs)


def _listed(grads: Any, count: int) -> list[Any]:
    if grads is None:
        return [None] * count
    return [grads] if isinstance(grads, torch.Tensor) else list(grads)
