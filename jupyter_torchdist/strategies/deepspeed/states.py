"""Restores a model and its optimizer after DeepSpeed's engine: full weights and state, nothing of DeepSpeed left.

ZeRO's weights are flat partitions on the ranks; DeepSpeed's ``safe_get_full_…`` gathers them one at a time
(https://deepspeed.readthedocs.io/en/latest/zero3.html#debugging).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallel import restore
from .guard import unguard

_LATE = ("ds_", "_external_params", "applied_pre_backward_ref_cnt")
"""Names, or prefixes of names, of attributes that DeepSpeed sets on modules while it trains."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_state_dict_hooks")


class States:
    """The state of a model and its optimizer before ``deepspeed.initialize``, to restore it."""

    def __init__(self, root: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._root, self._optimizer = root, optimizer
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._modules = [(module, dict(vars(module)), _hooks(module)) for module in root.modules()]
        self._parameters = [(one, set(vars(one)), one.dtype, _numbers(one)) for one in root.parameters()]
        self._added: list[set[str]] = []

    def made(self) -> None:
        """The engine was made: new attributes of modules are DeepSpeed's."""
        self._added = [set(vars(module)) - set(before) for module, before, _ in self._modules]

    def weights(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its full value, in the precision of the optimizer step. All ranks must iterate."""
        deepspeed = import_module("deepspeed")
        for parameter, _, dtype, _ in self._parameters:
            value = deepspeed.utils.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if value is None:
                with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                    value = parameter.detach().clone()
            yield parameter, value.view(_shape(parameter)).to(dtype)

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The full state of each trained parameter, on the CPU of rank 0; on the meta device elsewhere."""
        get = import_module("deepspeed").utils.safe_get_full_optimizer_state
        pieces: dict[str, Any] = next((values for values in self._optimizer.state.values() if values), {})
        first, found = dist.get_rank() == 0, {}
        for parameter in (one for _, own in self._groups for one in own if pieces and one.requires_grad):
            state = {}
            for name, value in pieces.items():
                if isinstance(value, Tensor) and value.dim():
                    whole = get(parameter, name).view(_shape(parameter))
                    state[name] = whole.cpu() if first else torch.empty_like(whole, device="meta")
                else:
                    state[name] = value.clone().cpu() if isinstance(value, Tensor) else value
            found[parameter] = state
        return found

    def state_dict(self) -> dict[str, Any]:
        """``Optimizer.state_dict`` as on one device, with values only on rank 0. All ranks must call it."""
        state = self.optimizer_state()
        order = {one: number for number, one in enumerate(one for _, own in self._groups for one in own)}
        numbers = iter(range(len(order)))
        groups = [{**group, "params": [next(numbers) for _ in own]} for group, own in self._groups]
        return {"state": {order[one]: values for one, values in state.items()}, "param_groups": groups}

    def restore(self, engine: Any) -> None:
        """Restore everything: full values on rank 0, on the meta device elsewhere. All ranks must call it."""
        first = dist.get_rank() == 0
        flat = engine.optimizer is not self._optimizer
        weights = {one: value.cpu() if first else _outline(value) for one, value in self.weights()} if flat else {}
        state = self.optimizer_state() if flat else {}
        engine.destroy()
        self._forget()
        for parameter, value in weights.items():
            parameter.data = value
        self._optimizer.param_groups[:] = [group for group, _ in self._groups]
        for group, parameters in self._groups:
            group["params"] = parameters
        if flat:
            self._optimizer.state.clear()
            for parameter, values in state.items():
                self._optimizer.state[parameter] = values
        restore.restore(self._root)
        if not flat:
            restore.restore_optimizer(self._optimizer)

    def _forget(self) -> None:
        """Remove DeepSpeed's hooks, attributes and containers, and keep the ones that the cell has added."""
        unguard(one for one, *_ in self._parameters)
        for (module, before, hooks), added in zip(self._modules, self._added, strict=True):
            for name in [name for name in vars(module) if name in added or name.startswith(_LATE)]:
                if name not in before:
                    vars(module).pop(name)
            vars(module)["_parameters"] = before["_parameters"]
            for table, kept in hooks.items():
                for number in [number for number in vars(module)[table] if number not in kept]:
                    if _is_deepspeeds(vars(module)[table][number]):
                        del vars(module)[table][number]
        for parameter, attributes, dtype, numbers in self._parameters:
            for name in set(vars(parameter)) - attributes:
                delattr(parameter, name)
            for number in [number for number in parameter._post_accumulate_grad_hooks or {} if number not in numbers]:
                del parameter._post_accumulate_grad_hooks[number]
            parameter.grad = None
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)


def _shape(parameter: nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", None) or parameter.shape
    return shape


def _outline(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype that takes no memory for values."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _hooks(module: nn.Module) -> dict[str, set[int]]:
    """The ids of the module's hooks, by table."""
    return {table: set(vars(module)[table]) for table in _HOOKS}


def _numbers(parameter: nn.Parameter) -> set[int]:
    return set(parameter._post_accumulate_grad_hooks or {})


def _is_deepspeeds(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")
