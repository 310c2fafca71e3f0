"""Objects of the standard library and of torch that hold something of their process which they can do without."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import inspect
import io
import os
import struct
import sys
import types
from typing import Any

FILES: tuple[Any, ...] = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
"""What ``open`` returns."""

_MANAGER: Any = contextlib._GeneratorContextManager


def reduce(value: Any) -> Any:
    """The reduction of one of these objects, or None."""
    if isinstance(value, _MANAGER):
        return _manager(value)
    if isinstance(value, (argparse.Action, argparse._ActionsContainer)):
        return _of_argparse(value)
    if isinstance(value, FILES) and value.closed:
        return _closed_file(value)
    if isinstance(value, types.MappingProxyType):
        return _proxy_of_mapping(value)
    if isinstance(value, struct.Struct):
        return struct.Struct, (value.format,)
    if _is_block(type(value)):
        return _block(value) if _copies_on_write() else None
    return _loader(value) if _is_loader(type(value)) else None


def concerns(kind: type) -> bool:
    """Whether objects of the type may be of these."""
    if kind in (*FILES, types.MappingProxyType, struct.Struct) or _is_loader(kind) or _is_block(kind):
        return True
    return issubclass(kind, (_MANAGER, argparse.Action, argparse._ActionsContainer))


def _closed_file(value: Any) -> Any:
    name, mode = getattr(value, "name", None), str(getattr(value, "mode", "r"))
    return closed_file, (name, mode, getattr(value, "encoding", None))


def closed_file(name: Any, mode: str, encoding: str | None) -> Any:
    """A closed file with the name and the mode of another: ``with open(…) as file`` leaves one."""
    made: Any
    with open(os.devnull, mode.replace("x", "w"), encoding=encoding) as made:
        binary = getattr(made, "buffer", made)
        getattr(binary, "raw", binary).name = name
    return made


def _manager(value: Any) -> Any:
    """A context manager that has not begun, such as the one that decorates a function, is made anew."""
    if not inspect.isgenerator(value.gen) or inspect.getgeneratorstate(value.gen) != inspect.GEN_CREATED:
        return None
    return type(value), (value.func, value.args, value.kwds)


def _of_argparse(value: Any) -> Any:
    """``argparse`` compares with ``SUPPRESS`` by identity."""
    build, arguments, state = value.__reduce_ex__(5)[:3]
    if not isinstance(state, dict):
        return None
    suppressed = [name for name, item in state.items() if item is argparse.SUPPRESS]
    return build, arguments, (state, suppressed), None, None, set_suppressed


def set_suppressed(target: Any, state: tuple[dict[str, Any], list[str]]) -> None:
    target.__dict__.update(state[0])
    target.__dict__.update(dict.fromkeys(state[1], argparse.SUPPRESS))


def _proxy_of_mapping(value: Any) -> Any:
    """A read-only view shows later changes of its mapping."""
    if value is _NO_METADATA:
        return getattr, (dataclasses, "_EMPTY_METADATA")
    return types.MappingProxyType, (gc.get_referents(value)[0],)


_NO_METADATA = getattr(dataclasses, "_EMPTY_METADATA", None)
"""Of all fields of dataclasses without metadata."""


def _is_block(kind: type) -> bool:
    internals = sys.modules.get("pandas.core.internals")
    return internals is not None and issubclass(kind, (internals.blocks.Block, internals.SingleBlockManager))


def _copies_on_write() -> bool:
    pandas = sys.modules["pandas"]
    return int(pandas.__version__.partition(".")[0]) >= 3 or pandas.options.mode.copy_on_write is True


def _block(value: Any) -> Any:
    """A part of a data frame, or what holds that of a series, with values of its own.

    pandas copies what two frames share when one of them is written to. Neither a rank nor the notebook could know that
    they share it.
    """
    if not hasattr(value, "values"):
        return type(value), (value.blocks[0], value.axes[0])
    build, (values, *rest) = value.__reduce__()
    return build, (values.view() if hasattr(values, "__array_interface__") else values.copy(), *rest)


def _is_loader(kind: type) -> bool:
    loader = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    return loader is not None and issubclass(kind, loader)


def _loader(value: Any) -> Any:
    """A loader keeps its iterator where its workers are persistent; without it, it starts workers again."""
    if vars(value).get("_iterator") is None:
        return None
    build, arguments, state, *rest = value.__reduce_ex__(5)
    if not isinstance(state, dict) or "_iterator" not in state:
        return None
    return build, arguments, {**state, "_iterator": None}, *rest
