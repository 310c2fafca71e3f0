"""Which parameters the forward of a model writes, and which strategies can keep that as on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...protocol.errors import StrategyError
from ..core.agreement import of_every_rank
from ..core.context import ParallelContext
from ..core.ownership import own_class
from ..core.rng import undone
from ..core.scatter import map_tensors
from ..sharded.forward_writes import bound_anew
from .accumulating import of as accumulation_of
from .equivalence import few
from .halves import without_grad
from .no_trace import no_trace

_OTHER = 0.9
"""Parameters that are written are multiplied by it: an average of equal values would not show."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Rewritten:
    """Names of parameters. ``bound``: those to which the forward binds another parameter; ``again``: those that a
    second forward of the same samples changes further, such as an average.
    """

    written: frozenset[str] = frozenset()
    bound: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()


def rewritten(forward: Callable[..., Any], module: nn.Module, inputs: Inputs, samples: int | None) -> Rewritten:
    """Run ``forward`` on a few samples, or on all where it does not accept few, and undo that.

    Nothing is found where it raises: then the training raises the same. A collective call.
    """
    found = _tried(forward, module, map_tensors(inputs, functools.partial(few, samples=samples)))
    if found is None and samples is not None:
        found = _tried(forward, module, inputs)
    every = [one for one in of_every_rank(found) if one is not None]
    names = (frozenset[str]().union(*(getattr(one, kind) for one in every)) for kind in ("written", "bound", "again"))
    return Rewritten(*names)


def _tried(forward: Callable[..., Any], module: nn.Module, inputs: Inputs) -> Rewritten | None:
    args, kwargs = inputs
    try:
        with no_trace(module) as belongings, undone():
            without_grad(lambda: forward(*args, **kwargs))
            weights = belongings.weights
            if not weights.names:
                return Rewritten()
            for one in weights.current().values():
                one.data.mul_(_OTHER)
            without_grad(lambda: forward(*args, **kwargs))
            first = {name: one.clone() for name, one in weights.changes().items()}
            without_grad(lambda: forward(*args, **kwargs))
            second = weights.changes()
            again = {name for name, one in second.items() if name not in first or not _equal(one, first[name])}
            return Rewritten(frozenset(weights.names), frozenset(weights.bound), frozenset(again))
    except Exception:  # noqa: BLE001  # the user's forward may raise anything on fewer samples
        return None


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def check(model: nn.Module, found: Rewritten, context: ParallelContext) -> None:
    """Raise ``StrategyError`` for writes that the strategy would lose or repeat."""
    name, plan = own_class(model).__name__, context.plan
    sharded = plan.degree("dp_shard") > 1 or plan.degree("tp") > 1
    if found.bound and (sharded or plan.degree("pp") > 1 or plan.name == "deepspeed"):
        raise bound_anew(name, min(found.bound))
    if not found.again:
        return
    if plan.degree("pp") > 1:
        raise _repeated(name, found, "pp runs it once for each microbatch", "use --strategy ddp or fsdp")
    if accumulation_of(plan) is not None:
        raise _repeated(name, found, "--grad-accumulation runs it twice for each part", "leave --grad-accumulation out")
    if plan.activation_checkpointing:
        option = "--activation-checkpointing"
        raise _repeated(name, found, f"{option} runs it again in the backward", f"leave {option} out")
    if plan.name == "deepspeed":
        raise _repeated(name, found, "DeepSpeed keeps another copy of the weights", "use --strategy ddp or fsdp")


def _repeated(model: str, found: Rewritten, why: str, remedy: str) -> StrategyError:
    return StrategyError(
        f"the forward of {model} changes its parameter {min(found.again)} (without the optimizer), and {why}", remedy
    )
