"""On a rank: settings, a rank's slice, sums over ranks, and many checks in one job."""

from __future__ import annotations

import math
import traceback
from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jupyter_torchdist.protocol.errors import StrategyError
from jupyter_torchdist.protocol.strategy import StrategyPlan
from jupyter_torchdist.strategies.core.context import ParallelContext, make_context

CLOSE = 1e-5
SAID: list[str] = []


def run_checks(*modules: ModuleType) -> dict[str, str]:
    """Every ``check_`` of the modules, in order; the tracebacks of those that failed on this rank."""
    failed = {}
    for name, check in [found for module in modules for found in vars(module).items()]:
        if name.startswith("check_"):
            SAID.clear()
            try:
                check()
            except Exception:
                failed[name] = traceback.format_exc()
            dist.barrier()
    return failed


def context(
    degrees: dict[str, int] | None = None, say: Callable[[str], None] = SAID.append, **plan: Any
) -> ParallelContext:
    """All ranks along ``dp_shard``, where nothing else is said; words that are no field of a plan are options."""
    fields = StrategyPlan.__dataclass_fields__
    options = {name: value for name, value in plan.items() if name not in fields}
    rest = {name: value for name, value in plan.items() if name in fields}
    degrees = {"dp_shard": dist.get_world_size()} if degrees is None else degrees
    assert math.prod(degrees.values()) == dist.get_world_size()
    name = rest.pop("name", "+".join({"dp_shard": "fsdp", "dp_replicate": "ddp"}.get(one, one) for one in degrees))
    return make_context(StrategyPlan(name, degrees, options, **rest), torch.device("cpu"), say)


def spied() -> Any:
    """A list in which a check notes what a rank's forward has: the automatic way, which looks for such, is not told."""
    return UserList[Any]()


def everybody() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def mine(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's slice of a global batch."""
    return tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def mean(value: float) -> float:
    """Over the ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def everyone(value: Any) -> list[Any]:
    """What each rank says."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def local_bytes(tensors: Sequence[Tensor]) -> int:
    """What this rank holds of them."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], within: float = CLOSE) -> None:
    """Two state dicts; the first may be sharded."""
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(whole, theirs[name], atol=within, rtol=within, msg=partial("{}: {}".format, name))


def refusal(call: Callable[[], object]) -> str:
    """The message and hint with which ``call`` refuses."""
    try:
        call()
    except StrategyError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def failure(call: Callable[[], object]) -> Exception:
    """What ``call`` raises, of whatever kind."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@contextmanager
def counted_calls(*names: str) -> Iterator[dict[str, int]]:
    """How often collectives of ``torch.distributed`` are called by their names in Python."""
    counts = dict.fromkeys(names, 0)
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextmanager
def compiled_graphs() -> Iterator[list[list[str]]]:
    """What is compiled: the calls of each graph by their names. Nothing is generated of them, which takes a minute."""
    graphs: list[list[str]] = []
    original: Any = torch.compile

    def backend(graph: Any, _inputs: object) -> Any:
        calls = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
        graphs.append([call if isinstance(call, str) else call.__name__ for call in calls])
        return graph.forward

    torch.compile = partial(original, backend=backend)
    torch.compiler.reset()
    try:
        yield graphs
    finally:
        torch.compile = original


def hooks_of(model: nn.Module) -> int:
    """Hooks of all kinds on all modules."""
    return sum(
        len(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks") and isinstance(value, dict)
    )
