"""Where a rank is: ``Cell In[3], line 6, in DataLoader``; the source of that line."""

from __future__ import annotations

import re

from ..protocol.events import Evidence
from ..protocol.spec import JobSpec

_PLACE = re.compile(r"(?P<file>.+?), line (?P<line>\d+)(?:, in (?P<what>.*))?")


def parts(place: str) -> tuple[str, int, str]:
    """File, line (0: unknown) and what the line called."""
    found = _PLACE.match(place.partition("; its worker")[0])
    return (found["file"], int(found["line"]), found["what"] or "") if found else ("", 0, "")


def line(spec: JobSpec, place: str) -> Evidence | None:
    """The line of the job's own source; None for another file."""
    file, number, _ = parts(place)
    lines = spec.source.split("\n")
    at = number - spec.first_line
    if file != spec.label or not 0 <= at < len(lines) or not lines[at].strip():
        return None
    return Evidence(file, number, lines[at].strip())
