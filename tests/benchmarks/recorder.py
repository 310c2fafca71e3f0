"""What recording costs: a cell, beside the same cell in a notebook whose environment switches the recorder off."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from tests.benchmarks import turns
from tests.benchmarks.report import Row, median
from tests.benchmarks.stage import Stage
from tests.benchmarks.strategies import (
    BY_HAND,
    CASES,
    CELL,
    DATA,
    LOOP,
    MODEL,
    NARROW,
    OWN_COST,
    SEQUENCES,
    WIDTH,
    Spent,
)
from tests.notebook import Notebook

RUNS = 6
"""Of both sides together, a new job each."""

EACH = 50
"""Collectives of a turn's step, where they are measured alone."""

COLLECTIVE_COST = 25
"""Microseconds: with four collectives in a step of 10 ms it is 1 %."""

OFF = {"TORCH_FR_BUFFER_SIZE": "0"}
STEP = "the flight recorder's cost a step of 20 layers with DDP written by hand (an aim)"
COLLECTIVE = "the flight recorder's cost of one collective that has nobody to wait for"

ALL = "recorder, guard of gradients and watching: their part of a step under `--strategy ddp`"
SMALL = f"{MODEL}WIDTH = {NARROW}\n{DATA}"
MODELS = {
    "a text model, 256 tokens a rank": (MODEL + SEQUENCES, 2),
    "20 layers, 32 samples a rank": (f"{MODEL}WIDTH = {WIDTH}\n{DATA}", RUNS),
}
"""With the runs of each. The guard reads each gradient once: the fewer samples a step has, the larger is its part."""
SHARE = 1
"""Per cent of a step."""

UNWATCHED = """
import threading
import torch.optim.optimizer as optimizers
for hooks in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks):
    for key, hook in list(hooks.items()):
        if type(getattr(hook, "__self__", None)).__name__ == "Guard":
            del hooks[key]
[watch] = [thread for thread in threading.enumerate() if thread.name == "torchdist-collectives"]
watch._target.__self__.stop()
del watch, hooks, key, hook
"""
"""Ends what cannot be switched off: the guard of gradients, and the thread that watches the rank."""

COLLECTIVES = f"""
tiny, turns = torch.ones(1), Turns(port)
for _ in range(STEPS):
    for _ in range({EACH}):
        dist.all_reduce(tiny)
    turns.step()
spent = turns.end()
del turns
"""


def rows() -> Iterator[Row]:
    """By the clock, and of the main thread's processor time."""
    with Stage.open() as stage, stage.notebook() as notebook:
        stage.environ |= OFF
        with stage.notebook() as bare:
            yield from compared(notebook, bare)


def compared(recorded: Notebook, off: Notebook) -> Iterator[Row]:
    """With the recorder, and in a notebook without it."""
    for name, (model, runs) in MODELS.items():
        ours, bare = by_turns(recorded, off, "--ranks 2 --strategy ddp", CELL, UNWATCHED + CELL, model, runs)
        step = median([clock for clock, _ in bare])
        note = (
            f"The median of {len(bare)} pairs, beside the same cell without them, where a step takes {step:.3g} ms: "
            f"`TORCH_FR_BUFFER_SIZE=0`, the guard's hooks removed, the watching thread stopped."
        )
        yield from _rows(f"{ALL}, {name}", ours, bare, 100 / step, "%", SHARE, note)
    ours, bare = by_turns(recorded, off, "--ranks 2", BY_HAND + CASES["ddp"].setup + LOOP)
    step = median([clock for clock, _ in bare])
    note = (
        f"The median of {len(bare)} pairs, beside `TORCH_FR_BUFFER_SIZE=0`, where a step takes "
        f"{step:.3g} ms. The limit is 1 % of a step of 10 ms."
    )
    yield from _rows(STEP, ours, bare, 1, "ms", OWN_COST, note)
    ours, bare = by_turns(recorded, off, "--ranks 1", BY_HAND + COLLECTIVES)
    one = median([spent for _, spent in bare]) * 1e3 / EACH
    note = (
        f"The median of {len(bare)} pairs of {turns.WINDOW * EACH} collectives; without the recorder one takes "
        f"{one:.3g} µs of the main thread. The limit is 1 % of a step of 10 ms with four of them."
    )
    yield from _rows(COLLECTIVE, ours, bare, 1e3 / EACH, "µs", COLLECTIVE_COST, note)


def _rows(what: str, ours: Spent, bare: Spent, scale: float, unit: str, limit: float, note: str) -> Iterator[Row]:
    for which, of in enumerate(("", ", of the main thread's processor time")):
        more = tuple((mine[which] - theirs[which]) * scale for mine, theirs in zip(ours, bare, strict=True))
        yield Row("recorder", what + of, median(more), unit, limit, note=note, samples=more, sure=True)


def by_turns(
    recorded: Notebook, bare: Notebook, line: str, loop: str, without: str = "", model: str = SMALL, runs: int = RUNS
) -> tuple[Spent, Spent]:
    """Milliseconds a step with and without the recorder, both at one time, in turns; ``without``: another loop."""
    ours: Spent = []
    theirs: Spent = []
    for _ in range(runs):
        table = turns.Table()
        setup = f"{model}{turns.SOURCE}port = {table.port}\noptions = {{}}\n"

        def run(notebook: Notebook, setup: str = setup) -> None:
            notebook.run(setup, timeout=120)
            cell = (without or loop) if notebook is bare else loop
            notebook.run(f"%%distribute {line} --out spent\n{cell}", timeout=600)

        thread = threading.Thread(target=run, args=(bare,))
        thread.start()
        try:
            run(recorded)
        finally:
            thread.join()
            table.close()
        ours += recorded.value("spent")
        theirs += bare.value("spent")
    return ours, theirs
