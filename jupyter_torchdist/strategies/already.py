"""Whether user code distributes its training by itself. In that case the strategy does not change it."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
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
    "transformers.trainer_seq2seq",
    "trl",
)
TRAINERS = frozenset({"Trainer", "Seq2SeqTrainer"})
"""Trainer classes of transformers; transformers itself is not a distributed library."""
NAMES = frozenset(
    {
        *("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "DistributedSampler"),
        *("init_process_group", "init_device_mesh", "ZeroRedundancyOptimizer", "Accelerator", "all_reduce"),
    }
)


COLLECTIVES = frozenset(
    {
        *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
        *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast_object_list"),
        *("all_gather_object", "gather_object", "scatter_object_list", "barrier", "reduce_mean", "save"),
    }
)

US = "jupyter_torchdist"
_WRAPPER = "torch.nn.parallel.data_parallel"


def reason_to_leave(code: CodeType, names: Mapping[str, Any]) -> str | None:
    """Why the automatic way does not distribute user code, as a message; None when it does."""
    if calls_prepare(code, names):
        return "td.prepare is called, and --strategy acts through it"
    found = distributed_by(code, names)
    return None if found is None else f"the code is distributed already ({found}), so --strategy does not change it"


def speaks_of_collectives(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether user code names a collective of torch.distributed or of this package."""
    return any(not COLLECTIVES.isdisjoint(block.co_names) for block in _codes(code, names))


def calls_prepare(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether the code mentions ``td.prepare``, also under another name."""
    for block in _codes(code, names):
        spoken = block.co_names
        if US in spoken and "prepare" in spoken:  # imported here
            return True
        values = [names.get(name) for name in spoken]
        if "prepare" in spoken and any(isinstance(one, ModuleType) and one.__name__ == US for one in values):
            return True
        if any(isinstance(one, FunctionType) and one.__module__ == f"{US}.strategies.explicit" for one in values):
            return any(getattr(one, "__name__", "") == "prepare" for one in values)
    return False


def reached_by(function: Callable[..., Any]) -> tuple[CodeType, dict[str, Any]] | None:
    """The code of a function and the names that it uses, also through functions and classes of its own module.

    None for a callable that has no code in Python.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        function = vars(type(function)).get("__call__", function)  # an object that is callable
    if not isinstance(function, FunctionType):
        return None
    names: dict[str, Any] = dict(inspect.getclosurevars(function).nonlocals)
    pending = [function.__code__, *_codes_of_all(names.values())]
    while pending:
        for block in _nested(pending.pop()):
            for name in block.co_names:
                if name in function.__globals__ and name not in names:
                    names[name] = value = function.__globals__[name]
                    if getattr(value, "__module__", None) == function.__module__:
                        pending += _codes_of_all([value])
    return function.__code__, names


def _codes_of_all(values: Any) -> list[CodeType]:
    found: list[CodeType] = []
    for value in values:
        members = vars(value).values() if isinstance(value, type) else [value]
        found += [member.__code__ for member in members if isinstance(member, FunctionType)]
    return found


def distributed_by(code: CodeType, names: Mapping[str, Any]) -> str | None:
    """The first name of a distributed library that ``code``, or a function or class in ``names``, uses."""
    blocks = list(_codes(code, names))
    own = {block.co_name for block in blocks}  # the cell may define its own class Trainer
    for block in blocks:
        spoken = (NAMES | TRAINERS if "transformers" in block.co_names else NAMES) - own
        imported = {one.argval for one in dis.get_instructions(block) if one.opname == "IMPORT_NAME"}
        for name in block.co_names:
            if name in spoken or (name in imported and _is_of_a_package(name) and not _imports_wrapper(name, block)):
                return name
    for name, value in names.items():
        if any(_is_of_a_package(home) for home in _homes(value)):
            return name
    return None


def _homes(value: object) -> Iterator[object]:
    """The names of the modules that define a value; for a class, and for an object such as a ``Trainer``, also the
    modules of the base classes. A model may be a ``LightningModule`` in a loop for one device."""
    if isinstance(value, ModuleType):
        yield value.__name__
    elif isinstance(value, type) or not callable(value):
        kind = value if isinstance(value, type) else type(value)
        yield from (getattr(base, "__module__", None) for base in kind.__mro__)
    else:
        yield getattr(value, "__module__", None)


def _is_of_a_package(module: object) -> bool:
    """``transformers.trainer_utils``, which defines ``set_seed``, is not part of ``transformers.trainer``."""
    return (
        isinstance(module, str)
        and module != _WRAPPER
        and any(module == one or module.startswith(f"{one}.") for one in PACKAGES)
    )


def _imports_wrapper(module: str, block: CodeType) -> bool:
    """Whether ``torch.nn.parallel`` is imported for ``DataParallel``, in whose place the strategy works."""
    return module == "torch.nn.parallel" and "DataParallel" in block.co_names


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
