"""ZeRO stage 1: the state of each parameter on one rank only, in the user's own optimizer object.

It works like ``torch.distributed.optim.ZeroRedundancyOptimizer``, which would be another object. Each rank updates its
own parameters and sends them to the other ranks (Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...protocol.errors import StrategyError
from ...torch_private.collectives import broadcast_all
from ..core.loading import trained_by

BUCKET_BYTES = 25 * 2**20

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""

_of_optimizer: WeakKeyDictionary[torch.optim.Optimizer, Zero1] = WeakKeyDictionary()


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``StrategyError`` for an optimizer whose state belongs to no single parameter."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StrategyError(
            "zero1 cannot divide the state of LBFGS: it is one for all parameters", "leave -O zero1 out, or use Adam"
        )


def apply(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Divide the state of ``optimizer``, which stays the same object. All ranks of ``group`` must call it."""
    check(optimizer)
    _of_optimizer[optimizer] = Zero1(optimizer, group)


def is_divided(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this rank has only a part of the optimizer's state."""
    return optimizer in _of_optimizer


def undo(optimizer: torch.optim.Optimizer) -> None:
    """Gather the state on every rank and remove the hooks. All ranks must call it. Ignores other optimizers."""
    divided = _of_optimizer.pop(optimizer, None)
    if divided is not None:
        divided.gather()
        for handle in divided.handles:
            handle.remove()


@contextmanager
def gathered(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Every rank has the whole state in this context, as ``state_dict()`` needs it. All ranks must enter it."""
    divided = _of_optimizer.get(optimizer)
    if divided is not None:
        divided.gather()
    try:
        yield
    finally:
        if divided is not None:
            divided.forget_others()


class Zero1:
    """Who owns which parameter, and the hooks around a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
        self._optimizer = ref(optimizer)
        self.group, self.rank = group, dist.get_rank(group)
        self.owners: dict[nn.Parameter, int] = {}
        self.loads = [0] * group.size()
        self.all: list[list[nn.Parameter]] = []
        self.whole = False
        self.handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(self._refuse_parts),
            optimizer.register_load_state_dict_post_hook(lambda _: self.forget_others()),
        ]
        self.forget_others()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        found = self._optimizer()
        assert found is not None  # its own hooks call us
        return found

    def owner(self, parameter: nn.Parameter) -> int:
        """The rank that owns ``parameter``, the same on all ranks. A new one goes to the rank with fewest elements."""
        if parameter not in self.owners:
            rank = self.loads.index(min(self.loads))
            self.owners[parameter] = rank
            self.loads[rank] += parameter.numel()
        return self.owners[parameter]

    def _parameters(self) -> list[nn.Parameter]:
        return trained_by(self.optimizer)

    def _before(self, _optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the step see only this rank's parameters. A closure computes all gradients, so it runs before."""
        changed = _with_closure_called(args, kwargs)
        self.all = [group["params"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if self.owner(parameter) == self.rank]
        return changed

    def _after(self, *_: object) -> None:
        if not self.all:  # the closure of this step has called the model for the first time
            self.forget_others()
            return
        for group, parameters in zip(self.optimizer.param_groups, self.all, strict=True):
            group["params"] = parameters
        self._send_weights()

    def _send_weights(self) -> None:
        for rank in range(self.group.size()):
            for tensors in _alike([p.data for p in self._parameters() if p.requires_grad and self.owner(p) == rank]):
                broadcast_all(self.group, tensors, BUCKET_BYTES, rank)

    def _refuse_parts(self, _optimizer: object) -> None:
        if not self.whole:
            raise StrategyError(
                "state_dict() of an optimizer whose state zero1 divides among the ranks would be a part of it",
                "use td.save(…), which saves all of it, or leave -O zero1 out",
            )

    def forget_others(self) -> None:
        """Keep the state of this rank's parameters only."""
        self.whole = False
        for parameter in self._parameters():
            if self.owner(parameter) != self.rank:
                self.optimizer.state.pop(parameter, None)

    def gather(self) -> None:
        """Every rank's state on all ranks, one parameter at a time."""
        for parameter in self._parameters():
            source = self.owner(parameter)
            state = self.optimizer.state.get(parameter) if source == self.rank else None
            outline = [None if state is None else {name: _outline(value) for name, value in state.items()}]
            dist.broadcast_object_list(outline, group=self.group, group_src=source)
            if outline[0] is not None:
                own = state or {name: _empty(value) for name, value in outline[0].items()}
                self._send_state(own, parameter.device, source)
                self.optimizer.state[parameter] = own
        self.whole = True

    def _send_state(self, state: dict[str, Any], device: torch.device, source: int) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor):
                there = value.to(device)
                dist.broadcast(there, group=self.group, group_src=source)
                state[name] = there.to(value.device)


def _with_closure_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """The arguments of ``step`` (the optimizer first) with its closure's value in place of the closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": lambda: loss}
    return (args[0], lambda: loss, *args[2:]), kwargs


def _alike(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype, because several are broadcast in one buffer."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return list(kinds.values())


def _outline(value: Any) -> Any:
    return (value.shape, value.dtype, value.device.type) if isinstance(value, Tensor) else value


def _empty(outline: Any) -> Any:
    if isinstance(outline, tuple) and len(outline) == 3 and isinstance(outline[0], torch.Size):
        return torch.empty(outline[0], dtype=outline[1], device=outline[2])
    return outline
