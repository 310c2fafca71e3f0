"""Notes after each cell what it did to modules, before files change and for the next capture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_ROOM = "jupyter_torchdist.capture"


def install(ip: InteractiveShell) -> Callable[[], None]:
    """Call ``note`` after every cell. Returns a function that ends this."""

    def after_cell(_result: Any = None) -> None:
        if _ROOM in sys.modules:  # ``warm`` imports it and then calls ``note``
            note(ip)

    ip.events.register("post_run_cell", after_cell)
    return lambda: ip.events.unregister("post_run_cell", after_cell)


def note(ip: InteractiveShell) -> None:
    """Note the sources of modules that were imported or reloaded, and the attributes that cells set."""
    importlib.import_module(f"{_ROOM}.sources").note(_reloads(ip))
    importlib.import_module(f"{_ROOM}.attributes").note(ip.user_ns)


def _reloads(ip: InteractiveShell) -> dict[str, float]:
    """{module: mtime of the file} as ``%autoreload`` recorded it."""
    magics: Any = ip.magics_manager.registry.get("AutoreloadMagics")
    times = getattr(getattr(magics, "_reloader", None), "modules_mtimes", None)
    return times if isinstance(times, dict) else {}
