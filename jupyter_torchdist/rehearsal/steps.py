"""Runs the first training steps of a cell like one rank would, on fake tensors, to measure the memory they need.

The cell runs under ``FakeTensorMode`` with a fake process group. The rehearsal uses the same code as the automatic
strategy: the model is sharded at its first call for training, its forward gets this rank's rows, its outputs are
joined, gradients are averaged. So the log of allocations includes what FSDP gathers, keeps and sums, without a model
of it. The rehearsal proves nothing about the model or the loss; ``auto`` does that.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ..protocol.memory import ParameterSize, Rehearsed, elements
from ..protocol.strategy import StrategyPlan
from ..strategies.core import loading, meta, optimizers
from ..strategies.core.context import ParallelContext
from ..strategies.core.dtensors import local
from ..strategies.core.holders import all_of
from ..strategies.core.patches import Patches
from ..strategies.core.scatter import BatchShard, map_tensors, tensors_in
from ..strategies.parallel import activations, fsdp, precision, replicate, transforms
from ..strategies.step import accumulating, equivalence, gradients
from ..strategies.step.ways import Way
from ..torch_private.autograd import in_backward
from ..torch_private.collectives import coordinates
from ..torch_private.fully_shard import fsdp_groups, fsdp_states
from ..torch_private.places import FakeTensor, FakeTensorMode, disable_current_modes
from ..torch_private.training import SCALED_STEP
from . import fakes
from .allocations import Allocations, Weight, storages
from .fakes import NotRehearsed, Reached, cut, joined, place
from .pipeline import Stages

REHEARSED = ("dp_replicate", "dp_shard", "cp", "tp")
"""Dimensions of the device mesh in a rehearsal."""

MOST_RANKS = {"dp_shard": 8, "dp_replicate": 2}
"""Largest degrees in a rehearsal: more ranks cost time (one copy per rank and unit), and sharded memory is scaled."""

STEPS = 2
"""Steps of each optimizer. At the second forward, gradients of the first step may still exist."""

READ = 1.0
"""The number that the cell gets when it reads a fake tensor, for example the loss."""


def smaller(plan: StrategyPlan) -> StrategyPlan:
    """The strategy on the smaller mesh of the rehearsal."""
    degrees = {name: min(plan.degree(name), MOST_RANKS.get(name, plan.degree(name))) for name in REHEARSED}
    return replace(plan, degrees=degrees)


class Rehearsal:
    """Watches one cell under ``plan``. ``context`` belongs to ``smaller(plan)``."""

    def __init__(self, plan: StrategyPlan, context: ParallelContext, *, gpus: bool) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.log = Allocations(self._number)
        self._plan, self._context, self._gpus = plan, context, gpus
        self._offloads = gpus and bool(plan.options.get("cpu_offload"))
        self._group = context.data_group  # slicing a mesh needs real tensors: not under ``mode``
        self._ranks = plan.degree("dp_replicate") * plan.degree("dp_shard")
        self._patches = Patches()
        self._hooks: list[Any] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._roots: dict[int, nn.Module] = {}
        self._stages: dict[int, Stages] = {}  # by id of root, under pp
        self._accumulation = accumulating.of(plan)
        self._ways: dict[int, list[Way]] = {}  # by id of root, with accumulation
        self._depth = 0
        self._samples: int | None = None
        self._given_in_parts = plan.options.get("batch") == "slices"
        self._sliced = False  # whether the current batch is this rank's part
        self._begun: int | None = None
        self._held = 0
        self._trying = 0
        self._graph_ends: int | None = None  # where the first backward begins
        self._gathered_then = 0
        self._of_parameters: list[tuple[int, int]] = []  # log ranges that work on all trained parameters
        self._steps: list[tuple[torch.optim.Optimizer, int, int]] = []
        self._stepping = 0
        self._scale: dict[int, float] = {}  # by number of storage, for sharded gradients
        self._notes: list[str] = []

    # ------------------------------------------------------------------------------------------ around the user's code

    def install(self) -> None:
        """Begin to watch optimizers, models and loaders."""
        around = self._patches.around
        around(torch.optim.Optimizer, "add_param_group", self._add_param_group)
        around(nn.Module, "__call__", self._call)
        around(torch.autograd, "backward", self._backward)
        around(DataLoader, "__iter__", self._batches)
        around(*SCALED_STEP, fakes.stepped_always)
        around(torch, "compile", fakes.not_compiled)
        around(nn.Module, "compile", lambda *_: None)
        self._answer_for_the_others()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _answer_for_the_others(self) -> None:
        """Where strategies read values from other ranks, assume that the other ranks are like this one."""
        around = self._patches.around
        around(loading, "broadcast_states", lambda *_: None)
        around(loading, "someone_lacks_weights", lambda *_: False)
        around(gradients, "used_somewhere", lambda _original, ours, _group: [*map(gradients.state_of, ours)])
        around(*coordinates(), fakes.with_real_numbers)

    def undo(self) -> None:
        """Remove all patches and hooks from torch."""
        self._patches.undo()
        for hook in self._hooks:
            hook.remove()

    def take_captured(self) -> None:
        """Replace the tensors of models and optimizers in the bundle by fake tensors."""
        taken: dict[torch.Tensor, torch.Tensor] = {}
        for module in all_of(nn.Module):
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        table[name] = taken.setdefault(tensor, self._fake(tensor))  # type: ignore[assignment]
        for optimizer in all_of(torch.optim.Optimizer):
            for group in optimizer.param_groups:
                group["params"] = [taken.setdefault(one, self._fake(one)) for one in group["params"]]
            for old, new in taken.items():
                if old in optimizer.state:
                    state = optimizer.state.pop(old)
                    optimizer.state[new] = map_tensors(state, self._fake)
            self._note(optimizer)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake: torch.Tensor = self.mode.from_tensor(tensor, static_shapes=True)
        self.log.see(fake)
        return fake

    def _number(self, tensor: torch.Tensor) -> Any:
        """Replaces ``item()``: the value if it is known, else ``READ`` for a floating point tensor (loss, metric)."""
        constant = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        if constant is not None:
            with disable_current_modes():
                return constant.item()
        if tensor.dtype.is_floating_point:
            return READ
        raise NotRehearsed(f"it reads a number of a tensor ({str(tensor.dtype).removeprefix('torch.')}){place()}")

    # ------------------------------------------------------------------------------------- optimizers, batches, models

    def _add_param_group(self, original: Callable[..., Any], optimizer: torch.optim.Optimizer, group: Any) -> None:
        original(optimizer, group)
        self._note(optimizer)

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        if self._gpus:  # torch's default on GPUs: all parameters at once, with large temporaries
            for group in optimizer.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True

    def _living(self) -> list[torch.optim.Optimizer]:
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def _batches(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of the real loader, read in this process, as fake tensors."""
        alone = copy.copy(loader)
        vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, pin_memory=False)
        with disable_current_modes():
            batches = iter(original(alone))
        while True:
            with disable_current_modes():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            batch = map_tensors(batch, self._fake)
            for tensor in tensors_in(batch):
                self.log.see(tensor)
            self._samples = next((tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()), None)
            self._sliced = self._given_in_parts and (self._samples or 0) >= self._ranks
            if self._sliced and self._samples is not None:
                total, mine = self._samples, -(-self._samples // self._ranks)
                batch = map_tensors(batch, functools.partial(cut, total=total, mine=mine))
            yield batch

    def _call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._depth or not torch.is_grad_enabled() or not self._is_trained(module):
            return original(module, *args, **kwargs)
        self._depth += 1
        try:
            if id(module) not in self._roots:
                self._distribute(module, functools.partial(original, module), args, kwargs)
            if self._begun is None:
                self._begun, self._held = self.log.position, self._others()
            rows = self._rows(args, kwargs)
            if rows is None:
                return self._forward(original, module, args, kwargs, self._batch_size(args, kwargs) or 1)
            total, mine = rows
            args, kwargs = map_tensors((args, kwargs), lambda tensor: cut(tensor, total, mine))
            outputs = self._forward(original, module, args, kwargs, mine)
            return map_tensors(outputs, lambda tensor: joined(tensor, total, mine))
        finally:
            self._depth -= 1

    def _forward(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int
    ) -> Any:
        if id(module) in self._stages:
            return self._stages[id(module)].forward(functools.partial(original, module), args, kwargs, rows)
        if self._accumulation is None:
            return original(module, *args, **kwargs)
        forward = functools.partial(original, module)
        if id(module) not in self._ways:
            self._ways[id(module)] = fakes.ways_by_shape(forward, args, kwargs, rows)
        cut = [tensor.dim() > 0 and tensor.size(0) == rows for tensor in tensors_in((args, kwargs))]
        alone = BatchShard(rows, accumulating.Accumulation(1).as_ranks)
        return self._accumulation(forward, module, args, kwargs, self._ways[id(module)], cut, alone)

    def _is_trained(self, module: nn.Module) -> bool:
        trained = {one for optimizer in self._living() for one in loading.trained_by(optimizer)}
        return any(parameter in trained for parameter in module.parameters())

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
        """(samples of the batch, samples that this rank computes); None if the rank computes all."""
        total = self._batch_size(args, kwargs)
        if total is None or self._sliced or self._plan.options.get("model") == "whole":
            return None
        if total < self._ranks:
            note = f"a batch has {total} samples for {self._ranks} ranks, so each rank computes the whole batch"
            self._notes += [note] if note not in self._notes else []
            return None
        self._samples = total
        return total, -(-total // self._ranks)

    def _batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        sizes = [tensor.size(0) for tensor in tensors_in((args, kwargs)) if tensor.dim()]
        return self._samples if self._samples in sizes else next(iter(sizes), None)

    def _try(self, root: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Repeat what the strategy does first with the whole model: follow rows through it (``Divider``), measure."""
        begun, samples = self.log.position, self._batch_size(args, kwargs)
        parts = self._ranks if self._ranks > 1 else self._plan.degree("pp")
        if samples is not None and parts > 1:
            rows = max(2, -(-samples // parts))
            forward(*map_tensors(args, few := functools.partial(equivalence.few, samples=samples, count=rows)),
                    **map_tensors(kwargs, few))  # fmt: skip
        if transforms.divisions(self._context):
            few = functools.partial(equivalence.few, samples=samples)
            outputs = tensors_in(forward(*map_tensors(args, few), **map_tensors(kwargs, few)))
            torch.stack([one.float().sum() for one in outputs if one.requires_grad]).sum().backward()
            for parameter in root.parameters():
                parameter.grad = None
        self._trying = max(self._trying, self.log.most(begun, self.log.position))

    def _distribute(
        self, root: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        context, before = self._context, optimizers.by_name(root)
        accumulating.check(root, replace(context, plan=self._plan))
        transforms.check(root, context)
        if any(self._plan.degree(one) > 1 for one in ("dp_shard", "cp", "tp", "pp")) and not meta.asked_for:
            self._try(root, forward, args, kwargs)
        for _, parallelism in transforms.divisions(context):
            parallelism.apply(root, context)
        if context.plan.activation_checkpointing:
            activations.apply(root, context)
        if self._shards:
            fsdp.shard_alone(root, context if self._cuts else replicate.beside_tp(context))
        elif self._plan.degree("pp") > 1:
            self._stages[id(root)] = Stages(root, replace(context, plan=self._plan), self.log)
        else:
            precision.apply(root, context)
        if replaced := optimizers.replaced(before, root):
            for optimizer in self._living():
                optimizers.remap(optimizer, replaced)
            optimizers.release(replaced)
        self._roots[id(root)] = root

    @property
    def _cuts(self) -> bool:
        """Whether parameters are sharded over the ranks that divide the batch."""
        return self._context.plan.degree("dp_shard") > 1

    @property
    def _shards(self) -> bool:
        """Whether FSDP2 averages the gradients, also the gradients of replicas."""
        return self._cuts or (self._context.plan.degree("tp") > 1 and self._ranks > 1)

    # ------------------------------------------------------------------------------------------------ the step's parts

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        nested = self._depth or in_backward()
        if not nested and self._begun is not None and self._graph_ends is None:
            self._graph_ends, self._gathered_then = self.log.position, self._gathered()
        parts = nullcontext() if self._accumulation is None else self._accumulation.backward(plain=True)
        self._depth += 1  # backward of a part computes its forward again
        try:
            with parts:
                original(*args, **kwargs)
        finally:
            self._depth -= 1
        for stages in self._stages.values():
            stages.own(None)
        if nested or self._shards or self._ranks == 1:
            return
        begun = self.log.position
        trained = dict.fromkeys(one for optimizer in self._living() for one in loading.trained_by(optimizer))
        dense = [one.grad for one in trained if one.grad is not None and not one.grad.is_sparse]
        with torch.no_grad():
            for bucket in gradients.buckets(dense):
                gradients.average_bucket(bucket, self._group)()
        self._of_parameters.append((begun, self.log.position))

    def _gathered(self) -> int:
        """Bytes of gathered parameters of sharded units that remain between forward and backward."""
        roots: list[Any] = list(self._roots.values()) if self._shards else []
        states = [state for root in roots for state in fsdp_states(root)]
        units = [one for state in states for group in fsdp_groups(state) for one in group.fsdp_params]
        kept = [tensor for one in units for tensor in one.all_gather_outputs]
        return sum({id(storage): storage.nbytes() for tensor in kept for storage in storages(tensor)}.values())

    def _before_step(self, *_: Any) -> None:
        self._stepping = self.log.position

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps.append((optimizer, self._stepping, self.log.position))
        self._of_parameters.append((self._stepping, self.log.position))
        for parameter in loading.trained_by(optimizer):
            if parameter.grad is not None:
                numbers = self.log.number(parameter.grad)
                self._scale.update(dict.fromkeys(numbers, self._ratio([parameter])))
        times = Counter(id(one) for one, _, _ in self._steps)
        if times[id(optimizer)] > STEPS or all(times[id(one)] >= STEPS for one in self._living()):
            raise Reached

    # -------------------------------------------------------------------------------------------------- what was found

    def found(self, reason: str = "") -> Rehearsed:
        """The result so far. Call it under ``mode`` and ``log``. ``reason``: why the step is not complete."""
        notes, whole_step = list(self._notes), bool(self._steps) and self._begun is not None
        if whole_step and reason:
            notes.append(f"rehearsed up to its first step: {reason}")
            reason = ""
        elif not whole_step and not reason:
            reason = "it has no optimizer step for a model that it calls"
        for optimizer in self._living():
            if all(one is not optimizer for one, _, _ in self._steps) and (why := self._step_alone(optimizer)):
                notes.append(why)
        roots = list(self._roots.values())
        buffers = {id(one): one for root in roots for one in root.buffers()}
        common = Rehearsed(
            buffers=sum(_bytes(one) for one in buffers.values()),
            batch=self._held if whole_step else 0,
            trying=self._trying,
            offloaded=self._offloads,
            outlined=meta.asked_for,
            samples=self._samples,
            reason=reason,
            notes=tuple(notes),
        )
        each = [self._of_rank(rank, common, whole_step=whole_step) for rank in range(self._plan.degree("pp"))]
        fullest = max(each, key=_total)
        if not self._stages:
            return fullest
        said = f"rank {each.index(fullest)} of pp needs the most; stages are cut by operations here, by time in a job"
        return replace(fullest, notes=(*fullest.notes, said))

    def _of_rank(self, rank: int, common: Rehearsed, *, whole_step: bool) -> Rehearsed:
        """The result for one rank along ``pp`` (0 without a pipeline)."""
        every = self._parameters()
        own = [one for one in every if all(rank in stages.ranks_of(one) for stages in self._stages.values())]
        others = sum(map(_bytes, every)) - sum(map(_bytes, own))
        found = replace(common, parameters=tuple(self._size(one) for one in own), elsewhere=others)
        if not whole_step or self._begun is None:
            return found
        begun, weight = self._begun, self._weight(rank, own, every)
        working = self.log.most(begun, self.log.position, weight)
        kept = None
        if self._graph_ends is not None:
            kept = self.log.sum(begun, self._graph_ends, weight) - self._gathered_then
        for stages in self._stages.values():
            most, activations = stages.mixed(rank, lambda position: self.log.sum(begun, position, weight))
            working, kept = max(working, most), activations or kept
        return replace(found, working=working, activations=kept)

    def _parameters(self) -> list[torch.Tensor]:
        """Parameters of the models called for training, and all that an optimizer trains."""
        called = [one for root in self._roots.values() for one in root.parameters()]
        return list(dict.fromkeys([*called, *(p for one in self._living() for p in loading.trained_by(one))]))

    def _size(self, parameter: torch.Tensor) -> ParameterSize:
        alike = whole = 0
        for optimizer in self._living():
            for value in tensors_in(dict(optimizer.state.get(parameter, {}))):
                if value.shape == parameter.shape and value.dim():
                    alike += value.element_size()
                else:
                    whole += _bytes(value)
        sharded = self._cuts and parameter.dim() > 0
        shape, split = _split_shape(parameter)
        return ParameterSize(shape, parameter.element_size(), parameter.requires_grad, sharded, alike, whole, split)

    def _others(self) -> int:
        """Bytes of tensors outside the models: batches, data that the cell created, other tensors."""
        states = [*self._parameters(), *(one for root in self._roots.values() for one in root.buffers())]
        numbers = {number for one in states for number in self.log.number(one)}
        return sum(change for number, change in self.log.log if number not in numbers)

    def _weight(self, rank: int, own: list[torch.Tensor], every: list[torch.Tensor]) -> Weight:
        """The weight of each storage: 0 for optimizer state (counted elsewhere), scaled to the real mesh for shards."""
        states: set[int] = set()
        for parameter in every:
            for optimizer in self._living():
                for value in tensors_in(dict(optimizer.state.get(parameter, {}))):
                    states.update(self.log.number(value))
        scale = {**self._scale, **dict.fromkeys(states, 0.0)}
        rest = self._ratio(every) * sum(map(_bytes, own)) / (sum(map(_bytes, every)) or 1)
        if self._offloads:  # gradients are in host memory, too, and the optimizer steps there
            scale, rest = dict.fromkeys(scale, 0.0), 0.0
        staged = [stages.weight(rank) for stages in self._stages.values()]

        made: dict[int, int] = {}
        for position, (number, _) in enumerate(self.log.log):
            made.setdefault(number, position)

        @functools.cache
        def weight(number: int) -> float:
            if number in scale or not any(start <= made[number] < stop for start, stop in self._of_parameters):
                return scale.get(number, 1.0) * math.prod(part(number) for part in staged)
            return rest

        return weight

    def _ratio(self, parameters: list[torch.Tensor]) -> float:
        """Size of a rank's shards on the real mesh, divided by the size in the rehearsal."""
        if not self._cuts:
            return 1.0
        here, there = self._context.plan.degree("dp_shard"), self._plan.degree("dp_shard")
        shapes = [_split_shape(one)[0] for one in parameters]
        return sum(elements(shape, there) for shape in shapes) / sum(elements(shape, here) for shape in shapes)

    def _step_alone(self, optimizer: torch.optim.Optimizer) -> str:
        """Let the optimizer create its state if the cell did not. Returns the reason if that failed, else ``""``."""
        try:
            for parameter in loading.trained_by(optimizer):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
            optimizer.step()
        except Reached:
            pass
        except Exception as error:  # noqa: BLE001  # a user's optimizer may raise anything
            return f"the state of {type(optimizer).__name__} is not known: {error}"
        return ""


def _split_shape(parameter: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """(shape on a rank of ``tp`` before sharding by FSDP, number of ranks over which ``tp`` splits the parameter)."""
    shape, split = list(parameter.shape), 1
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for name, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True):
            if name == "tp" and isinstance(placement, Shard):
                shape[placement.dim], split = -(-shape[placement.dim] // size), size
    return tuple(shape), split


def _total(found: Rehearsed) -> int:
    """Bytes by which the ranks of a pipeline are compared (nothing is sharded there)."""
    states = sum(elements(one.shape) * (one.itemsize + one.state) + one.state_whole for one in found.parameters)
    return states + (found.working or 0)


def _bytes(tensor: torch.Tensor) -> int:
    part = local(tensor)
    return part.numel() * part.element_size()
