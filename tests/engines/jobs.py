"""What the tests of all engines ask of a job, and the cells that they run."""

from __future__ import annotations

import pytest

from jupyter_torchdist.client import Job, Request, prepare
from jupyter_torchdist.client.submit import PreparedJob
from jupyter_torchdist.protocol.errors import TorchDistError
from jupyter_torchdist.protocol.options.parsing import parse_options
from tests.cluster.cells import MEET, SLEEP

COUNT = (
    MEET
    + """
import time
for number in range(60):
    print("line", number, flush=True)
    time.sleep(0.05)
weights += total
float(weights.sum())
"""
)
"""It takes ``weights`` of the notebook."""

SAVE = SLEEP.replace(
    "import time",
    "import signal, sys, time\n"
    "def save(*_):\n    time.sleep(1)\n    print('saved', flush=True)\n    sys.exit(1)\n"
    "signal.signal(signal.SIGTERM, save)",
)

AGAIN = (
    MEET
    + """
import os, signal, sys, time
started_again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("start", started_again, flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
while not started_again:
    time.sleep(0.05)
started_again
"""
)
"""It ends when it was started again, and not before. Its value says how often."""


def asleep(job: Job) -> bool:
    """Whether each rank is (``SLEEP``)."""
    return job.logs(stream="out").count("asleep") == job.plan.world_size


def said(job: Job) -> str:
    """The engine's latest words on the job."""
    return next((str(event.data["reason"]) for event in reversed(job.events()) if event.kind == "job.engine"), "")


def planned(launcher: str, options: str) -> PreparedJob:
    return prepare(Request("1 + 1", "Cell In[3]", 2, parse_options(f"--launcher {launcher} {options}"), {}))


def refusal(launcher: str, options: str) -> str:
    """The message, an arrow, and the hint."""
    with pytest.raises(TorchDistError) as caught:
        planned(launcher, options)
    return f"{caught.value.message} → {caught.value.hint}"
