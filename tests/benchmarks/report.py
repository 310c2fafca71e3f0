"""Rows of the result table, kept as JSON so that one group can be measured again without the others."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
JSON = HERE / "results.json"
TABLE = HERE / "RESULTS.md"
GROUPS = ("launch", "logs", "data", "hosts", "failure", "training", "recorder", "strategies", "checkpoints", "browser")
"""In the order of the table."""


@dataclass(frozen=True)
class Row:
    """One measured promise. ``ours`` and ``yardstick`` are medians, in ``unit``, or what ``beside`` says.

    The limit is on ours / yardstick where there is a yardstick, else on ours.
    """

    group: str
    what: str
    ours: float
    unit: str
    limit: float
    yardstick: float | None = None
    beside: str = ""
    """What the yardstick is."""
    at_least: bool = False
    samples: tuple[float, ...] = ()
    yardsticks: tuple[float, ...] = ()
    """The yardstick's samples."""
    note: str = ""
    paired: bool = False
    """Samples were taken side by side: the ratio is the median of theirs."""
    sure: bool = False
    """Samples are small differences of large numbers: met when the worse end of ``interval`` keeps the limit."""

    @property
    def measure(self) -> float:
        if self.paired:
            return median([ours / yardstick for ours, yardstick in zip(self.samples, self.yardsticks, strict=True)])
        return self.ours if self.yardstick is None else self.ours / self.yardstick

    @property
    def met(self) -> bool:
        measure = self.interval[0 if self.at_least else 1] if self.sure else self.measure
        return measure >= self.limit if self.at_least else measure <= self.limit

    @property
    def interval(self) -> tuple[float, float]:
        """In which the median lies with 95 % probability, whatever the samples' distribution: two of them in order.

        Conover, Practical Nonparametric Statistics, 3rd ed. 1999, section 3.2.
        """
        count = len(self.samples)
        cut = max(0, math.floor(count / 2 - 1.96 * math.sqrt(count) / 2))
        ordered = sorted(self.samples)
        return ordered[cut], ordered[count - 1 - cut]

    def cells(self) -> list[str]:
        sign = "≥" if self.at_least else "≤"
        limit = f"{sign} {number(self.limit)}" + ("" if self.yardstick is not None else f" {self.unit}")
        beside = "–" if self.yardstick is None else f"{number(self.yardstick)} {self.unit} ({self.beside})"
        ratio = "–" if self.yardstick is None else number(self.measure)
        ours = f"{number(self.ours)} {self.unit}"
        if self.sure:
            ours += f" ({' to '.join(map(number, self.interval))})"
        return [self.what, ours, beside, ratio, limit, "yes" if self.met else "**no**"]


def number(value: float) -> str:
    """Three figures that mean something."""
    if value and abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def in_random_order(rounds: int, ours: Callable[[], None], yardstick: Callable[[], None]) -> None:
    """Run both sides so many times; who goes first is drawn anew for every round."""
    for _ in range(rounds):
        for side in random.sample([ours, yardstick], 2):
            side()


def machine() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "ipykernel": version("ipykernel"),
        "jupyter_torchdist": version("jupyter_torchdist"),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def save(rows: Sequence[Row]) -> None:
    """Put the rows in place of their groups' older ones; write the JSON and the table."""
    measured = {row.group for row in rows}
    everything = sorted([row for row in load() if row.group not in measured] + list(rows), key=_order)
    value = {"machine": machine(), "load": os.getloadavg(), "rows": [asdict(row) for row in everything]}
    JSON.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    TABLE.write_text(table(everything))


def _order(row: Row) -> int:
    return GROUPS.index(row.group)


def load() -> list[Row]:
    if not JSON.exists():
        return []
    rows = json.loads(JSON.read_text())["rows"]
    return [Row(**{**row, **{name: tuple(row.get(name, ())) for name in ("samples", "yardsticks")}}) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """RESULTS.md."""
    about = ", ".join(f"{key} {value}" for key, value in machine().items())
    lines = [
        "# Benchmarks",
        "",
        f"Written by `make bench`; the samples are in `results.json`. The last run: {about}.",
        "",
        "Everything is measured from a real IPython kernel, driven through jupyter_client as a front end does, each",
        "yardstick in the same run. Medians; where a row says *fastest of n*, both sides ran n times in random order",
        "and the fastest run of each counts: what disturbs a run on a shared machine only ever slows it down; where it",
        "says *by turns*, both ran at one time, half a second each in turn, and the ratio is the median of pairs'.",
        "*Ratio*: ours / yardstick; *must*: on the ratio, or on ours without one. *(a to b)*: where the median lies,",
        "with 95 % probability; such a row is met when all of that keeps the limit.",
        "",
        "| what | ours | yardstick | ratio | must | met |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
        "",
    ]
    notes = [f"* {row.what}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, *(["## Notes", "", *notes, ""] if notes else [])])
