"""The automatic way: a cell written for one device trains on all ranks, unchanged.

Every rank runs the cell as if it were the only one, with the whole batch and the same random numbers. A module that
owns optimized parameters becomes distributed when it is first called to be trained; from then on each rank computes
its rows of that forward, and all see all outputs (``divided``). So whatever the cell does with the outputs, any loss
and any metric, is what one device does. After each backward the gradients are averaged over the ranks. A loop that
was watched for two steps and needs nothing but its own rows is given those alone (``loops``).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ..protocol.errors import StrategyError
from ..protocol.strategy_options import chosen
from ..torch_private.autograd import in_backward, in_functorch
from ..torch_private.training import UNSCALING
from .analysis.leftovers import within_checkpoint
from .backwards import Backwards
from .core import agreement, dtensors, hooks, loading, meta, optimizers
from .core.calls import Calls
from .core.context import ParallelContext
from .core.ownership import own_class
from .core.patches import Patches
from .core.rng import begin_alike
from .core.scatter import map_tensors, tensors_in, to_device
from .deepspeed import engine
from .loop.loops import Loops
from .loop.resuming import Resuming
from .loop.steps import Steps
from .loop.training_objects import TrainingObjects
from .parallel import activations, compiling, fsdp, precision, replicate, restore, transforms, zero1
from .pipeline import checks, remote_parameters, stages
from .sharded import noise, norms, statedicts
from .sharded.dtensor_dispatch import ByHand
from .sharded.trained_parameters import Optimized
from .sharded.unsharded import Unsharded
from .step import accumulating, averaging, batchnorm, deferred, lazy, submodules
from .step.averaging import Averaging, How
from .step.divided import Divider
from .step.equivalence import Equivalence
from .step.ways import Way

_NOTHING = contextlib.nullcontext()


class AutomaticTraining:
    """What the rank of a job with a strategy does around the cell."""

    SAVING = "--checkpoint DIR saves while a cell trains, --resume goes on from there"

    def __init__(
        self, setting: ParallelContext, namespace: dict[str, Any] | None = None, patience: float = 2.5
    ) -> None:
        """``namespace``: of the cell; ``patience``: seconds that an interrupt waits for the end of a step."""
        self._setting, self._group = setting, setting.data_group
        options = setting.plan.options
        accumulation = accumulating.of(setting.plan)
        self._is_divided_inside = any(setting.plan.degree(one) > 1 for one in ("tp", "cp", "pp"))
        self._divider = Divider(
            self._group,
            accumulation,
            whole=options.get("model") == "whole",
            trusted=bool(options.get("trust_model")),
            anywhere=not self._is_divided_inside,
        )
        self._optimized = Optimized(setting.device)
        namespace = {} if namespace is None else namespace
        made = TrainingObjects(namespace, self._optimized, self._optimized.copies)
        saves = setting.plan.checkpoint is not None
        self._steps = Resuming(setting, made, namespace, patience) if saves else Steps(setting.say, patience)
        self._loops = Loops(
            self._group,
            setting.say,
            setting.device,
            self._steps,
            batch=str(options.get("batch", "auto")),
            loss="mean" if options.get("trust_loss") else str(options.get("loss", "auto")),
        )
        self._patches = Patches()
        self._averaging = Averaging(self._group, How.of(setting.plan))
        self._engine = engine.of(setting, self._optimized, self._loops)
        self._roots: dict[int, nn.Module] = {}
        self._models: list[nn.Module] = []  # those that are sharded, or divided inside
        self._inside: list[dist.ProcessGroup] = []
        self._pipelines: list[stages.Pipeline] = []
        self._gathered, self._lent = Unsharded(self._models), statedicts.Lent(setting.say)
        self._backwards = Backwards(
            self._group,
            self._optimized,
            self._divider,
            self._loops,
            lambda: self._is_within,
            self._averaging,
            self._gathered,
            self._inside,
            self._pipelines,
            accumulation,
            self._engine,
        )
        self._whole = False
        """Whether all has come back."""
        self._sharded = setting.plan.degree("dp_shard") > 1 or setting.plan.degree("tp") > 1
        self._is_cut = any(setting.plan.degree(one) > 1 for one in ("tp", "pp"))
        self._calls, self._functional, self._by_hand = Calls(), 0, ByHand(setting.plan)

    # ------------------------------------------------------------------------------------------- around the user's code

    def install(self) -> None:
        """From here on optimizers are noted, and what they train becomes distributed when it is called."""
        self._steps.began_with(begin_alike(self._steps.seed))
        self._steps.install(self._patches)
        around = self._patches.around
        around(torch.optim.Optimizer, "add_param_group", self._optimized.add_param_group)
        self._calls.install(self._patches, self._by_hand.aside(self._call))
        stages.install(self._patches, self._setting.plan)
        around(torch.autograd, "backward", self._backwards.backward)
        around(torch.autograd, "grad", self._backwards.grad)
        around(torch.Tensor, "register_hook", self._register_hook)
        around(torch.func, "functional_call", self._functional_call)
        around(DataLoader, "__iter__", self._loops.iterate)
        self._patches.give(nn.Module, "__deepcopy__", self._optimized.deepcopy)
        whole = chosen(self._setting.plan, "state_dict_type") == "FULL_STATE_DICT"
        statedicts.install(self._patches, self._lent, whole=whole)
        around(torch.optim.Optimizer, "state_dict", self._optimizer_state)
        around(torch.optim.Optimizer, "load_state_dict", self._take_optimizer_state)
        if self._sharded:
            noise.install(self._patches)
            self._by_hand.install(self._patches)
            around(nn.Module, "named_parameters", self._named_parameters)
            self._patches.hook(register_optimizer_step_pre_hook(lambda *_: self._gathered.let_go()))
        for place in (torch.nn.utils, torch.nn.utils.clip_grad):
            around(place, "clip_grad_norm_", self._clip)
            if self._sharded:
                around(place, "clip_grad_value_", norms.clip_grad_value_)
        around(*UNSCALING, self._unscale)
        if self._engine is not None:
            self._engine.install(self._patches)

    def stand_aside(self, why: str) -> None:
        """The rest of the job is not ours. Raises ``StrategyError`` when something was distributed before."""
        if self._roots:
            raise StrategyError(
                f"{why}; but the strategy has distributed {type(next(iter(self._roots.values()))).__name__} before",
                "call td.prepare before the first training step",
            )
        self.abandon()
        self._setting.say(why)

    def weight(self) -> float | None:
        """What this rank's mean over its rows counts with, while a loop has its part of a batch."""
        return None if self._loops.sliced is None else self._loops.sliced.weight

    def note_captured(self) -> None:
        """The bundle is loaded."""
        self._optimized.note_captured()

    def finish(self, names: dict[str, Any] | None = None) -> None:
        """Everything is plain again, whole on rank 0, and so is what ``names`` hold. All ranks call it."""
        self._steps.finish()
        self._come_back(names)

    def stop(self, error: BaseException, names: dict[str, Any]) -> None:
        """The cell ended with ``error``: as ``finish`` where an interrupt ended all ranks after the same step."""
        self._steps.if_ended_together(error, lambda: self._come_back(names))
        self.abandon()

    def apart(self) -> Iterator[object]:
        """Modules, parameters and optimizers of which this rank may have no more than a part."""
        if self._whole:
            return
        if self._sharded or self._engine is not None:
            yield from (*self._roots.values(), *self._optimized.replaced, *self._optimized.unseen)
        for staged in self._pipelines:
            yield from (*staged.root.modules(), *staged.root.parameters(), *staged.originals.values())
        if self._pipelines or self._engine is not None:
            yield from (*self._optimized, *self._optimized.parameters())
        yield from filter(zero1.is_divided, self._optimized)

    def _come_back(self, names: dict[str, Any] | None) -> None:
        self._gathered.keep_writes()
        self._lent.keep()
        self.abandon()
        originals = self._optimized.originals(self._models)
        if self._sharded:
            statedicts.whole_values(names or {}, originals)
            for model in self._models:
                statedicts.whole_attributes(model, originals)
        for root in self._roots.values():
            batchnorm.revert(root)
        for optimizer in self._optimized:
            zero1.undo(optimizer)
        if self._engine is not None:
            self._engine.finish()
        for staged in self._pipelines:
            staged.restore(list(self._optimized))
            restore.restore(staged.root)
            statedicts.whole_values(names or {}, staged.originals)
        if self._pipelines and (lost := remote_parameters.without_values(names or {})):
            self._setting.say(
                f"{', '.join(lost)}: made of parameters of stages on other ranks, whose values do not come back (use "
                "--strategy ddp or fsdp where they shall)"
            )
        if self._models or self._pipelines:
            for model in self._models:
                restore.restore(model, self._optimized.replaced)
            for copied in (names or {}).values():  # of a part of a model
                if isinstance(copied, nn.Module) and any(isinstance(one, DTensor) for one in copied.parameters()):
                    restore.restore(copied)
            for optimizer in self._optimized:
                restore.restore_optimizer(optimizer, self._optimized.replaced)
            self._optimized.give_back(originals)
        self._whole = True
        if self._optimized.pending and not self._roots:
            self._setting.say("nothing was distributed: no module with optimized parameters was called to be trained")
        elif self._backwards.seen and not self._roots:
            self._setting.say("nothing was distributed: no optimizer of torch.optim trains a module; all ranks did all")

    def explained(self, error: BaseException) -> BaseException:
        """``error``, or what an error of torch's has to do with the strategy, raised where it was."""
        said = fsdp.explain(error) if self._sharded and self._roots else None
        said = said or precision.explain(error, self._setting)
        said = said or (remote_parameters.explain(error) if self._pipelines else None)
        return error if said is None else said.with_traceback(error.__traceback__)

    def abandon(self) -> None:
        """torch is as it was. What is sharded stays so: other ranks may be gone."""
        self._steps.abandon()
        self._gathered.end()
        for staged in self._pipelines:
            staged.let_go()
        self._patches.undo()
        self._averaging.end()
        for model in (*self._roots.values(), *self._optimized.copies()):
            precision.revert(model)
            compiling.revert(model)

    # -------------------------------------------------------------------------------------------------------- forwards

    def _call(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        self._lent.keep()
        if not self._sharded:
            return self._outermost(original, module, *args, **kwargs)
        with self._loops.aside():
            self._gathered.begin_forward()
            args, kwargs = _in_full(module, (args, kwargs))
        try:
            return self._outermost(original, module, *args, **kwargs)
        finally:
            self._gathered.show_again()

    def _outermost(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        compiled, module = module, compiling.unwrapped(module)
        forward = functools.partial(original, module if self._is_cut else compiled)
        if not torch.is_grad_enabled():
            if self._loops.watch is not None and module.training and self._divider.synchronised:
                self._loops.watch.object("batch normalisation takes statistics in a call without gradients")
            is_part = self._sharded and id(module) not in self._roots
            gathered = self._gathered.whole(module) if is_part else _NOTHING
            with self._calls.within() if compiled is not module else _NOTHING, gathered:
                return self._whole_call(forward, *args, **kwargs)
        replaceable = not (self._functional and self._sharded)
        new = bool(self._optimized.pending) and replaceable and self._optimized.are_in(module)
        if not new and id(module) not in self._roots:
            return self._whole_call(forward, *args, **kwargs)
        if in_functorch():
            self._check_transform(module)
            return self._whole_call(forward, *args, **kwargs)
        with self._calls.within():
            if new and self._is_cut and compiled is not module:
                self._setting.say(f"{self._setting.plan.name}: what the cell compiled runs as it is")
            return self._root_call(forward, module, args, kwargs, new=new)

    def _whole_call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Each rank computes all of it, unless a backward computes a part of a divided forward again."""
        if in_backward() or not self._divider.synchronised:
            return forward(*args, **kwargs)
        with self._divider.whole_batch():
            return forward(*args, **kwargs)

    def _root_call(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        new: bool,
    ) -> Any:
        watch = self._loops.watch
        if self._sharded and within_checkpoint() and not in_backward():
            raise StrategyError(
                f"checkpoint is around a whole {own_class(module).__name__}, whose parameters "
                f"{self._setting.plan.name} has sharded: they are put together once in a backward",
                "use checkpoint within its forward, --activation-checkpointing, or use_reentrant=True",
            )
        if watch is not None:
            watch.forward(tensors_in((args, kwargs)))
        self._divider.samples, self._divider.replicated = self._loops.samples, self._loops.sliced is None
        args, kwargs = to_device(deferred.settled((args, kwargs), "the model"), self._setting.device)
        with self._loops.aside():
            if new:
                agreement.check_not_scripted([module])
                agreement.check_not_reused(module, self._models)
                if any(staged.root is module for staged in self._pipelines):
                    raise StrategyError(
                        f"{type(module).__name__} is in stages, and an optimizer or a group of parameters is new to it",
                        "build optimizers with all groups before the first training step, or use --strategy ddp or "
                        "fsdp",
                    )
                lazy.materialise(forward, module, args, kwargs)
                if not self._sharded:
                    meta.fill(module)
                self._steps.trains()
                loading.move(module, self._setting.device)
                lacking = meta.lacks_values(module)  # it is tried when it is sharded
                ways = None if lacking else self._divider.ready(forward, module, args, kwargs)
                part, samples = self._divider.part(args, kwargs), self._divider.samples_of_part(args, kwargs)
                hold = functools.partial(Equivalence, forward, module, part, samples, self._setting)
                try:
                    self._distribute(module, functools.partial(self._cut, module, args, kwargs, ways), hold)
                except StrategyError as error:
                    if not self._is_divided_inside:
                        raise
                    said = submodules.explain(error, module, self._setting.plan.name, self._optimized.pending)
                    raise said or error from None
            if self._engine is not None:
                forward = self._engine.forward(module, forward)
            if self._loops.sliced is None:
                outputs = self._divider(forward, module, args, kwargs)
            else:  # the loop has its rows alone
                outputs = self._divider.sliced(forward, module, args, kwargs, self._loops.sliced)
        if watch is not None:
            if not self._divider.in_front:
                watch.object("a model is given samples in another dimension than the first")
            watch.forwarded(tensors_in(outputs), self._divider.ways)
        return outputs

    def _distribute(self, root: nn.Module, cut: Callable[[], None], hold: Callable[[], Equivalence]) -> None:
        """``cut`` makes stages of it, where the plan says so; ``hold`` measures it as it is."""
        setting = self._setting
        agreement.same_on_all_ranks(root, setting)
        before, name = optimizers.by_name(root), type(root).__name__
        count = sum(parameter.numel() for parameter in root.parameters())
        self._check(root)
        if self._sharded:
            self._averaging.end()  # else shards would take the places of the parameters that it knows
        names = [(model, optimizers.by_name(model)) for model in (root, *self._optimized.copies_of(root))]
        self._divide_inside([model for model, _ in names], hold)
        self._divider.shares(root, batchnorm.convert(root, setting))
        if setting.plan.activation_checkpointing:
            activations.apply(root, setting)
        if setting.plan.compile:
            compiling.apply(root, setting)
        if self._sharded:
            for model, known in names:
                self._shard(model, known)
        elif self._engine is not None:
            loading.broadcast_states(root, self._group, setting.device)
            self._engine.make(root)
        else:
            loading.broadcast_states(root, self._group, setting.device)
            if setting.plan.degree("pp") > 1:
                cut()
            else:
                precision.apply(root, setting)
            for optimizer in self._optimized if chosen(setting.plan, "zero1") else ():
                zero1.apply(optimizer, self._group)
        self._optimized.distributed(before.values())
        self._roots[id(root)] = root
        if self._pipelines:  # it has said more
            return
        part = f"; each computes {self._computed()}" if setting.data_ranks > 1 else ""
        part += accumulating.said(setting.plan)
        setting.say(
            f"{name} ({_much(count)} parameters) is trained by {setting.plan.name} on "
            f"{dist.get_world_size()} ranks{part}"
        )

    def _computed(self) -> str:
        """What a rank computes of a batch, in words."""
        return "the whole batch" if self._setting.plan.options.get("model") == "whole" else "its part of every batch"

    def _cut(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], ways: tuple[Way, ...] | None
    ) -> None:
        staged = stages.Pipeline(root, self._setting, lambda: self._divider.samples, self._within)
        staged.cut(args, kwargs, ways)
        self._optimized.follow(staged.replaced, (), shown=False)
        for optimizer in self._optimized:
            staged.forget_others(optimizer)
        self._pipelines.append(staged)

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """As in the forward of a root: what a pipeline does in ``backward()``, or where a value is needed."""
        with self._calls.within(), self._loops.aside():
            yield

    def _divide_inside(self, models: Sequence[nn.Module], hold: Callable[[], Equivalence]) -> None:
        """Layers or sequences over ranks; the root, which comes first, is held against what it was."""
        setting = self._setting
        for dimension, parallelism in transforms.divisions(setting):
            held = hold()
            for model in models:
                parallelism.apply(model, setting)
            held.compare(dimension, parallelism.explain)
            if (group := setting.mesh[dimension].get_group()) not in self._inside:
                self._inside.append(group)
            if not self._sharded:
                self._models += models

    def _shard(self, model: nn.Module, before: dict[str, nn.Parameter]) -> None:
        setting = self._setting
        if setting.plan.degree("dp_shard") > 1:
            fsdp.apply(model, setting)
        elif setting.data_ranks > 1:
            replicate.apply(model, setting)
        else:
            precision.apply(model, setting)
        self._optimized.follow(optimizers.replaced(before, model), (before,))
        self._models.append(model)
        self._gathered.begin_forward()

    def _check(self, root: nn.Module) -> None:
        """Raise ``StrategyError`` before anything is changed."""
        setting = self._setting
        agreement.check_grown(root, self._models, self._optimized.pending)
        averaging.check(root)
        tokens = setting.plan.degree("cp") > 1
        if self._divider.dividing or tokens:
            hooks.check_modules(root, tokens=tokens)
        accumulating.check(root, setting)
        if self._engine is not None:
            self._engine.check(root)
            hooks.check_parameters(root)
        if setting.plan.degree("pp") > 1:
            checks.check(root, setting, list(self._optimized))
        transforms.check(root, setting)
        for optimizer in self._optimized:
            optimizers.check(optimizer, self._sharded)

    # ------------------------------------------------------------------------------------------------------- gradients

    @property
    def _is_within(self) -> bool:
        """Whether what calls torch is not the cell, but a model's forward or an engine."""
        return self._calls.depth > 0 or (self._engine is not None and self._engine.within)

    def _clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for staged in self._pipelines:
            if staged.has(listed):
                return staged.clip(listed, *args, **kwargs)
        if self._engine is not None:
            return self._engine.clip(original, listed, *args, **kwargs)
        # A norm over sharded gradients comes as a number that can be printed; every rank calls it.
        sharded = any(isinstance(parameter.grad, DTensor) for parameter in listed)
        return (norms.clip_grad_norm_ if sharded else original)(listed, *args, **kwargs)

    def _optimizer_state(self, original: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
        """``Optimizer.state_dict`` with the state of all stages; all ranks call it."""
        found = original(optimizer)
        for staged in self._pipelines:
            staged.make_optimizer_whole(optimizer, found["state"])
        if self._pipelines:
            found["state"] = dict(sorted(found["state"].items()))
        self._optimized.show_kernels(optimizer, found["param_groups"])
        return found

    def _take_optimizer_state(
        self, original: Callable[..., Any], optimizer: torch.optim.Optimizer, state_dict: Any
    ) -> None:
        original(optimizer, state_dict)
        self._optimized.loaded(optimizer)
        for staged in self._pipelines:
            staged.forget_others(optimizer)

    def _named_parameters(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """``parameters()``, too, asks this. A penalty that is computed before the backward may have whole ones."""
        if not self._calls.depth and not in_backward():
            if torch.is_grad_enabled():
                self._gathered.show()
            else:
                self._gathered.let_go()
        return original(module, *args, **kwargs)

    def _register_hook(self, original: Callable[..., Any], tensor: torch.Tensor, hook: Any) -> Any:
        if self._calls.depth and self._divider.dividing:
            hooks.check_tensor(tensor, sys._getframe(2))
        return original(self._optimized.unseen.get(tensor, tensor), hook)

    def _unscale(self, *args: Any) -> Any:
        return precision.unscale(*args, device=self._setting.device, staged=bool(self._pipelines))

    def _check_transform(self, module: nn.Module) -> None:
        """Raise ``StrategyError`` for a model that is, or would be, sharded, within ``torch.func``'s transforms."""
        if self._sharded:
            raise StrategyError(
                f"{own_class(module).__name__}, which the strategy shards, within a transform of torch.func (vmap, "
                "grad)",
                "use --strategy ddp",
            )

    def _functional_call(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        parameter_and_buffer_dicts: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Raises ``StrategyError`` for a model whose own parameters are shards, also while they are gathered."""
        if self._sharded and any(part in self._models for part in module.modules()):
            raise StrategyError(
                f"functional_call of {own_class(module).__name__}, whose parameters fsdp has sharded",
                "use --strategy ddp",
            )
        self._divider.exact = False
        self._functional += 1
        try:
            return original(module, parameter_and_buffer_dicts, *args, **kwargs)
        finally:
            self._functional -= 1


def _much(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _in_full(module: nn.Module, given: Any) -> Any:
    """What a cell made of shards, such as ``weight.new_zeros(layers, batch, width)``, whole: a model takes it as data.

    A loss without parameters takes what is split as it is, and so does a block that is computed again in a backward.
    """
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors_in(given))
    if not sharded or next(module.parameters(), None) is None or in_backward():
        return given
    return map_tensors(given, lambda one: one if isinstance(one, nn.Parameter) else dtensors.whole(one))
