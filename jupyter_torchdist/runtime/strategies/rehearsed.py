"""The first training steps of a cell as a rank takes them, on tensors without values, for the memory it takes.

The cell runs under ``FakeTensorMode`` with a process group that only says that it communicated. What the automatic
way does is done here too, by the same parts: the model becomes sharded when it is first called to be trained, its
forward gets this rank's rows, its outputs are joined, gradients are averaged. So what FSDP gathers, keeps and sums is
in the log of allocations without being modelled. Nothing is proved here of the model or the loss: ``auto`` does that.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

from ...protocol.memory import ParameterSize, Rehearsed, elements
from ...protocol.strategy import StrategyPlan
from ..allocations import Allocations, storages
from . import activations, fsdp, gradients, loading, optimizers, precision
from .base import Setting
from .dtensors import local
from .fakes import NotRehearsed, Reached, cut, joined, place
from .holders import all_of
from .patches import Patches
from .shares import map_tensors, tensors_in

MOST_RANKS = {"dp_shard": 8, "dp_replicate": 2}
"""Of the mesh in a rehearsal: more cost time (one copy a rank and unit), and what is sharded is scaled."""

STEPS = 2
"""Of each optimizer: in the second one gradients of the first may still be there when the forward begins."""

READ = 1.0
"""What a number is that the cell reads from a tensor without values, such as the loss."""


def smaller(plan: StrategyPlan) -> StrategyPlan:
    """The strategy on the mesh of the rehearsal."""
    return replace(plan, degrees={name: min(plan.degree(name), most) for name, most in MOST_RANKS.items()})


class Rehearsal:
    """Watches one cell under ``plan``; ``setting`` is that of ``smaller(plan)``."""

    def __init__(self, plan: StrategyPlan, setting: Setting, *, gpus: bool) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.log = Allocations(self._number)
        self._plan, self._setting, self._gpus = plan, setting, gpus
        self._group = setting.data_group  # a mesh is cut with real numbers: not under ``mode``
        self._ranks = plan.degree("dp_replicate") * plan.degree("dp_shard")
        self._patches = Patches()
        self._hooks: list[Any] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._roots: dict[int, nn.Module] = {}
        self._depth = 0
        self._samples: int | None = None
        self._given_in_parts = plan.options.get("batch") == "slices"
        self._sliced = False  # whether the batch in flight is the rank's part
        self._begun: int | None = None
        self._held = 0
        self._activations: int | None = None
        self._steps: list[tuple[torch.optim.Optimizer, int, int]] = []
        self._stepping = 0
        self._scale: dict[int, float] = {}  # of sharded gradients
        self._notes: list[str] = []

    # ------------------------------------------------------------------------------------------ around the user's code

    def install(self) -> None:
        """From here on optimizers, models and loaders are watched."""
        around = self._patches.around
        around(torch.optim.Optimizer, "add_param_group", self._add_param_group)
        around(nn.Module, "__call__", self._call)
        around(torch.autograd, "backward", self._backward)
        around(DataLoader, "__iter__", self._batches)
        around(torch.amp.GradScaler, "_maybe_opt_step", _stepped_always)
        around(torch, "compile", _not_compiled)
        around(nn.Module, "compile", lambda *_: None)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def undo(self) -> None:
        """torch is as it was."""
        self._patches.undo()
        for hook in self._hooks:
            hook.remove()

    def take_captured(self) -> None:
        """Models and optimizers that came with the bundle lose their values."""
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
        """In place of ``item()``: what is known of it, or a number that stands for a loss or a metric."""
        constant = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        if constant is not None:
            with _disable_current_modes():
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
        if self._gpus:  # what torch chooses there by itself: all parameters at once, with temporaries of their size
            for group in optimizer.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True

    def _living(self) -> list[torch.optim.Optimizer]:
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def _batches(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Iterator[Any]:
        """The real loader's batches, read in this process, without their values."""
        alone = copy.copy(loader)
        vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, pin_memory=False)
        with _disable_current_modes():
            batches = iter(original(alone))
        while True:
            with _disable_current_modes():
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
                self._distribute(module)
            if self._begun is None:
                self._begun, self._held = self.log.position, self._others()
            rows = self._rows(args, kwargs)
            if rows is None:
                return original(module, *args, **kwargs)
            total, mine = rows
            args, kwargs = map_tensors((args, kwargs), lambda tensor: cut(tensor, total, mine))
            outputs = original(module, *args, **kwargs)
            return map_tensors(outputs, lambda tensor: joined(tensor, total, mine))
        finally:
            self._depth -= 1

    def _is_trained(self, module: nn.Module) -> bool:
        trained = {one for optimizer in self._living() for one in loading.trained_by(optimizer)}
        return any(parameter in trained for parameter in module.parameters())

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
        """Samples of the batch, and how many this rank computes; None where it computes all."""
        sizes = [tensor.size(0) for tensor in tensors_in((args, kwargs)) if tensor.dim()]
        total = self._samples if self._samples in sizes else next(iter(sizes), None)
        if total is None or self._sliced or self._plan.options.get("model") == "whole":
            return None
        if total < self._ranks:
            note = f"a batch of {total} samples is less than {self._ranks} ranks: each computes all of it"
            self._notes += [note] if note not in self._notes else []
            return None
        self._samples = total
        return total, -(-total // self._ranks)

    def _distribute(self, root: nn.Module) -> None:
        setting = self._setting
        if setting.plan.activation_checkpointing:
            activations.check(root, setting)
            activations.apply(root, setting)
        if self._shards:
            fsdp.check(root, setting)
            before = optimizers.by_name(root)
            fsdp.shard_alone(root, setting)
            replaced = optimizers.replaced(before, root)
            for optimizer in self._living():
                optimizers.remap(optimizer, replaced)
            optimizers.release(replaced)
        else:
            precision.apply(root, setting)
        self._roots[id(root)] = root

    @property
    def _shards(self) -> bool:
        return self._setting.plan.degree("dp_shard") > 1

    # ------------------------------------------------------------------------------------------------ the step's parts

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        nested = self._depth or torch._C._current_graph_task_id() != -1
        if not nested and self._begun is not None and self._activations is None:
            self._activations = self.log.live() - self.log.live(self._begun) - self._gathered()
        original(*args, **kwargs)
        if nested or self._shards or self._ranks == 1:
            return
        trained = dict.fromkeys(one for optimizer in self._living() for one in loading.trained_by(optimizer))
        dense = [one.grad for one in trained if one.grad is not None and not one.grad.is_sparse]
        with torch.no_grad():
            for bucket in gradients.buckets(dense):
                gradients.average_bucket(bucket, self._group)

    def _gathered(self) -> int:
        """Whole parameters of sharded units that stay between forward and backward."""
        roots: list[Any] = list(self._roots.values()) if self._shards else []
        states = [state for root in roots for state in root._get_fsdp_state()._state_ctx.all_states]
        units = [one for state in states for group in state._fsdp_param_groups for one in group.fsdp_params]
        kept = [tensor for one in units for tensor in one.all_gather_outputs]
        return sum({id(storage): storage.nbytes() for tensor in kept for storage in storages(tensor)}.values())

    def _before_step(self, *_: Any) -> None:
        self._stepping = self.log.position

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps.append((optimizer, self._stepping, self.log.position))
        for parameter in loading.trained_by(optimizer):
            if parameter.grad is not None:
                numbers = self.log.number(parameter.grad)
                self._scale.update(dict.fromkeys(numbers, self._ratio([parameter])))
        times = Counter(id(one) for one, _, _ in self._steps)
        if times[id(optimizer)] > STEPS or all(times[id(one)] >= STEPS for one in self._living()):
            raise Reached

    # -------------------------------------------------------------------------------------------------- what was found

    def found(self, reason: str = "") -> Rehearsed:
        """All that is known now; under ``mode`` and ``log`` as the cell was. ``reason``: why there is no whole step."""
        notes = list(self._notes)
        working = self._working() if self._steps and self._begun is not None else None
        if working is not None and reason:
            notes.append(f"rehearsed up to its first step: {reason}")
            reason = ""
        elif working is None and not reason:
            reason = "it takes no optimizer step on a model that it calls"
        for optimizer in self._living():
            if all(one is not optimizer for one, _, _ in self._steps) and (why := self._step_alone(optimizer)):
                notes.append(why)
        roots = list(self._roots.values())
        buffers = {id(one): one for root in roots for one in root.buffers()}
        return Rehearsed(
            parameters=tuple(self._size(one) for one in self._parameters()),
            buffers=sum(_bytes(one) for one in buffers.values()),
            batch=self._held if working is not None else 0,
            activations=self._activations if working is not None else None,
            working=working,
            samples=self._samples,
            reason=reason,
            notes=tuple(notes),
        )

    def _parameters(self) -> list[torch.Tensor]:
        """Of the models that were called to be trained, and all that an optimizer trains."""
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
        sharded = self._shards and parameter.dim() > 0
        return ParameterSize(
            tuple(parameter.shape), parameter.element_size(), parameter.requires_grad, sharded, alike, whole
        )

    def _others(self) -> int:
        """What lives beside the models: batches, data that the cell made, its other tensors."""
        states = [*self._parameters(), *(one for root in self._roots.values() for one in root.buffers())]
        numbers = {number for one in states for number in self.log.number(one)}
        return sum(change for number, change in self.log.log if number not in numbers)

    def _working(self) -> int:
        """Optimizer state is counted elsewhere; what is a part of a sharded parameter counts as on the real mesh."""
        begun = self._begun
        assert begun is not None
        states: set[int] = set()
        for parameter in self._parameters():
            for optimizer in self._living():
                for value in tensors_in(dict(optimizer.state.get(parameter, {}))):
                    states.update(self.log.number(value))
        scale = {**self._scale, **dict.fromkeys(states, 0.0)}
        rest = self._ratio(self._parameters())

        def weight(position: int, number: int) -> float:
            stepping = any(start <= position < stop for _, start, stop in self._steps)
            return scale.get(number, rest if stepping else 1.0)

        return self.log.most(begun, self.log.position, weight)

    def _ratio(self, parameters: list[torch.Tensor]) -> float:
        """A rank's shards on the real mesh, by those of the rehearsal."""
        if not self._shards:
            return 1.0
        here, there = self._setting.plan.degree("dp_shard"), self._plan.degree("dp_shard")
        shapes = [tuple(one.shape) for one in parameters]
        return sum(elements(shape, there) for shape in shapes) / sum(elements(shape, here) for shape in shapes)

    def _step_alone(self, optimizer: torch.optim.Optimizer) -> str:
        """Let the optimizer make its state where the cell did not come to that; what prevented it, else nothing."""
        try:
            for parameter in loading.trained_by(optimizer):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
            optimizer.step()
        except Reached:
            pass
        except Exception as error:  # noqa: BLE001  # an optimizer of the user's may raise anything
            return f"the state of {type(optimizer).__name__} is not known: {error}"
        return ""


def _stepped_always(
    _original: Callable[..., Any],
    _scaler: Any,
    optimizer: torch.optim.Optimizer,
    _state: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """No gradient of a rehearsal is infinite."""
    return optimizer.step(*args, **kwargs)


def _not_compiled(_original: Callable[..., Any], model: Any = None, **_options: Any) -> Any:
    return model if model is not None else lambda function: function


def _bytes(tensor: torch.Tensor) -> int:
    part = local(tensor)
    return part.numel() * part.element_size()
