"""Rich output of a rank: JSON lines ``{"t", "kind", "number", "id", "data", "metadata"}`` in its display file.

``kind`` is ``display``, ``update`` (of an earlier ``id``), ``clear`` (with ``wait``) or ``result`` (the value of the
last line). Displays are numbered from 1; an update has the number of what it replaces. In the rank's output a line
stands for each: ``[display 3: image/png] Figure(640x480)``. The functions have the signatures of ``IPython.display``
but do not need IPython.
"""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...marshal import rebuild
from ...protocol import codec
from ...protocol.feed import DISPLAY_LIMIT
from .mimebundle import TEXT_LIMIT, mimebundle, shows_itself

PLAIN = "text/plain"

ALL_LIMIT = 1024 * 1024 * 1024
"""The largest size of a display file in bytes. Of later displays only the plain text is written."""

SAID = 200
"""Characters of the plain text in the line that stands for a display."""

_MIME = re.compile(r"[\w.+-]+/[\w.+-]+")


class Display:
    """The display file of one rank. ``say`` writes text to the rank's output."""

    def __init__(self, path: Path, say: Callable[[str], None], limit: int = DISPLAY_LIMIT) -> None:
        """``limit``: the largest size of one record in bytes."""
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._say, self._limit = say, limit
        self._shown: set[int] = set()
        self._count = 0
        self._numbers: dict[str, int] = {}
        """By id: the number of its latest display."""
        self._torn = False
        """Whether the last line of the file has no end: the disk was full."""

    def publish(self, value: Any, kind: str = "display", ident: str | None = None) -> None:
        """Show ``value`` in its current state."""
        if kind == "display" and shows_itself(value):
            return
        data, metadata = mimebundle(value)
        self.write(kind, data, metadata, ident)
        if kind == "result":
            self._shown.add(id(value))

    def write(self, kind: str, data: dict[str, Any], metadata: dict[str, Any], ident: str | None = None) -> None:
        """Write one record, and a line to the output for a new display.

        Values that are not JSON are left out. On a full disk the display is lost; the job goes on.
        """
        number = self._number(kind, ident)
        head = {"t": time.time(), "kind": kind, "number": number, "id": ident}
        data = _with_json(data)
        line = _line(head, data, _with_json(metadata))
        if len(line) > (room := min(self._limit, ALL_LIMIT - os.fstat(self._fd).st_size)):
            data = _plain_only(data, len(line), room)
            line = _line(head, data, {})
        if self._append(line) and (kind == "display" or (kind == "result" and set(data) > {PLAIN})):
            self._say(f"[display {number}: {_richest(data)}] {_first_line(data.get(PLAIN))}".rstrip() + "\n")

    def _number(self, kind: str, ident: str | None) -> int | None:
        if kind == "update":
            return self._numbers.get(ident or "")
        self._count += 1
        if ident:
            self._numbers[ident] = self._count
        return self._count

    def clear(self, wait: bool = False) -> None:
        self._append(_line({"t": time.time(), "kind": "clear", "wait": bool(wait)}))

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

    def _append(self, line: bytes) -> bool:
        """Returns whether the whole line was written."""
        rest = b"\n" + line if self._torn else line
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            self._torn = self._torn or len(rest) < len(line)
            return False
        self._torn = False
        return True


def _line(head: dict[str, Any], *bundle: dict[str, Any]) -> bytes:
    record = {**head, **dict(zip(("data", "metadata"), bundle, strict=False))}
    return (codec.dumps(record) + "\n").encode("ascii")


def _plain_only(data: dict[str, Any], size: int, room: int) -> dict[str, Any]:
    """The plain text alone, with a remark on what is too large."""
    left = ", ".join(mime for mime in data if mime != PLAIN)
    limit = f"its {size / 1e6:.0f} MB are more than the {max(room, 0) / 1e6:.0f} MB that can be kept"
    return {PLAIN: f"{str(data.get(PLAIN, ''))[:TEXT_LIMIT]} ({left or PLAIN} left out: {limit})".lstrip()}


def _richest(data: dict[str, Any]) -> str:
    """The first MIME type that is not plain text."""
    return next((mime for mime in data if mime != PLAIN and _MIME.fullmatch(mime)), PLAIN)


def _first_line(text: Any) -> str:
    lines = text.strip().splitlines() if isinstance(text, str) else []
    return f"{lines[0][:SAID]}{'…' if len(lines) > 1 or len(lines[0]) > SAID else ''}" if lines else ""


def _with_json(values: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        try:
            codec.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        kept[str(name)] = value
    return kept


class DisplayHandle:
    """Returned by ``display(..., display_id=True)``: an output whose content can be replaced."""

    def __init__(self, publisher: Display, display_id: str) -> None:
        self._publisher = publisher
        self.display_id = display_id

    def __reduce__(self) -> Any:
        return rebuild.display_handle, (self.display_id,)

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
