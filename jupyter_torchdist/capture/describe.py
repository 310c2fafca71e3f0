"""One captured object in words, for the receipt."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Sized
from typing import Any

from ..marshal import byvalue
from ..marshal.attributes import Absent


def describe(value: Any) -> tuple[str, str]:
    """The kind and a description, for example ``("tensor", "Tensor float32 (60000, 784)")``."""
    if value is Absent:
        return "data", "deleted"
    if isinstance(value, types.ModuleType):
        return "module", f"{value.__name__} {'with its values' if byvalue.travels(value) else 'as import'}"
    if isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        return "class", f"class {value.__qualname__}({bases})" if bases else f"class {value.__qualname__}"
    if isinstance(value, types.FunctionType):
        return "function", f"function {value.__qualname__}{_signature(value)}"
    for library, words in (("torch", _torch), ("numpy", _numpy), ("pandas", _pandas)):
        found = words(value, sys.modules[library]) if library in sys.modules else None
        if found is not None:
            return found
    if callable(value) and not hasattr(type(value), "__dict__"):
        return "function", f"{type(value).__name__} {getattr(value, '__qualname__', '')}".strip()
    return "data", _data(value)


def _signature(function: types.FunctionType) -> str:
    try:
        names = list(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return "(…)"
    return f"({', '.join(names)})" if len(names) <= 6 else f"({', '.join(names[:6])}, …)"


def _torch(value: Any, torch: Any) -> tuple[str, str] | None:
    if not hasattr(torch, "nn"):
        return None
    if isinstance(value, torch.Tensor):
        return "tensor", f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {_shape(value)}"
    if isinstance(value, torch.nn.Module):
        count = sum(item.numel() for item in value.parameters() if not _uninitialised(item, torch))
        return "model", f"{type(value).__name__} with {count:,} parameters"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer", f"{type(value).__name__} over {sum(len(g['params']) for g in value.param_groups)} tensors"
    return None


def _shape(tensor: Any) -> str:
    try:
        return str(tuple(tensor.shape))
    except RuntimeError:  # a nested tensor has none, an uninitialised one not yet
        return "without a shape"


def _uninitialised(value: Any, torch: Any) -> bool:
    return bool(torch.nn.parameter.is_lazy(value))


def _numpy(value: Any, numpy: Any) -> tuple[str, str] | None:
    if hasattr(numpy, "ndarray") and isinstance(value, numpy.ndarray):
        return "array", f"{type(value).__name__} {value.dtype} {value.shape}"
    return None


def _pandas(value: Any, pandas: Any) -> tuple[str, str] | None:
    if hasattr(pandas, "DataFrame") and isinstance(value, pandas.DataFrame):
        return "data", f"DataFrame {len(value):,} rows x {len(value.columns)} columns"
    return None


def _data(value: Any) -> str:
    name = type(value).__qualname__
    if isinstance(value, (bool, int, float, complex, type(None))):
        text = repr(value)
        return f"{name} {text}" if len(text) <= 40 else name
    if isinstance(value, (str, bytes)):
        return f"{name} of {len(value):,}"
    if isinstance(value, Sized):
        try:
            return f"{name} of {len(value):,}"
        except Exception:  # noqa: BLE001  # the user's own __len__ may raise anything
            return name
    return name


def human(size: int) -> str:
    """A size in bytes with a readable unit: ``1.5 GB``."""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
