"""The memory that a job needs, from a rehearsal of its first step in a separate process: no GPU, rank or training."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from .. import capture as capturing
from ..capture import Capture
from ..planning import memory
from ..protocol.machine.inventory import local_inventory
from ..protocol.memory import MemoryPlan, Rehearsed
from ..protocol.paths import Home
from ..protocol.plan import Inventory, Plan
from ..protocol.process import PROC
from ..protocol.spec import JobSpec
from ..protocol.strategy import StrategyPlan
from ..protocol.world import World
from ..store import jobdir
from ..store.blobs import blob_store
from .world import world_here

COMMAND = ("-m", "jupyter_torchdist.rehearsal.memory")

PATIENCE = 150.0
"""Seconds to wait for an answer: a rehearsal ends itself after 60, and imports torch before."""


class Rehearsing:
    """Each strategy is rehearsed from the beginning, in a process that ``process`` gives. ``words``: its errors."""

    def __init__(
        self, process: Callable[[], AbstractContextManager[subprocess.Popen[bytes]]], words: IO[bytes]
    ) -> None:
        self._process, self._words = process, words

    def __call__(self, strategy: StrategyPlan) -> Rehearsed:
        """Rehearse the cell's first step under ``strategy``. A failure is returned as ``reason``."""
        with self._process() as process:
            return self._rehearsed(process, strategy)

    def _rehearsed(self, process: subprocess.Popen[bytes], strategy: StrategyPlan) -> Rehearsed:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(strategy.to_json()).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return Rehearsed(reason=self._ended(process))
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            return Rehearsed(reason=f"there was no answer within {PATIENCE:.0f} s")
        line = process.stdout.readline()
        return Rehearsed.from_json(json.loads(line)) if line else Rehearsed(reason=self._ended(process))

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        process.wait()
        self._words.seek(0)
        lines = self._words.read().decode("utf-8", "backslashreplace").strip().splitlines()
        return f"its process ended ({lines[-1] if lines else f'code {process.returncode}'})"


@contextmanager
def rehearsing(spec: JobSpec, capture: Capture, cwd: Path, home: Home, *, gpus: bool) -> Iterator[Rehearsing]:
    """Rehearsals for the length of the block. Stores the captured data, as for a run. Raises ``StoreError``.

    One process forks for each of them, or each has its own where a fork of torch is not safe.
    """
    world = world_here(spec.options, cwd)
    with ExitStack() as stack:
        stack.enter_context(jobdir.creating(home, spec.job))
        aside = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchdist-"))
        manifest = capturing.pack(capture, spec.job, blob_store(home).put)
        words = stack.enter_context(tempfile.TemporaryFile())
        order = {
            "spec": spec.to_json(),
            "manifest": manifest.to_json(),
            "blobs": str(home.blobs),
            "sources": str(Path(aside) / "sources"),
            "sys_path": list(world.sys_path),
            "gpus": gpus,
        }
        new = partial(_process, order, world, words)
        if PROC:
            one = stack.enter_context(new())
            yield Rehearsing(lambda: nullcontext(one), words)
        else:
            yield Rehearsing(new, words)


@contextmanager
def _process(order: dict[str, Any], world: World, words: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, *COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        env=world.environ,
        cwd=world.cwd,
        start_new_session=True,  # an interrupt of the kernel must not reach it
    )
    try:
        assert process.stdin is not None
        with suppress(OSError):  # the process has ended; the first call reports why
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, and a fork of it that may still rehearse."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def memory_plan(
    spec: JobSpec, capture: Capture, plan: Plan, cwd: Path, home: Home, inventory: Inventory | None = None
) -> MemoryPlan | None:
    """The memory that the job's strategy needs, and whether it fits; None without a strategy. Raises ``StoreError``."""
    strategy = plan.strategy
    if strategy.name == "none":
        return None
    inventory = inventory or local_inventory()
    with rehearsing(spec, capture, cwd, home, gpus=any(node.gpus for node in plan.nodes)) as rehearse:
        found = rehearse(strategy)
        judged = memory.judge(found, plan, inventory)
        if judged.fits is False and not strategy.activation_checkpointing and strategy.degree("pp") == 1:
            checkpointed = rehearse(memory.with_checkpointing(strategy))
            judged = memory.judge(found, plan, inventory, checkpointed)
        return judged


def copy_fits(spec: JobSpec, capture: Capture, plan: Plan, cwd: Path, home: Home, inventory: Inventory) -> bool | None:
    """For ``--strategy auto``: whether a complete copy of the training fits on a rank's device; None if unknown."""
    with rehearsing(spec, capture, cwd, home, gpus=True) as rehearse:
        replicated = memory.replicated(plan)
        return memory.judge(rehearse(replicated.strategy), replicated, inventory).fits
