"""What recording costs: a cell, beside the same cell in a notebook whose environment switches the recorder off."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from tests.benchmarks import turns
from tests.benchmarks.report import Row, median
from tests.benchmarks.stage import Stage
from tests.benchmarks.strategies import (
    BY_HAND,
    CASES,
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
    "a text model, 4,096 tokens a rank": (f"{MODEL}BATCH = 64\n", SEQUENCES, 1, 600),
    "a text model, 1,024 tokens a rank (an aim)": (f"{MODEL}BATCH = 16\n", SEQUENCES, 4, 100),
    "20 layers of width 256, 32 samples a rank (an aim)": (f"{MODEL}WIDTH = {WIDTH}\n", DATA, 20, 100),
}
"""The guard reads each gradient once: the less is computed with a parameter in a step, the larger is its part. The
first is a small batch of a real training.

The numbers are of the steps of a window, in which the watching thread looks at least once, and of pairs of windows: one
with guard and watching, one without. A window of one step of 0.4 s differs from the next by more than what is measured.
"""
SHARE = 1
"""Per cent of a step."""

SWITCHED = """
import threading
import torch.optim.optimizer as optimizers
from jupyter_torchdist.ranks.streams import flight

class Switch:
    \"\"\"Guard and watching, switched off and on for a window of steps, on all ranks at once.\"\"\"

    def __init__(self):
        tables = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
        self.hooks = [
            (table, key, hook)
            for table in tables
            for key, hook in table.items()
            if type(getattr(hook, "__self__", None)).__name__ == "Guard"
        ]
        assert len(self.hooks) == 2
        [watch] = [thread for thread in threading.enumerate() if thread.name == "torchdist-collectives"]
        self.watch = watch._target.__self__
        self.windows, self.count = [], 0
        self.entered = self.collectives()

    def collectives(self):
        return sum(count.entered for count in flight.counts().values())

    def turn(self, on):
        for table, key, hook in self.hooks:
            table.pop(key, None)
            if on:
                table[key] = hook
        for owner, name in ((self.watch, "_look"), (self.watch._pace, "look")):
            vars(owner).pop(name, None)
            if not on:
                setattr(owner, name, lambda: None)

    def step(self):
        \"\"\"At the beginning of each: on, off, off, on.\"\"\"
        window, place = divmod(self.count, WINDOW)
        if place == 0:
            self.end()
            self.turn(window % 4 in (0, 3))
            self.begun = time.perf_counter(), time.thread_time()
        self.count += 1

    def end(self):
        if self.count:
            ended = time.perf_counter(), time.thread_time()
            self.windows.append([(end - begin) / WINDOW * 1e3 for begin, end in zip(self.begun, ended)])

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=BATCH, shuffle=True)
switch = None
for x, y in loader:
    if switch is not None:
        switch.step()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if switch is None:
        switch = Switch()
switch.end()
spent = switch.windows
each = (switch.collectives() - switch.entered) / switch.count
del switch
"""

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
    ours, bare = by_turns(recorded, off, "--ranks 2", BY_HAND + CASES["ddp"].setup + LOOP)
    step = median([clock for clock, _ in bare])
    note = (
        f"The median of {len(bare)} pairs, beside `TORCH_FR_BUFFER_SIZE=0`, where a step takes "
        f"{step:.3g} ms. The limit is 1 % of a step of 10 ms."
    )
    yield from _rows(STEP, ours, bare, 1, "ms", OWN_COST, note)
    ours, bare = by_turns(recorded, off, "--ranks 1", BY_HAND + COLLECTIVES)
    costs = [
        median([mine[which] - theirs[which] for mine, theirs in zip(ours, bare, strict=True)]) / EACH
        for which in (0, 1)
    ]
    one = median([spent for _, spent in bare]) * 1e3 / EACH
    note = (
        f"The median of {len(bare)} pairs of {turns.WINDOW * EACH} collectives; without the recorder one takes "
        f"{one:.3g} µs of the main thread. The limit is 1 % of a step of 10 ms with four of them."
    )
    yield from _rows(COLLECTIVE, ours, bare, 1e3 / EACH, "µs", COLLECTIVE_COST, note)
    for name, (model, data, window, pairs) in MODELS.items():
        setup = f"{model}WINDOW, STEPS = {window}, {2 * (pairs + turns.WARM) * window + 1}\n{data}"
        yield from parts(recorded, f"{ALL}, {name}", setup, window, costs)


def parts(notebook: Notebook, what: str, model: str, window: int, costs: Sequence[float]) -> Iterator[Row]:
    """Windows of one job in pairs, with and without guard and watching, and the cost of a collective's record.

    ``costs``: milliseconds of a collective by the clock, and of the main thread.
    """
    notebook.run(model, timeout=120)
    notebook.run(f"%%distribute --ranks 2 --strategy ddp --out spent,each\n{SWITCHED}", timeout=3600)
    windows, each = notebook.value("spent")[2 * turns.WARM :], notebook.value("each")
    for which, of in enumerate(("", ", of the main thread's processor time")):
        on = [spent[which] for place, spent in enumerate(windows) if place % 4 in (0, 3)]
        off = [spent[which] for place, spent in enumerate(windows) if place % 4 in (1, 2)]
        step = median(off)
        more = tuple((mine - theirs + each * costs[which]) / step * 100 for mine, theirs in zip(on, off, strict=True))
        cost = costs[which] * 1e3
        note = (
            f"The median of {len(more)} pairs of {window} steps of one job, which take {step:.3g} ms each with the "
            f"guard's hooks removed and the watching thread idle; and {each:.1f} collectives a step, of which the "
            f"recorder takes {cost:.3g} µs each (the row above)."
        )
        yield Row("recorder", what + of, median(more), "%", SHARE, note=note, samples=more, sure=True)


def _rows(what: str, ours: Spent, bare: Spent, scale: float, unit: str, limit: float, note: str) -> Iterator[Row]:
    for which, of in enumerate(("", ", of the main thread's processor time")):
        more = tuple((mine[which] - theirs[which]) * scale for mine, theirs in zip(ours, bare, strict=True))
        yield Row("recorder", what + of, median(more), unit, limit, note=note, samples=more, sure=True)


def by_turns(recorded: Notebook, bare: Notebook, line: str, loop: str) -> tuple[Spent, Spent]:
    """Milliseconds a step with and without the recorder, both at one time, in turns."""
    ours: Spent = []
    theirs: Spent = []
    for _ in range(RUNS):
        table = turns.Table()
        setup = f"{SMALL}{turns.SOURCE}port = {table.port}\noptions = {{}}\n"

        def run(notebook: Notebook, setup: str = setup) -> None:
            notebook.run(setup, timeout=120)
            notebook.run(f"%%distribute {line} --out spent\n{loop}", timeout=600)

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
