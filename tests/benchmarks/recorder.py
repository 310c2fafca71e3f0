"""What recording costs a step: a loop in a cell, beside the same loop under torchrun with the recorder off."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator

from tests.benchmarks import turns
from tests.benchmarks.report import Row, median
from tests.benchmarks.stage import Ran, Stage, torchrun
from tests.benchmarks.strategies import BY_HAND, CASES, DATA, LOOP, MODEL, NARROW, OWN_COST, Spent
from tests.notebook import Notebook

RUNS = 4
"""Of both sides together, a new job each."""

OFF = {"TORCH_FR_BUFFER_SIZE": "0"}
WHAT = "the flight recorder, its watch and what learns steps: their cost a step of 20 layers with DDP written by hand"


def rows() -> Iterator[Row]:
    """By the clock, and of the main thread's processor time, in milliseconds."""
    ours: Spent = []
    bare: Spent = []
    with Stage.open() as stage, stage.notebook() as notebook:
        for _ in range(RUNS):
            mine, theirs = by_turns(stage, notebook)
            ours += mine
            bare += theirs
    step = median([clock for clock, _ in bare])
    note = (
        f"The median of {len(bare)} pairs, beside torchrun with `TORCH_FR_BUFFER_SIZE=0`, where a step takes "
        f"{step:.3g} ms. The limit is 1 % of a step of 10 ms."
    )
    for which, of in enumerate(("", ", of the main thread's processor time")):
        more = tuple(mine[which] - theirs[which] for mine, theirs in zip(ours, bare, strict=True))
        yield Row("recorder", WHAT + of, median(more), "ms", OWN_COST, note=note, samples=more, sure=True)


def by_turns(stage: Stage, notebook: Notebook) -> tuple[Spent, Spent]:
    """Both loops at one time, in turns."""
    ran, table = list[Ran](), turns.Table()
    setup = f"{MODEL}WIDTH = {NARROW}\n{DATA}{turns.SOURCE}port = {table.port}\noptions = {{}}\n"
    loop = BY_HAND + CASES["ddp"].setup + LOOP
    script, result = stage.script("recorder", setup + loop), stage.root / "spent"
    thread = threading.Thread(target=lambda: ran.append(torchrun(script, 2, OFF)))
    thread.start()
    try:
        notebook.run(setup, timeout=120)
        notebook.run("%%distribute --ranks 2 --out spent\n" + loop.replace('"spent"', '"ours"'), timeout=600)
    finally:
        thread.join()
        table.close()
    assert result.exists(), "\n".join(line for _, line in ran[0].lines)
    theirs: Spent = ast.literal_eval(result.read_text())
    result.unlink()
    return notebook.value("spent"), theirs
