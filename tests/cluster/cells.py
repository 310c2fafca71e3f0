"""Cells for hosts, and their start."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from jupyter_torchdist.client import Job, Request, submit
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.process import ProcessId
from tests.cluster import node_python
from tests.leaks import wait_until

PYTHON = node_python.PLACE / "bin/python"
PATIENCE = 60.0
MEET = """
import socket
import torch, torch.distributed as dist
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
print("rank", dist.get_rank(), "on", socket.gethostname(), "sum", total.item())
"""
SLEEP = MEET + "import time\nprint('asleep', flush=True)\nwhile True:\n    time.sleep(0.05)\n"


def start(
    pool: DriverPool,
    source: str,
    options: str = "--hosts node1,node2 --ranks 4",
    names: dict[str, Any] | None = None,
    python: Path | None = PYTHON,
) -> Job:
    """``python``: of all hosts; None: as the hosts have it."""
    words = f"--host-option python={python} {options}" if python else options
    return submit(Request(source, "Cell In[3]", 2, parse_options(words), names or {}), pool=pool)


def kill_driver(job: Job) -> None:
    driver = ProcessId.from_json(job.state.driver)
    assert driver.signal(signal.SIGKILL)
    assert wait_until(lambda: not driver.alive(), PATIENCE)
