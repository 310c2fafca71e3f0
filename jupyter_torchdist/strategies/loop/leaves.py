"""Tensors of the cell that a loss has a gradient in, and that no optimizer trains.

Their gradients are not averaged: a rank that loads its part of a batch would have those of its part.
"""

from __future__ import annotations

import dis
import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...usercode.frames import is_users
from ..core.side_effects import is_users_class, is_users_own, joined

_MOST, _FEW = 2000, 64
"""How many objects are looked at, and how many entries of each."""


def untrained(losses: Sequence[torch.Tensor], frame: FrameType | None, trained: Collection[int]) -> str | None:
    """The name of such a tensor that code around ``frame`` knows; ``trained``: the identities of parameters.

    A tensor that is no parameter, such as a batch, counts if it has a hook, or if the code reads a ``.grad``.
    """
    named = {key: found for key, found in _named(frame) if key not in trained}
    if not named:
        return None
    inside = _leaves(losses)
    read = None
    for key, (name, tensor) in named.items():
        if key not in inside:
            continue
        if isinstance(tensor, nn.Parameter) or tensor._backward_hooks:
            return name
        read = _reads_gradients(frame) if read is None else read
        if read:
            return name
    return None


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``named_parameters`` as they are now: a call of that would gather what is sharded."""
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield joined(path, name), parameter


def functions_of_the_cell(losses: Sequence[torch.Tensor]) -> list[str]:
    """The names of the cell's own ``autograd.Function`` classes in the losses' graphs."""
    kinds = (getattr(node, "_forward_cls", None) for node in _nodes(losses))
    return list(dict.fromkeys(kind.__name__ for kind in kinds if kind is not None and is_users_class(kind)))


def _leaves(losses: Sequence[torch.Tensor]) -> set[int]:
    """The identities of the leaves of the losses' graphs."""
    leaves = (getattr(node, "variable", None) for node in _nodes(losses))
    return {id(leaf) for leaf in leaves if leaf is not None}


def _nodes(losses: Sequence[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the losses' graphs, each once."""
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Those of user code, from ``frame`` outwards."""
    while frame is not None and is_users(frame.f_code.co_filename):
        yield frame
        frame = frame.f_back


def _named(frame: FrameType | None) -> Iterator[tuple[int, tuple[str, torch.Tensor]]]:
    """Leaves with gradients that these frames know, by their identity."""
    scopes = [scope for one in _frames(frame) for scope in (one.f_locals, one.f_globals)]
    waiting: list[tuple[str, Any]] = [
        (name, value) for scope in scopes for name, value in list(scope.items()) if not name.startswith("_")
    ]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        name, one = waiting.pop()
        if id(one) in seen or isinstance(one, (int, float, str, bytes)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if one.is_leaf and one.requires_grad:
                yield id(one), (name, one)
        elif isinstance(one, nn.Module):
            waiting += [(f"{name}.{path}", parameter) for path, parameter in own_parameters(one)]
        else:
            values: Any = one if isinstance(one, (list, tuple, deque)) else ()
            values = one.values() if isinstance(one, dict) else values
            values = vars(one).values() if is_users_own(one) else values
            waiting += [(name, value) for value in itertools.islice(values, _FEW)]


def _reads_gradients(frame: FrameType | None) -> bool:
    """Whether code of these frames has ``….grad`` that is not ``torch.autograd.grad``."""
    for one in _frames(frame):
        names = [
            step.argval for step in dis.get_instructions(one.f_code) if step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        ]
        if any(name == "grad" and before != "autograd" for before, name in itertools.pairwise(["", *names])):
            return True
    return False
