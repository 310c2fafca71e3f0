"""Settings of torch for the complete process: default dtype and device, grad mode, flags of its backends…

The number of threads does not travel: the launcher gives each rank its part of the processors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .base import Adapter, Place, State, each


def _torch() -> Any:
    return sys.modules["torch"]


def _default_device() -> str:
    """The device type only, because each rank has its own GPU. Read without a tensor, which would initialize CUDA."""
    from ..torch_private.settings import default_device

    current = default_device()
    return "cpu" if current is None else current.type


def _set_default_device(kind: str, place: Place) -> None:
    torch = _torch()
    if kind == "cuda" and place.rank is not None:
        kind = place.device
    elif kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("the default device is cuda, and there is none here")
    torch.set_default_device(None if kind == "cpu" else kind)


def _deterministic() -> tuple[bool, bool]:
    torch = _torch()
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _torch().use_deterministic_algorithms(value[0], warn_only=value[1])


_PRINTED = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")


def _print_options() -> dict[str, Any]:
    from ..torch_private.settings import print_options

    options = print_options()
    return {name: getattr(options, name) for name in _PRINTED}


def _set_print_options(value: dict[str, Any]) -> None:
    from ..torch_private.settings import print_options

    _torch().set_printoptions(**value)
    print_options().sci_mode = value["sci_mode"]  # set_printoptions ignores None


def _anomaly() -> tuple[bool, bool]:
    return _torch().is_anomaly_enabled(), _torch().is_anomaly_check_nan_enabled()


def _set_anomaly(value: tuple[bool, bool]) -> None:
    _torch().autograd.set_detect_anomaly(*value)


Setting = tuple[Callable[[], Any], Callable[[Any], Any], Any]
"""Functions that read and set a setting, and its value in a fresh process."""


def _function(reader: str, writer: str, usual: Any, *arguments: Any) -> Setting:
    return (
        lambda: getattr(_torch(), reader)(*arguments),
        lambda value: getattr(_torch(), writer)(*arguments, value),
        usual,
    )


def _dtype(reader: str, writer: str, usual: str, *arguments: Any) -> Setting:
    """A setting whose value is a dtype, by name."""
    return (
        lambda: str(getattr(_torch(), reader)(*arguments)).removeprefix("torch."),
        lambda value: getattr(_torch(), writer)(*arguments, getattr(_torch(), value)),
        usual,
    )


def _flag(path: str, usual: Any) -> Setting:
    """An attribute below ``torch.backends``."""
    owner, _, name = path.rpartition(".")

    def place() -> Any:
        return functools.reduce(getattr, owner.split("."), _torch().backends)

    return lambda: getattr(place(), name), lambda value: setattr(place(), name, value), usual


def _attention(kind: str) -> Setting:
    """Whether an implementation of attention may be used."""

    def set_it(on: bool) -> None:
        getattr(_torch().backends.cuda, f"enable_{kind}_sdp")(on)

    def get_it() -> Any:
        return getattr(_torch().backends.cuda, f"{kind}_sdp_enabled")()

    return get_it, set_it, True


_FLAGS: dict[str, Any] = {
    "cudnn.enabled": True,
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
    "cudnn.allow_tf32": True,
    "cuda.matmul.allow_tf32": False,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "cuda.matmul.allow_fp16_accumulation": False,
    "mkldnn.enabled": True,
    "mkldnn.deterministic": False,
    # Newer names for allow_tf32. They come later, because torch refuses to read a mixture of old and new settings.
    "cuda.matmul.fp32_precision": "none",
    "cudnn.fp32_precision": "none",
    "mkldnn.fp32_precision": "none",
    "mkldnn.matmul.fp32_precision": "none",
}

_SETTINGS: dict[str, Setting] = {
    "default dtype": _dtype("get_default_dtype", "set_default_dtype", "float32"),
    "autocast dtype on cpu": _dtype("get_autocast_dtype", "set_autocast_dtype", "bfloat16", "cpu"),
    "autocast dtype on cuda": _dtype("get_autocast_dtype", "set_autocast_dtype", "float16", "cuda"),
    "grad mode": _function("is_grad_enabled", "set_grad_enabled", True),
    "deterministic algorithms": (_deterministic, _set_deterministic, (False, False)),
    "anomaly detection": (_anomaly, _set_anomaly, (False, True)),
    "print options": (_print_options, _set_print_options, dict(zip(_PRINTED, (4, 1000, 3, 80, None), strict=True))),
    "float32 matmul precision": _function("get_float32_matmul_precision", "set_float32_matmul_precision", "highest"),
    "warn always": _function("is_warn_always_enabled", "set_warn_always", False),
    **{path: _flag(path, usual) for path, usual in _FLAGS.items()},
    **{f"{kind} attention": _attention(kind) for kind in ("flash", "mem_efficient", "math", "cudnn")},
}


def read(place: Place) -> State:
    """All settings that this torch has."""
    state: State = {"default device": _default_device()}
    for key, (get, _, _) in _SETTINGS.items():
        try:
            state[key] = get()
        except (AttributeError, RuntimeError):  # missing in this release, or old and new settings contradict
            continue
    return state


def write(state: State, place: Place) -> None:
    each(state, lambda key, value: _set_default_device(value, place) if key == "default device" else _set(key, value))


def _set(key: str, value: Any) -> None:
    _SETTINGS[key][1](value)


def words(state: State) -> str:
    """``default dtype float64, print options``."""
    return ", ".join(f"{key} {value}" if isinstance(value, (str, bool)) else key for key, value in state.items())


USUAL = {"default device": "cpu", **{key: usual for key, (_, _, usual) in _SETTINGS.items()}}

ADAPTER = Adapter("torch settings", "torch", read, write, USUAL, words)
