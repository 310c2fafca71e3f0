"""The automatic way: a cell written for one device trains on all ranks, unchanged.

Every rank runs the cell as if it were the only one, with the global batch and the same random numbers. A module that
owns optimized parameters becomes distributed at its first call with gradients. Then each rank computes its rows of the
forward, and all ranks see all outputs (``divided``). So every loss and every metric that the cell computes is the same
as on one device. After each backward the gradients are averaged over the ranks. A loop is watched for two steps. If
it needs only the rows of its rank, it is given only these rows from then on (``loops``).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..protocol.errors import StrategyError
from ..protocol.options.strategy import chosen
from ..torch_private.autograd import in_backward, in_functorch
from .backwards import Backwards
from .core import agreement, data_parallel, hooks, loading, meta, opened_files
from .core.context import ParallelContext
from .core.ownership import own_class
from .core.rng import begin_alike
from .core.scatter import map_tensors, tensors_in, to_device
from .deepspeed import engine
from .distributing import Distributor, nothing_was_distributed
from .loop.loops import Loops
from .loop.resuming import Resuming
from .loop.steps import Steps
from .loop.training_objects import TrainingObjects
from .parallel import compiling, precision, restore, zero1
from .pipeline import remote_parameters, stages
from .sharded import aliases, statedicts
from .sharded.trained_parameters import Optimized
from .sharded.unsharded import in_full
from .step import deferred, lazy, rewriting, submodules
from .step.equivalence import Equivalence
from .step.holding import differing
from .step.no_trace import within_checkpoint
from .step.origin import Rows
from .step.verifying import Connection
from .step.views import for_a_trial
from .training import Training

_NOTHING = contextlib.nullcontext()


class AutomaticTraining(Training):
    """What a rank does around the cell when the job has a strategy."""

    SAVING = "--checkpoint DIR saves while a cell trains, --resume goes on from there"

    def __init__(
        self,
        context: ParallelContext,
        namespace: dict[str, Any] | None = None,
        patience: float = 2.5,
        reference: Connection | None = None,
    ) -> None:
        """``namespace``: the names of the cell; ``patience``: how many seconds an interrupt waits for a step's end."""
        optimized, options = Optimized(context.device), context.plan.options
        namespace = {} if namespace is None else namespace
        made = TrainingObjects(namespace, optimized, optimized.copies)
        saves = context.plan.checkpoint is not None
        steps = Resuming(context, made, namespace, patience) if saves else Steps(context.say, patience)
        super().__init__(context, optimized, steps, reference)
        batch = "whole" if options.get("model") == "whole" else str(options.get("batch", "auto"))
        loss = "mean" if options.get("trust_loss") else str(options.get("loss", "auto"))
        self._loops = Loops(self._group, context.say, context.device, steps, context.proving, batch=batch, loss=loss)
        engined = engine.of(context, optimized, self._loops)
        self._work = Distributor(context, optimized, self._models, engined, self._guard)
        self._backwards = Backwards(self._work, self._loops, lambda: self._is_within)
        self._is_cut = any(context.plan.degree(one) > 1 for one in ("tp", "pp"))
        self._functional = 0

    # ------------------------------------------------------------------------------------------- around the user's code

    def install(self) -> None:
        """From here on optimizers are recorded, and the modules that they train become distributed when called."""
        self._steps.began_with(seed := begin_alike(self._steps.seed))
        whole = chosen(self._context.plan, "state_dict_type") == "FULL_STATE_DICT"
        self._wrap(self._call, self._backwards.backward, self._loops.iterate, whole_states=whole)
        around = self._patches.around
        around(torch.optim.Optimizer, "add_param_group", self._optimized.add_param_group)
        stages.install(self._patches, self._context.plan)
        around(torch.autograd, "grad", self._backwards.grad)
        around(torch.Tensor, "register_hook", self._register_hook)
        around(torch.func, "functional_call", self._functional_call)
        self._patches.give(nn.Module, "__deepcopy__", self._optimized.deepcopy)
        data_parallel.install(self._patches, self._context)
        opened_files.install(self._patches, self._context)
        around(torch.optim.Optimizer, "state_dict", self._optimizer_state)
        around(torch.optim.Optimizer, "load_state_dict", self._take_optimizer_state)
        if self._sharded:
            around(nn.Module, "named_parameters", self._named_parameters)
            self._patches.hook(register_optimizer_step_pre_hook(lambda *_: self._work.gathered.let_go()))
        if self._work.engine is not None:
            self._work.engine.install(self._patches)  # DeepSpeed looks for overflows itself
        else:
            self._guard.install(self._patches)
            self._verifier.begin(seed, self._patches)

    def stand_aside(self, why: str) -> None:
        """Do nothing in the rest of the job. Raises ``StrategyError`` when something was distributed before."""
        for root in self._work.roots.values():
            raise StrategyError(
                f"{why}; but the strategy has distributed {type(root).__name__} before",
                "call td.prepare before the first training step",
            )
        self._verifier.refuse(why)
        self.abandon()
        self._context.say(why)

    def weight(self) -> float | None:
        """The weight of this rank's mean in the global mean, while a loop has only its part of a batch."""
        return None if self._loops.sliced is None else self._loops.sliced.weight

    def samples(self) -> int | None:
        """Samples of the batch that a loop has given since the last call."""
        return self._loops.taken()

    def note_captured(self) -> None:
        """Called when the bundle is loaded."""
        self._optimized.note_captured()

    def apart(self) -> Iterator[object]:
        """Modules, parameters and optimizers of which this rank may have only a part."""
        if self._whole:
            return
        if self._sharded or self._work.engine is not None:
            yield from (*self._work.roots.values(), *self._optimized.replaced, *self._optimized.unseen)
        for staged in self._work.pipelines:
            yield from (*staged.root.modules(), *staged.root.parameters(), *staged.originals.values())
        if self._work.pipelines or self._work.engine is not None:
            yield from (*self._optimized, *self._optimized.parameters())
        yield from filter(zero1.is_divided, self._optimized)

    def _come_back(self, names: dict[str, Any]) -> None:
        work = self._work
        if apart := differing(work.roots.values(), work.divider.counts, self._group):
            self._context.say(
                f"{', '.join(apart[:3])}: forwards leave numbers of their samples there, and a rank has only its own; "
                "the notebook gets those of rank 0 (-O model=whole computes the whole batch on every rank)"
            )
        work.gathered.keep_writes()
        self._lent.keep()
        for memory in work.shared:
            memory.refresh(always=True)
        self.abandon()
        originals = self._optimized.originals(self._models)
        if self._sharded:
            statedicts.whole_values(names, originals)
            for model in self._models:
                statedicts.whole_attributes(model, originals)
        self._undo_replicas()
        if work.engine is not None:
            work.engine.finish()
        for staged in work.pipelines:
            staged.restore(list(self._optimized))
            restore.restore(staged.root)
            statedicts.whole_values(names, staged.originals)
        if work.pipelines and (lost := remote_parameters.without_values(names)):
            self._context.say(
                f"{', '.join(lost)}: computed from parameters of pipeline stages on other ranks, so the values do not "
                "come back to the notebook (to get them, use --strategy ddp or fsdp)"
            )
        if self._models or work.pipelines:
            for model in self._models:
                restore.restore(model, self._optimized.replaced)
            for copied in names.values():  # a copy of a part of a model
                if isinstance(copied, nn.Module) and any(isinstance(one, DTensor) for one in copied.parameters()):
                    restore.restore(copied)
            self._restore_optimizers(originals)
        for memory in work.shared:
            memory.give_back()
        self._whole = True
        if work.roots:
            return
        self._context.say(
            nothing_was_distributed(untrained=bool(self._optimized.pending), backward=self._backwards.seen)
        )

    def _explain(self, error: BaseException) -> BaseException | None:
        return super()._explain(error) or (remote_parameters.explain(error) if self._work.pipelines else None)

    def abandon(self) -> None:
        """Remove the patches of torch. Sharded parameters stay sharded, because other ranks may have ended."""
        self._work.gathered.end()
        if self._work.shared:
            aliases.let_go()
        for staged in self._work.pipelines:
            staged.let_go()
        self._work.averaging.end()
        super().abandon()

    def _changed(self) -> Iterator[nn.Module]:
        return iter((*self._work.roots.values(), *self._optimized.copies()))

    # -------------------------------------------------------------------------------------------------------- forwards

    def _call(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        self._lent.keep()
        if not self._sharded or in_backward():  # FSDP uses what it has gathered until a backward ends
            return self._outermost(original, module, *args, **kwargs)
        with self._loops.aside():
            self._work.gathered.begin_forward()
            args, kwargs = in_full(module, (args, kwargs))
        try:
            return self._outermost(original, module, *args, **kwargs)
        finally:
            self._work.gathered.show()

    def _outermost(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        compiled, module = module, compiling.unwrapped(module)
        forward = functools.partial(original, module if self._is_cut else compiled)
        if not torch.is_grad_enabled():
            if self._loops.watch is not None and module.training and self._work.divider.synchronised:
                self._loops.watch.object("batch normalisation takes statistics in a call without gradients")
            is_part = self._sharded and id(module) not in self._work.roots
            gathered = self._work.gathered.whole(module) if is_part else _NOTHING
            with self._calls.within() if compiled is not module else _NOTHING, gathered:
                return self._whole_call(forward, *args, **kwargs)
        replaceable = not (self._functional and self._sharded)
        new = bool(self._optimized.pending) and replaceable and self._optimized.are_in(module)
        if not new and id(module) not in self._work.roots:
            return self._whole_call(forward, *args, **kwargs)
        if in_functorch():
            self._check_transform(module)
            return self._whole_call(forward, *args, **kwargs)
        with self._calls.within():
            if new and self._is_cut and compiled is not module:
                self._context.say(
                    f"{self._context.plan.name}: the model that the cell compiled runs without compilation"
                )
            return self._root_call(forward, module, args, kwargs, new=new)

    def _whole_call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Every rank computes the global batch, unless a backward recomputes a part of a divided forward."""
        if in_backward() or not self._work.divider.synchronised:
            return forward(*args, **kwargs)
        with self._work.divider.whole_batch():
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
                f"checkpoint is applied to the whole {own_class(module).__name__}, whose parameters "
                f"{self._context.plan.name} has sharded: a backward gathers them only once",
                "use checkpoint within its forward, --activation-checkpointing, or use_reentrant=True",
            )
        if watch is not None:
            watch.forward(tensors_in((args, kwargs)))
        self._work.divider.samples, self._work.divider.replicated = self._loops.samples, self._loops.sliced is None
        args, kwargs = to_device(deferred.settled((args, kwargs), "the model"), self._context.device)
        with self._loops.aside():
            if new:
                self._distribute(forward, module, *map_tensors((args, kwargs), for_a_trial))
            if self._work.engine is not None:
                forward = self._work.engine.forward(module, forward)
            if self._loops.sliced is None:
                outputs = self._work.divider(forward, module, args, kwargs)
            else:  # the loop has only the rows of this rank
                outputs = self._work.divider.sliced(forward, module, args, kwargs, self._loops.sliced)
        self._watch_outputs(outputs)
        return outputs

    def _watch_outputs(self, outputs: Any) -> None:
        """The last forward of a root has given ``outputs``."""
        watch, sliced, divider = self._loops.watch, self._loops.sliced, self._work.divider
        if watch is not None:
            if not divider.in_front:
                watch.object("a model is given samples in another dimension than the first")
            if divider.keeps:
                watch.object(f"the model keeps values of its samples in {divider.keeps}")
            watch.forwarded(tensors_in(outputs), divider.ways)
        if not self._work.pipelines and self._work.engine is None:
            rows = Rows.of(divider.share, joined=True) if sliced is None else Rows.of(sliced, joined=False)
            self._guard.origins.watch(outputs, rows)

    def _distribute(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The first training call of a root module."""
        agreement.check_not_scripted([module])
        self._work.gathered.let_go()
        agreement.check_not_reused(module, self._models)
        if any(staged.root is module for staged in self._work.pipelines):
            raise StrategyError(
                f"{type(module).__name__} is already cut into stages, and an optimizer or a parameter group "
                "was added after that",
                "build optimizers with all groups before the first training step, or use --strategy ddp or fsdp",
            )
        lazy.materialise(forward, module, args, kwargs)
        if not self._sharded:
            meta.fill(module)
        self._steps.trains()
        loading.move(module, self._context.device)
        lacking = meta.lacks_values(module)  # then it is tried after sharding
        ways = None if lacking else self._work.divider.ready(forward, module, args, kwargs)
        part, samples = self._work.divider.part(args, kwargs), self._work.divider.samples_of_part(args, kwargs)
        hold = functools.partial(Equivalence, forward, module, part, samples, self._context)
        seen = None if lacking else self._loops.samples
        rewrites = functools.partial(rewriting.rewritten, forward, module, (args, kwargs), seen)
        try:
            cut = functools.partial(self._work.cut, module, (args, kwargs), ways, self._within)
            self._work.distribute(module, cut, hold, rewrites)
        except StrategyError as error:
            if not self._work.is_divided_inside:
                raise
            said = submodules.explain(error, module, self._context.plan.name, self._optimized.pending)
            raise said or error from None

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """As in a root's forward: for the work of a pipeline in ``backward()``, or when a value is needed."""
        with self._calls.within(), self._loops.aside():
            yield

    # ------------------------------------------------------------------------------------------------------- gradients

    @property
    def _is_within(self) -> bool:
        """Whether the caller of torch is a model's forward or an engine, not the cell."""
        return self._calls.depth > 0 or (self._work.engine is not None and self._work.engine.within)

    def _clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for staged in self._work.pipelines:
            if staged.has(listed):
                return staged.clip(listed, *args, **kwargs)
        if self._work.engine is not None:
            return self._work.engine.clip(original, listed, *args, **kwargs)
        return super()._clip(original, listed, *args, **kwargs)

    def _unscale(self, *args: Any) -> Any:
        return precision.unscale(*args, device=self._context.device, staged=bool(self._work.pipelines))

    def _optimizer_state(self, original: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
        """``Optimizer.state_dict`` with the state of all stages. All ranks must call it."""
        found = original(optimizer)
        for staged in self._work.pipelines:
            staged.make_optimizer_whole(optimizer, found["state"])
        if self._work.pipelines:
            found["state"] = dict(sorted(found["state"].items()))
        self._optimized.show_kernels(optimizer, found["param_groups"])
        return found

    def _take_optimizer_state(
        self, original: Callable[..., Any], optimizer: torch.optim.Optimizer, state_dict: Any
    ) -> None:
        original(optimizer, state_dict)
        self._optimized.loaded(optimizer)
        for staged in self._work.pipelines:
            staged.forget_others(optimizer)

    def _named_parameters(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """``parameters()`` calls this too. A penalty computed before the backward may need unsharded parameters."""
        if not self._calls.depth and not in_backward():
            gathered = self._work.gathered
            (gathered.show if torch.is_grad_enabled() else gathered.let_go)()
        return original(module, *args, **kwargs)

    def _register_hook(self, original: Callable[..., Any], tensor: torch.Tensor, hook: Any) -> Any:
        if self._calls.depth and self._work.divider.dividing:
            hooks.check_tensor(tensor, sys._getframe(2))
        return original(self._optimized.unseen.get(tensor, tensor), hook)

    def _check_transform(self, module: nn.Module) -> None:
        """Raise ``StrategyError`` for a model that is, or would be, sharded, within a transform of ``torch.func``."""
        if self._sharded:
            raise StrategyError(
                f"{own_class(module).__name__}, which the strategy shards, is called in a transform of torch.func "
                "(vmap, grad)",
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
        """Raises ``StrategyError`` for a model whose parameters are sharded, also while they are gathered."""
        if self._sharded and any(part in self._models for part in module.modules()):
            raise StrategyError(
                f"functional_call of {own_class(module).__name__}, whose parameters fsdp has sharded",
                "use --strategy ddp",
            )
        self._work.divider.exact = False
        self._functional += 1
        try:
            return original(module, parameter_and_buffer_dicts, *args, **kwargs)
        finally:
            self._functional -= 1
