"""The job's state and its events, from its summary or its journal."""

from __future__ import annotations

from typing import Any

from ..protocol.events import Event
from ..protocol.paths import JobPaths
from ..protocol.state import JobState, fold
from ..store import journal


class States:
    """``state`` is the job's state after all events returned so far. Raises ``JobNotFound``, ``StoreError``."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self.state: JobState
        self.state, self._offset = journal.advanced(paths, journal.asked_for(paths), 0)
        if not self.state.final:
            self._end()

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """New events as JSON, and whether to send the whole state again: the job ended, but its journal lacks that."""
        if self.state.final:
            return [], False
        events = self._read()
        if events:
            return [to_json(event) for event in events], False
        return [], self._end()

    def _read(self) -> list[Event]:
        events, self._offset = journal.read(self._paths, self._offset)
        self.state = fold(events, self.state)
        return events

    def _end(self) -> bool:
        """Use the summary, if there is one. Returns whether the job has ended."""
        if not self._paths.summary.exists():
            return False
        self.state = journal.state(self._paths)
        return self.state.final


def to_json(event: Event) -> dict[str, Any]:
    """An event as JSON, as in the journal. Unknown kinds are included."""
    words = {"seq": event.seq, "t": event.t, "node": event.node, "rank": event.rank, "kind": event.kind}
    return {**words, **event.data}
