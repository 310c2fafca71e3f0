"""``%load_ext`` and ``%unload_ext``: the magics, their completion, a spare driver for a warm first cell."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_loaded: dict[int, Callable[[], None]] = {}
"""Shell (by id: one a process, but tests make several) -> what undoes the load."""


def load(ip: InteractiveShell) -> None:
    """Register everything once; a second call does nothing."""
    if sys.platform == "win32":
        print("jupyter_torchdist needs Linux or macOS; on Windows run Jupyter in WSL 2: `wsl --install`, then there")
        return
    if id(ip) in _loaded:
        return
    from ..client.drivers import pool
    from ..protocol.errors import TorchDistError
    from . import completer, failure
    from .magic import TorchDistMagics, with_body

    ip.register_magics(TorchDistMagics)
    ip.input_transformers_cleanup.append(with_body)
    undo = [failure.install(ip), completer.install(ip)]

    def unload_all() -> None:
        for action in undo:
            action()
        with contextlib.suppress(ValueError):
            ip.input_transformers_cleanup.remove(with_body)
        _forget(ip.magics_manager.magics)
        pool().close()

    _loaded[id(ip)] = unload_all
    try:
        pool().warm()
    except TorchDistError as error:
        # The extension is of use without a spare: the first cell starts its own driver, or says why it cannot.
        print(f"no warm start: {error}", file=sys.stderr)


def unload(ip: InteractiveShell) -> None:
    """Take everything back; jobs go on."""
    if undo := _loaded.pop(id(ip), None):
        undo()


def _forget(magics: dict[str, dict[str, Any]]) -> None:
    magics["cell"].pop("distribute", None)
    magics["line"].pop("dist", None)
