"""The automatic way: a cell written for one device trains on all ranks, unchanged.

Every rank runs the cell as if it were the only one, with the whole batch and the same random numbers. A module that
owns optimized parameters becomes distributed when it is first called to be trained; from then on each rank computes
its rows of that forward, and all see all outputs (``divided``). So whatever the cell does with the outputs, any loss
and any metric, is what one device does. After each backward the gradients are averaged over the ranks. A loop that
was watched for two steps and needs nothing but its own rows is given those alone (``loops``).
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ...protocol.errors import StrategyError
from ...protocol.strategy import StrategyPlan
from ...protocol.strategy_options import chosen
from ..autolog import UNSCALED
from . import (
    activations,
    agreement,
    batchnorm,
    compiling,
    context,
    fsdp,
    loading,
    norms,
    optimizers,
    pipeline,
    plain,
    precision,
    replicate,
    tensor,
    zero1,
)
from .already import distributed_by
from .base import Setting
from .datas import DATA
from .divided import Divider, Way
from .gradients import average_gradients
from .held import Held
from .holders import hand_over
from .loops import Loops
from .patches import Patches
from .shares import averaged, tensors_in
from .statedicts import (
    NUMBERS,
    Files,
    cleared_gradients,
    taken_optimizer_state,
    taken_state,
    whole_optimizer_state,
    whole_state,
    whole_values,
)
from .streams import begin_alike, own_stream

Weight = float | torch.Tensor
"""What a rank's loss counts with in the whole batch's."""


class Automatic:
    """What the rank of a job with a strategy does around the cell."""

    def __init__(self, setting: Setting) -> None:
        _check_built(setting.plan)
        self._setting, self._group = setting, setting.data_group
        options = setting.plan.options
        self._divider = Divider(
            self._group, whole=options.get("model") == "whole", trusted=bool(options.get("trust_model"))
        )
        self._loops = Loops(
            self._group,
            setting.say,
            batch=str(options.get("batch", "auto")),
            summed=options.get("loss") == "sum",
        )
        self._patches = Patches()
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._pending: set[torch.Tensor] = set()
        self._roots: dict[int, nn.Module] = {}
        self._copies: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = []
        self._models: list[nn.Module] = []  # those that are sharded, or divided inside
        self._kernels: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}
        self._sharded = setting.plan.degree("dp_shard") > 1 or setting.plan.degree("tp") > 1
        self._pipelines: list[pipeline.Pipeline] = []
        self._depth = self._functional = 0

    # ------------------------------------------------------------------------------------------- around the user's code

    def install(self) -> None:
        """From here on optimizers are noted, and what they train becomes distributed when it is called."""
        begin_alike()
        around = self._patches.around
        around(torch.optim.Optimizer, "add_param_group", self._add_param_group)
        around(nn.Module, "__call__", self._call)
        around(torch.autograd, "backward", self._backward)
        around(torch.autograd, "grad", self._grad)
        around(torch.func, "functional_call", self._functional_call)
        around(DataLoader, "__iter__", self._loops.iterate)
        self._patches.give(nn.Module, "__deepcopy__", self._copied)
        self._patches.give(DTensor, "data", DATA)
        for name, read in NUMBERS.items():
            self._patches.give(DTensor, name, read)
        around(torch.optim.Optimizer, "state_dict", whole_optimizer_state)
        around(torch.optim.Optimizer, "load_state_dict", taken_optimizer_state)
        around(nn.Module, "state_dict", whole_state)
        around(nn.Module, "load_state_dict", taken_state)
        around(nn.Module, "zero_grad", cleared_gradients)
        files = Files()
        around(torch, "save", files.save)
        around(torch, "load", files.load)
        for place in (torch.nn.utils, torch.nn.utils.clip_grad):
            around(place, "clip_grad_norm_", self._clip)
        around(torch.amp.GradScaler, "_unscale_grads_", self._unscale)

    def leave_alone(self, code: CodeType, names: dict[str, Any]) -> bool:
        """Whether the code is distributed already; then nothing of it is touched."""
        found = distributed_by(code, names)
        if found is None:
            return False
        self._patches.undo()
        self._setting.say(f"the cell is distributed already ({found}), so --strategy leaves it alone")
        return True

    def note_captured(self) -> None:
        """Optimizers that came with the bundle were built in the notebook."""
        for thing in gc.get_objects():
            if isinstance(thing, torch.optim.Optimizer):
                self._note(thing)

    def finish(self, names: dict[str, Any] | None = None) -> None:
        """Everything is plain again, whole on rank 0, and so is what ``names`` hold. All ranks call it."""
        self.abandon()
        if self._sharded:
            whole_values(names or {})
        for root in self._roots.values():
            batchnorm.revert(root)
            precision.revert(root)
        for optimizer in self._living():
            zero1.undo(optimizer)
        for staged in self._pipelines:
            staged.restore(self._living())
            plain.restore(staged.root)
        if self._models or self._pipelines:
            for model in self._models:
                plain.restore(model, self._replaced)
            for optimizer in self._living():
                plain.restore_optimizer(optimizer, self._replaced)
            for group, kernels in reversed(self._kernels):
                group.update(kernels)
            hand_over({new: old for old, new in self._replaced.items()}, (self._replaced,))
        if self._pending and not self._roots:
            self._setting.say("nothing was distributed: no module with optimized parameters was called to be trained")

    def annotate(self, error: BaseException) -> None:
        """Say what an error of torch's has to do with the strategy."""
        if self._sharded and self._roots and not isinstance(error, StrategyError) and _is_of_shards(error):
            said = (
                f"The model's parameters are sharded over the ranks (--strategy {self._setting.plan.name}): outside "
                "its forward each rank holds its part of them alone. Use them within forward(), or --strategy ddp."
            )
            vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), said]  # add_note came with Python 3.11

    def abandon(self) -> None:
        """torch is as it was. What is sharded stays so: other ranks may be gone."""
        self._patches.undo()

    # ------------------------------------------------------------------------------------------------------ optimizers

    def _add_param_group(self, original: Callable[..., Any], optimizer: torch.optim.Optimizer, group: Any) -> None:
        original(optimizer, group)
        self._note(optimizer)

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        distributed = {parameter for root in self._roots.values() for parameter in root.parameters()}
        self._pending |= set(_trained_by(optimizer)) - distributed

    def _living(self) -> list[torch.optim.Optimizer]:
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    @property
    def _copied(self) -> Callable[..., Any]:
        """``nn.Module.__deepcopy__``. A copy (averaged weights, a target) is sharded with its model: cells use both."""
        copies = self._copies

        def deepcopied(module: nn.Module, memo: dict[int, Any]) -> Any:
            reconstruct: Any = copy._reconstruct  # type: ignore[attr-defined]  # what copy.deepcopy does by itself
            copied = reconstruct(module, memo, *module.__reduce_ex__(4))
            copies.append((weakref.ref(module), weakref.ref(copied)))
            return copied

        return deepcopied

    def _copies_of(self, root: nn.Module) -> list[nn.Module]:
        """Those that no optimizer trains: another root is distributed when it is called."""
        living = [copied() for source, copied in self._copies if source() is root]
        return [one for one in living if one is not None and not self._is_trained(one)]

    # -------------------------------------------------------------------------------------------------------- forwards

    def _call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._depth or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        replaceable = not (self._functional and self._sharded)
        new = bool(self._pending) and replaceable and self._is_trained(module)
        if not new and id(module) not in self._roots:
            return original(module, *args, **kwargs)
        self._depth += 1
        try:
            return self._root_call(functools.partial(original, module), module, args, kwargs, new=new)
        finally:
            self._depth -= 1

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
        if watch is not None:
            watch.forward(tensors_in((args, kwargs)))
        self._divider.samples = self._loops.samples
        with self._loops.aside():
            if new:
                ways = self._divider.ready(forward, module, args, kwargs)
                hold = functools.partial(Held, forward, module, *self._divider.part(args, kwargs))
                self._distribute(module, functools.partial(self._cut, module, args, kwargs, ways), hold)
            if self._loops.sliced is None:
                outputs = self._divider(forward, module, args, kwargs)
            else:  # the loop has its rows alone
                self._divider.divided = True
                with own_stream(self._group.rank()):
                    outputs = forward(*args, **kwargs)
        if watch is not None:
            watch.forwarded(tensors_in(outputs), self._divider.ways)
        return outputs

    def _is_trained(self, module: nn.Module) -> bool:
        return any(parameter in self._pending for parameter in module.parameters())

    def _distribute(self, root: nn.Module, cut: Callable[[], None], hold: Callable[[], Held]) -> None:
        """``cut`` makes stages of it, where the plan says so; ``hold`` measures it as it is."""
        setting = self._setting
        agreement.same_on_all_ranks(root, setting)
        before = optimizers.by_name(root)
        self._check(root)
        names = [(model, optimizers.by_name(model)) for model in (root, *self._copies_of(root))]
        self._divide_inside([model for model, _ in names], hold)
        self._divider.shares(root, batchnorm.convert(root, setting))
        if setting.plan.activation_checkpointing:
            activations.apply(root, setting)
        if setting.plan.compile:
            compiling.apply(root, setting)
        if self._sharded:
            for model, known in names:
                self._shard(model, known)
        else:
            loading.broadcast_states(root, self._group, setting.device)
            if setting.plan.degree("pp") > 1:
                cut()
            else:
                precision.apply(root, setting)
            for optimizer in self._living() if chosen(setting.plan, "zero1") else ():
                zero1.apply(optimizer, self._group)
        self._pending -= set(before.values())
        self._roots[id(root)] = root
        if self._pipelines:  # it has said more
            return
        count = sum(parameter.numel() for parameter in root.parameters())
        part = "; each computes its part of every batch" if setting.data_ranks > 1 else ""
        setting.say(
            f"{type(root).__name__} ({_much(count)} parameters) is trained by {setting.plan.name} on "
            f"{dist.get_world_size()} ranks{part}"
        )

    def _cut(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], ways: tuple[Way, ...] | None
    ) -> None:
        staged = pipeline.Pipeline(root, self._setting, lambda: self._divider.samples)
        staged.cut(args, kwargs, ways)
        for optimizer in self._living():
            optimizers.remap(optimizer, staged.replaced)
        optimizers.release(staged.replaced)
        self._pipelines.append(staged)

    def _divide_inside(self, models: Sequence[nn.Module], hold: Callable[[], Held]) -> None:
        """Layers or sequences over ranks; the root, which comes first, is held against what it was."""
        setting = self._setting
        for dimension, parallelism in (("cp", context), ("tp", tensor)):
            if setting.plan.degree(dimension) > 1:
                held = hold()
                for model in models:
                    parallelism.apply(model, setting)
                held.compare(dimension, parallelism.explain)
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
        replaced = optimizers.replaced(before, model)
        for optimizer in self._living():
            self._kernels += [(group, _kernels(group)) for group in optimizer.param_groups]
            optimizers.remap(optimizer, replaced)
        hand_over(replaced, (before, self._replaced))
        optimizers.release(replaced)
        self._replaced |= replaced
        self._models.append(model)

    def _check(self, root: nn.Module) -> None:
        """Raise ``StrategyError`` before anything is changed."""
        setting = self._setting
        batchnorm.check(root)
        if setting.plan.degree("pp") > 1:
            pipeline.check(root, setting, self._living())
        if setting.plan.activation_checkpointing:
            activations.check(root, setting)
        for dimension, parallelism in (("cp", context), ("tp", tensor)):
            if setting.plan.degree(dimension) > 1:
                parallelism.check(root, setting)
        if setting.plan.degree("dp_shard") > 1:
            fsdp.check(root, setting)
        else:
            precision.check(root, setting)
        for optimizer in self._living():
            optimizers.check(optimizer, self._sharded)

    # ------------------------------------------------------------------------------------------------------- gradients

    def _backward(
        self, original: Callable[..., Any], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if self._depth or torch._C._current_graph_task_id() != -1:
            original(tensors, grad_tensors, *args, **kwargs)  # a backward within a forward or a backward
            return
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if self._loops.watch is not None:
            self._loops.watch.backward(losses, [value for loss in losses for value in _values(loss)])
        with self._loops.aside():
            if self._loops.sliced is None:
                original(tensors, grad_tensors, *args, **kwargs)
            else:
                weights = [self._loops.weight(loss) for loss in losses]
                values = [
                    (value, weight) for loss, weight in zip(losses, weights, strict=True) for value in _values(loss)
                ]
                sums = self._started(values)
                original(tensors, self._scaled(losses, weights, grad_tensors), *args, **kwargs)
                self._written(values, sums)
            if self._divider.divided:
                self._average()

    def _started(self, values: Sequence[tuple[torch.Tensor, Weight]]) -> list[tuple[torch.Tensor, Any]]:
        """The all-reduces of the losses, issued before the backward and on every rank: no ``item()`` waits."""
        started = []
        for value, weight in values:
            share = value.detach() * weight
            started.append((share, dist.all_reduce(share, group=self._group, async_op=True)))
        return started

    def _written(self, values: Sequence[tuple[torch.Tensor, Weight]], sums: Sequence[tuple[torch.Tensor, Any]]) -> None:
        """The user's tensors have the whole batch's loss."""
        for (value, _), (whole, work) in zip(values, sums, strict=True):
            work.wait()
            value.data.copy_(whole)

    def _scaled(self, losses: Sequence[torch.Tensor], weights: Sequence[Weight], grads: Any) -> Any:
        """The gradients of the losses, such that their mean over the ranks is one device's."""
        ranks = self._group.size()
        if all(isinstance(weight, float) and weight * ranks == 1.0 for weight in weights):
            return grads
        given = [None] * len(losses) if grads is None else [grads] if isinstance(grads, torch.Tensor) else list(grads)
        return [
            (torch.ones_like(loss) if grad is None else grad) * (weight * ranks)
            for loss, weight, grad in zip(losses, weights, given, strict=True)
        ]

    def _average(self) -> None:
        """Idempotent: what is averaged already stays as it is, so accumulated gradients are right too."""
        trained = dict.fromkeys(one for optimizer in self._living() for one in _trained_by(optimizer))
        own = [one for one in trained if not isinstance(one, DTensor) and not one.is_meta]  # meta: of another stage
        average_gradients(own, self._group)  # type: ignore[arg-type]

    def _clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for staged in self._pipelines:
            if staged.has(listed):
                return staged.clip(listed, *args, **kwargs)
        return _clip(original, listed, *args, **kwargs)

    def _unscale(self, original: Callable[..., Any], scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        """An overflow in one stage is one of all."""
        if not self._pipelines:
            return original(scaler, *args, **kwargs)
        precision.agree(scaler)
        return scaler._unscale_grads_(*args, **kwargs)

    def _grad(self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """What the cell asks for itself; within a forward it is of this rank's rows alone, and stays so.

        Raises ``StrategyError`` for sharded parameters, whose gradients exist within ``backward()`` only.
        """
        if any(isinstance(one, DTensor) for one in ([inputs] if isinstance(inputs, torch.Tensor) else inputs)):
            raise StrategyError(
                "torch.autograd.grad of parameters that fsdp has sharded", "use --strategy ddp, or backward()"
            )
        grads = original(outputs, inputs, *args, **kwargs)
        if self._depth or not self._divider.divided or torch._C._current_graph_task_id() != -1:
            return grads
        return tuple(None if grad is None else averaged(grad, self._group) for grad in grads)

    def _functional_call(
        self, original: Callable[..., Any], module: nn.Module, given: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Raises ``StrategyError`` for a model whose own parameters are shards."""
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise StrategyError(
                f"functional_call of {type(module).__name__}, whose parameters fsdp has sharded", "use --strategy ddp"
            )
        self._divider.exact = False
        self._functional += 1
        try:
            return original(module, given, *args, **kwargs)
        finally:
            self._functional -= 1


def _kernels(group: dict[str, Any]) -> dict[str, Any]:
    """Which kernels an optimizer takes for a group: shards beside plain parameters need others for a time."""
    return {name: group[name] for name in ("foreach", "fused") if name in group}


def _check_built(plan: StrategyPlan) -> None:
    """Raise ``StrategyError`` for what is planned and not performed yet: nothing is taken and then left undone."""
    parts = ("ddp", "fsdp", "hsdp", "tp", "cp", "pp")
    missing = [f"--strategy {name}" for name in plan.name.split("+") if name not in parts]
    missing += ["--checkpoint"] if plan.checkpoint else []
    missing += ["--grad-accumulation"] if plan.grad_accumulation > 1 else []
    missing += [f"-O {name}" for name in plan.options if name in _EXPLICIT]
    if missing:
        raise StrategyError(
            f"{', '.join(missing)}: not built yet for cells of one device", f"use {', '.join(parts)}, and td.save"
        )


_EXPLICIT = ("static_graph", "find_unused_parameters", "bucket_cap_mb", "gradient_as_bucket_view", "comm_hook")
"""Options of DDP's own reducer, for which gradients are averaged here after each backward instead."""


def _is_of_shards(error: BaseException) -> bool:
    text = str(error)
    return any(word in text for word in ("DTensor", "Sharding propagation", "DeviceMesh", "for storage of size 0"))


def _clip(original: Callable[..., Any], parameters: norms.Parameters, *args: Any, **kwargs: Any) -> Any:
    """A norm over sharded gradients, as a number that can be printed; every rank calls it."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    sharded = any(isinstance(parameter.grad, DTensor) for parameter in listed)
    return (norms.clip_grad_norm_ if sharded else original)(listed, *args, **kwargs)


def _values(loss: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that show a loss: it, and what a GradScaler scaled."""
    source = getattr(loss, UNSCALED, None)
    return [loss] if source is None else [loss, source]


def _trained_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _much(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
