"""``%load_ext`` and ``%unload_ext``: the magics, their completion, and a driver zygote for a fast first cell."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import completer, failure, inspector, modules
from .magic import TorchDistMagics, with_body

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_loaded: dict[int, Callable[[], None]] = {}
"""Shell (by id: a process has one, but tests make several) -> the function that undoes the load."""


def load(ip: InteractiveShell) -> None:
    """Register everything once; a second call does nothing."""
    if sys.platform == "win32":
        print("jupyter_torchdist needs Linux or macOS; on Windows run Jupyter in WSL 2: `wsl --install`, then there")
        return
    if id(ip) in _loaded:
        return
    ip.register_magics(TorchDistMagics)
    ip.input_transformers_cleanup.append(with_body)
    undo = [failure.install(ip), completer.install(ip), inspector.install(ip), modules.install(ip)]
    undo.append(_when_idle(lambda: warm(ip)))

    def unload_all() -> None:
        for action in undo:
            action()
        with contextlib.suppress(ValueError):
            ip.input_transformers_cleanup.remove(with_body)
        _forget(ip.magics_manager.magics)
        _drivers().pool().close()

    _loaded[id(ip)] = unload_all


def unload(ip: InteractiveShell) -> None:
    """Undo ``load``; jobs continue."""
    if undo := _loaded.pop(id(ip), None):
        undo()


def warm(ip: InteractiveShell) -> None:
    """Start the driver zygote, and import what a cell needs."""
    from ..protocol.errors import TorchDistError

    with contextlib.suppress(TorchDistError):  # the first cell tries again, or reports the error
        _drivers().pool().warm()
    importlib.import_module("jupyter_torchdist.kernel.run")
    modules.note(ip)
    importlib.import_module("jupyter_torchdist.kernel.show").ready(ip)


def _when_idle(action: Callable[[], None]) -> Callable[[], None]:
    """Run ``action`` when the kernel's event loop is free, or now in a terminal. Returns a function that cancels it.

    It does not run in a thread: another thread could see a partly imported module.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        action()
        return lambda: None
    return loop.call_later(0.001, action).cancel


def _drivers() -> Any:
    return importlib.import_module("jupyter_torchdist.client.drivers")


def _forget(magics: dict[str, dict[str, Any]]) -> None:
    magics["cell"].pop("distribute", None)
    magics["line"].pop("dist", None)
