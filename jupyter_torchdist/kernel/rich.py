"""Rich output of rank 0 (tables, figures, ``clear_output``), published in the notebook in its original order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..protocol.paths import JobPaths
from ..protocol.state import JobState
from ..store.displays import Displayed, DisplayFile

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class RichOutput:
    """Reads rank 0's display file as it grows. ``result`` is the record of the last line's value, once it exists."""

    def __init__(self, ip: InteractiveShell, paths: JobPaths, visible: bool = True) -> None:
        self._publisher: Any = ip.display_pub
        self._paths = paths
        self._visible = visible
        self._file: DisplayFile | None = None
        self.result: Displayed | None = None

    def tick(self, state: JobState) -> bool:
        """Publish new records. Returns True if one of them cleared the cell's output."""
        cleared = False
        if (file := self._grown(state)) is None:
            return cleared
        for record in file.read():
            if record.kind == "result":
                self.result = record
            elif self._visible and record.kind == "clear":
                self._publisher.clear_output(wait=record.wait)
                cleared = True
            elif self._visible:
                self._publish(record)
        return cleared

    def publish_result(self) -> None:
        """Publish the last line's value as rank 0 rendered it, for a value that cannot be pickled."""
        if self.result:
            self._publish(self.result)

    def _publish(self, record: Displayed) -> None:
        # With the rank's own id, other cells reach the output, and the rank reaches outputs of other cells.
        transient = {"display_id": record.id} if record.id else {}
        update = record.kind == "update" and bool(record.id)
        self._publisher.publish(record.data, record.metadata, transient=transient, update=update)

    def _grown(self, state: JobState) -> DisplayFile | None:
        """The file, if it has more than was read. Called often, so it must be cheap."""
        if self._file is None:
            if not (first := state.ranks.get(0)) or not first.node:
                return None
            self._file = DisplayFile(self._paths.node(first.node).display(0))
        try:
            return self._file if os.stat(self._file.path).st_size > self._file.offset else None
        except OSError:
            return None
