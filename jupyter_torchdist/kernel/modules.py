"""What the notebook's cells leave in modules: noted after each of them, as files change and kernels do not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_SOURCES = "jupyter_torchdist.capture.sources"


def install(ip: InteractiveShell) -> Callable[[], None]:
    """Note after every cell; what is returned ends that."""

    def after_cell(_result: Any = None) -> None:
        if _SOURCES in sys.modules:  # until ``warm`` has imported it, nothing is late
            note(ip)

    ip.events.register("post_run_cell", after_cell)
    return lambda: ip.events.unregister("post_run_cell", after_cell)


def note(ip: InteractiveShell) -> None:
    """The sources of modules that were imported or reloaded."""
    importlib.import_module(_SOURCES).note(_reloads(ip))


def _reloads(ip: InteractiveShell) -> dict[str, float]:
    """{module: mtime of the file} as ``%autoreload`` has it."""
    magics: Any = ip.magics_manager.registry.get("AutoreloadMagics")
    times = getattr(getattr(magics, "_reloader", None), "modules_mtimes", None)
    return times if isinstance(times, dict) else {}
