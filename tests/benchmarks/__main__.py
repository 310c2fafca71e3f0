"""``python -m tests.benchmarks [group…]``: measure, print as it goes, write RESULTS.md and results.json."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

from tests.benchmarks import (
    browser,
    checkpoints,
    data,
    failure,
    hosts,
    launch,
    logs,
    recorder,
    report,
    strategies,
    training,
)
from tests.benchmarks.report import Row

GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "launch": launch.rows,
    "logs": logs.rows,
    "data": data.rows,
    "hosts": hosts.rows,
    "failure": failure.rows,
    "training": training.rows,
    "recorder": recorder.rows,
    "strategies": strategies.rows,
    "checkpoints": checkpoints.rows,
    "browser": browser.rows,
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        print(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    for variable in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(variable, None)  # a user has neither, and both cost time on either side
    measured = []
    if os.getloadavg()[0] > 0.5:
        print(
            f"something else is running here (load {os.getloadavg()[0]:.1f}); the numbers will say little", flush=True
        )
    for name in names or GROUPS:
        print(name, flush=True)
        rows = []
        for row in GROUPS[name]():
            rows.append(row)
            print("  " + " | ".join(row.cells()), flush=True)
        report.save(rows)
        measured += rows
    print(f"written: {report.TABLE}")
    missed = [row.what for row in measured if not row.met]
    print(f"{len(measured) - len(missed)} of {len(measured)} met" + "".join(f"\n  not met: {what}" for what in missed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
