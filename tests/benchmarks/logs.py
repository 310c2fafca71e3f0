"""How fast lines travel, and that none is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from tests.benchmarks.report import Row, in_random_order, median
from tests.benchmarks.stage import STAMP, Stage
from tests.notebook import Notebook

LINES, RUNS, TICKS = 100_000, 15, 30
LOOP = f"""
rank = int(os.environ["RANK"])
time.sleep(0.1)  # on both sides: the launch has rows of its own, and what it leaves to do is over by then
stamp("begin")
for i in range({LINES}):
    print(f"rank {{rank}} step {{i:06d}} loss {{i * 0.001:.4f}}")
stamp("end")
"""
WHOLE = """
[[line == f"rank {rank} step {i:06d} loss {i * 0.001:.4f}"
  for i, line in enumerate(td.last.logs(rank).splitlines())].count(True) for rank in range(2)]
"""
TICK = f"""%%distribute --ranks 2
rank = int(os.environ["RANK"])
for i in range({TICKS}):
    time.sleep(0.2)
    if rank == 0:
        stamp(f"tick{{i:02d}}")
        print(f"tick {{i:02d}} of the clock")
"""


def rows() -> Iterator[Row]:
    with Stage.open() as stage, stage.notebook() as notebook:
        notebook.run("import jupyter_torchdist as td")
        latencies = ticks(stage, notebook)
        plain, ours, visible, rates, complete = [], [], [], [], []

        def in_a_cell() -> None:
            took, late, rate = throughput(stage, notebook)
            ours.append(took)
            visible.append(late)
            rates.append(rate)
            complete.append(sum(notebook.value(WHOLE)) / (2 * LINES))

        in_random_order(RUNS, in_a_cell, lambda: plain.append(redirected(stage)))
    yield Row(
        "logs", "2 × 100,000 lines printed: the ranks' own time", min(ours), "s", 1.1, min(plain),
        f"the same program redirected to a file; fastest of {RUNS}", samples=tuple(ours), yardsticks=tuple(plain),
    )  # fmt: skip
    yield Row(
        "logs", "…of them whole, in order and labelled in the job's logs", 100 * min(complete), "%", 100,
        at_least=True, samples=tuple(complete),
    )  # fmt: skip
    yield Row(
        "logs", "…last line visible in the notebook after the last print", median(visible), "s", 0.3,
        samples=tuple(visible),
    )  # fmt: skip
    yield Row(
        "logs", "…first print → all visible", median(rates), "lines/s", 300_000, at_least=True, samples=tuple(rates)
    )
    yield Row(
        "logs", "one idle print, not flushed → visible in the notebook", 1000 * median(latencies), "ms", 50,
        samples=tuple(1000 * latency for latency in latencies),
    )  # fmt: skip


def throughput(stage: Stage, notebook: Notebook) -> tuple[float, float, float]:
    """Seconds of the slower rank's loop, seconds from the last print to its line on the page, lines a second."""
    cell = notebook.run("%%distribute --ranks 2" + LOOP, timeout=120)
    begun, ended = stage.stamps("begin"), stage.stamps("end")
    last = [cell.seen(f"rank {rank} step {LINES - 1:06d}") for rank in range(2)]
    shown = max(when if when is not None else cell.ended for when in last)
    took = max(end - begin for begin, end in zip(begun, ended, strict=True))
    return took, max(shown - max(ended), 0.0), 2 * LINES / (shown - min(begun))


def redirected(stage: Stage) -> float:
    """Two processes at once, each with its stdout in a file."""
    script = stage.root / "lines.py"
    script.write_text(STAMP.format(marks=str(stage.marks)) + LOOP)
    environ = {key: value for key, value in stage.environ.items() if key != "PYTHONUNBUFFERED"}
    processes = []
    for rank in range(2):
        with (stage.root / f"lines-{rank}.txt").open("wb") as file:
            command = [sys.executable, str(script)]
            processes.append(subprocess.Popen(command, stdout=file, env={**environ, "RANK": str(rank)}))
    for process in processes:
        assert process.wait() == 0
    begun, ended = stage.stamps("begin"), stage.stamps("end")
    return max(end - begin for begin, end in zip(begun, ended, strict=True))


def ticks(stage: Stage, notebook: Notebook) -> list[float]:
    """Seconds from a lone print to its line on the page."""
    cell = notebook.run(TICK)
    late = []
    for i in range(TICKS):
        (printed,) = stage.stamps(f"tick{i:02d}")
        seen = cell.seen(f"tick {i:02d} of the clock")
        assert seen is not None, f"line {i} was never shown"
        late.append(seen - printed)
    return late
