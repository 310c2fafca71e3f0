"""Rich output of rank 0 (tables, figures, ``clear_output``), published in the notebook in its original order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..protocol import codec
from ..protocol.disk import open_plain
from ..protocol.paths import JobPaths
from ..protocol.state import JobState

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

CHUNK = 32 * 1024 * 1024


class RichOutput:
    """Reads rank 0's display file as it grows. ``result`` is the record of the last line's value, once it exists."""

    def __init__(self, ip: InteractiveShell, paths: JobPaths, visible: bool = True) -> None:
        self._publisher: Any = ip.display_pub
        self._paths = paths
        self._visible = visible
        self._file = ""
        self._offset = 0
        self.result: dict[str, Any] | None = None

    def tick(self, state: JobState) -> bool:
        """Publish new records. Returns True if one of them cleared the cell's output."""
        cleared = False
        for record in self._read(state):
            kind = record.get("kind")
            if kind == "result":
                self.result = record
            elif self._visible and kind == "clear":
                self._publisher.clear_output(wait=bool(record.get("wait")))
                cleared = True
            elif self._visible and kind in ("display", "update"):
                self._publish(record, kind == "update")
        return cleared

    def publish_result(self) -> None:
        """Publish the last line's value as rank 0 rendered it, for a value that cannot be pickled."""
        if self.result:
            self._publish(self.result, False)

    def _publish(self, record: dict[str, Any], update: bool) -> None:
        name = record.get("id")
        # The rank's display ids are unique in the job only: another job may use the same ids.
        transient = {"display_id": f"{self._paths.job}-{name}"} if name else {}
        self._publisher.publish(
            record.get("data", {}), record.get("metadata", {}), transient=transient, update=update and bool(name)
        )

    def _read(self, state: JobState) -> list[dict[str, Any]]:
        if not self._file:
            if not (first := state.ranks.get(0)) or not first.node:
                return []
            self._file = str(self._paths.node(first.node).display(0))
        try:
            if os.stat(self._file).st_size <= self._offset:  # called often, so it must be cheap
                return []
            with open_plain(self._file) as file:
                file.seek(self._offset)
                data = file.read(CHUNK)
                if len(data) == CHUNK:
                    data += file.readline()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [record for line in data[:end].splitlines() if isinstance(record := _loads(line), dict)]


def _loads(line: bytes) -> Any:
    try:
        return codec.loads(line)
    except ValueError:
        return None
