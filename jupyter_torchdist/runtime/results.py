"""What a rank leaves behind: values of the names the cell bound or changed, or its exception."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from .. import marshal
from ..protocol.bundle import Manifest
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from .eventfile import EventFile
from .execution import CALL, VALUE

_OWN = (CALL, "__builtins__")


class Results:
    """The values of one rank, published at most once."""

    def __init__(
        self, rank: int, plan: Plan, manifest: Manifest, loaded: marshal.Loaded, paths: JobPaths, events: EventFile
    ) -> None:
        self._rank, self._plan, self._manifest = rank, plan, manifest
        self._loaded, self._paths, self._events = loaded, paths, events

    def publish(self, names: dict[str, Any]) -> None:
        """Write the values that are asked for out of ``names``, and tell which came and which stay."""
        if self._rank != 0 and self._plan.collect != "all":
            return
        values = {name: names[name] for name in self._wanted(names) if name in names}
        dumped = marshal.dump_results(values, self._loaded, self._paths, self._rank)
        left = [list(item) for item in dumped.left]
        self._events.write("rank.result", names=list(dumped.names), left=left, size=dumped.size)

    def _wanted(self, names: dict[str, Any]) -> list[str]:
        out = self._plan.out
        if out == ("none",):
            wanted: list[str] = []
        elif out == ("auto",):
            wanted = [*self._manifest.bound, *marshal.changed_names(self._loaded, names)]
        else:
            wanted = list(out)
        shown = [VALUE] if names.get(VALUE) is not None else []
        return [name for name in dict.fromkeys([*wanted, *shown]) if name not in _OWN]

    def dump_error(self, error: BaseException) -> None:
        """The exception itself, for the notebook to raise. Never raises: its words are there already."""
        try:
            marshal.dump_exception(error, self._loaded, self._paths.error(self._rank))
        except Exception:  # noqa: BLE001  # the user's __reduce__
            print("the exception could not be pickled; the notebook raises one like it:", file=sys.stderr)
            traceback.print_exc()
