"""Rich output of a rank: JSON lines ``{"t", "kind", "data", "metadata", "id"}`` in its display file.

``kind`` is ``display``, ``update`` (of an earlier ``id``), ``clear`` (with ``wait``) or ``result`` (the value
of the last line). The functions have the signatures of ``IPython.display`` but do not need IPython.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from ...protocol import codec
from .mimebundle import mimebundle


class Display:
    """The display file of one rank."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._shown: set[int] = set()

    def publish(self, value: Any, kind: str = "display", ident: str | None = None) -> None:
        """Show ``value`` in its current state."""
        data, metadata = mimebundle(value)
        self.write(kind, data, metadata, ident)
        if kind == "result":
            self._shown.add(id(value))

    def write(self, kind: str, data: dict[str, Any], metadata: dict[str, Any], ident: str | None = None) -> None:
        """Write one line. Values that are not JSON are left out. On a full disk the output is lost; the job goes on."""
        record = {"t": time.time(), "kind": kind, "data": _with_json(data), "metadata": _with_json(metadata)}
        self._append({**record, "id": ident})

    def clear(self, wait: bool = False) -> None:
        self._append({"t": time.time(), "kind": "clear", "wait": bool(wait)})

    def figures(self) -> None:
        """Show matplotlib's open figures and close them, as at the end of a cell."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            if id(figure) not in self._shown:
                self.publish(figure)
        pyplot.close("all")

    def _append(self, record: dict[str, Any]) -> None:
        line = (codec.dumps(record) + "\n").encode("ascii")
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError:
            return


def _with_json(values: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        try:
            codec.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        kept[name] = value
    return kept


class DisplayHandle:
    """Returned by ``display(..., display_id=True)``: an output whose content can be replaced."""

    def __init__(self, publisher: Display, display_id: str) -> None:
        self._publisher = publisher
        self.display_id = display_id

    def display(self, value: Any, **_: Any) -> None:
        self._publisher.publish(value, "display", self.display_id)

    def update(self, value: Any, **_: Any) -> None:
        self._publisher.publish(value, "update", self.display_id)


class Frontend:
    """``display``, ``update_display`` and ``clear_output``, which write to a display file."""

    def __init__(self, publisher: Display) -> None:
        self._publisher = publisher

    def display(
        self, *values: Any, raw: bool = False, display_id: str | bool | None = None, **options: Any
    ) -> DisplayHandle | None:
        """Like ``IPython.display.display``; ``raw`` values are MIME bundles."""
        ident = uuid.uuid4().hex if display_id is True else (display_id or None)
        for value in values:
            if raw:
                self._publisher.write("display", value, options.get("metadata") or {}, ident)
            else:
                self._publisher.publish(value, "display", ident)
        return DisplayHandle(self._publisher, ident) if ident else None

    def update_display(self, value: Any, *, display_id: str, **_: Any) -> None:
        self._publisher.publish(value, "update", display_id)

    def clear_output(self, wait: bool = False) -> None:
        self._publisher.clear(wait)
