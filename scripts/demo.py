"""`make demo`: run the quickstart without a browser, and say what happened."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from jupyter_torchdist.protocol.paths import home
from jupyter_torchdist.store import catalog, journal

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "notebooks" / "quickstart.ipynb"
TARGET = ROOT / "out" / "quickstart.ipynb"


def main() -> int:
    notebook = nbformat.read(SOURCE, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    print(f"Running {SOURCE.relative_to(ROOT)}, {len(cells)} cells", flush=True)
    begun = time.time()
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(SOURCE.parent)}})
    failure = ""
    try:
        client.execute()
    except CellExecutionError as error:
        failure = str(error)
    TARGET.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, TARGET)
    print(f"It took {time.time() - begun:.1f} s. Its jobs:")
    for line in job_lines(begun):
        print("  " + line)
    print("What the notebook printed afterwards:")
    for line in printed(cells):
        print("  " + line)
    print(f"The executed notebook: {TARGET}")
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0


def job_lines(since: float) -> list[str]:
    """One line for each job submitted since then, the first one first."""
    lines = []
    for summary in reversed([job for job in catalog.jobs() if job.submitted >= since]):
        state = journal.state(home().job(summary.job))
        name = f" ({summary.name})" if summary.name else ""
        reason = ""
        if (failed := state.first_failure) is not None:
            error = state.ranks[failed].error
            reason = (
                f": rank {failed} raised {error.title}, as the notebook means it to" if error else f": {state.reason}"
            )
        took = f"{summary.ended - summary.submitted:.1f} s"
        lines.append(f"{summary.label}{name}: {summary.state} on {summary.world_size} ranks, {took}{reason}")
    return lines


def printed(cells: list[Any]) -> list[str]:
    """What the cells that run in the notebook itself printed."""
    lines: list[str] = []
    for cell in cells:
        if cell.source.startswith(("%%", "%")):
            continue
        streams = [output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"]
        lines += "".join(streams).splitlines()
    return lines


if __name__ == "__main__":
    sys.exit(main())
