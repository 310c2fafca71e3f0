"""Whether user code is distributed by itself; then a strategy leaves it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

PACKAGES = (
    "torch.distributed",
    "torch.nn.parallel",
    "accelerate",
    "deepspeed",
    "lightning",
    "pytorch_lightning",
    "ray.train",
    "transformers.trainer",
)
NAMES = frozenset(
    {
        *("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "fully_shard", "DistributedSampler"),
        *("init_process_group", "init_device_mesh", "ZeroRedundancyOptimizer", "Accelerator", "all_reduce"),
    }
)


def distributed_by(code: CodeType, names: Mapping[str, Any]) -> str | None:
    """The first thing of a distributed library that ``code``, or a function or class of ``names``, speaks of."""
    for block in _codes(code, names):
        for name in block.co_names:
            if name in NAMES or name.startswith(PACKAGES):
                return name
    for name, value in names.items():
        home = getattr(value, "__module__", None) if callable(value) else getattr(value, "__name__", None)
        if isinstance(home, str) and home.startswith(PACKAGES):
            return name
    return None


def _codes(code: CodeType, names: Mapping[str, Any]) -> Iterator[CodeType]:
    yield from _nested(code)
    for value in names.values():
        if isinstance(value, FunctionType):
            yield from _nested(value.__code__)
        elif isinstance(value, type) and value.__module__ == "__main__":
            for member in vars(value).values():
                if isinstance(member, FunctionType):
                    yield from _nested(member.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
