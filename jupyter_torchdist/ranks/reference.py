"""The child of rank 0 that runs the cell on one device (``--verify``), and sends each of its first optimizer steps.

It begins before the rank has joined the others, so nothing of them is in it. What it prints is not shown. Files that
the cell writes, it writes a second time.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from .. import marshal
from ..protocol.bundle import Manifest
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..states import Place
from ..usercode.source import remember_cell
from . import group, shell
from .module_attributes import ModuleAttributes
from .notebook_state import Carried
from .streams.display import Display

_PR_SET_PDEATHSIG = 1
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}


class First(Protocol):
    """Rank 0, before it has joined the others."""

    number: int
    paths: JobPaths
    blobs: Path
    main: ModuleType
    shell: shell.RankShell

    def run(self, spec: JobSpec) -> None:
        """Run the user's code in ``main``, which has its names by then."""


def begin(rank: First, plan: Plan, spec: JobSpec, manifest: Manifest) -> Connection | None:
    """Start the child on rank 0 of a job that verifies. Returns the end of a pipe: send the seed, receive steps."""
    if rank.number or not plan.strategy.verify:
        return None
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe()

    def live() -> None:
        ours.close()
        _become_alone()
        from ..strategies.step.verifying import Ended

        made = [0]
        try:
            _prepare(rank, plan, spec, manifest, pickle.loads(theirs.recv_bytes()))
            _send_steps(theirs, plan.strategy.verify, made)
            rank.run(spec)
            ended = Ended(made[0])
        except BaseException as error:  # noqa: BLE001  # whatever user code raises
            ended = Ended(made[0], f"{type(error).__name__}: {error}", isinstance(error, _out_of_memory()))
        with contextlib.suppress(OSError):
            theirs.send_bytes(pickle.dumps(ended))
        _end()

    forked.Process(target=live, name="torchdist-reference").start()
    theirs.close()
    return ours


def _become_alone() -> None:
    """As a process that no rank knows: it says nothing, and ends when its parent does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open as long as the process
    os.environ.update(_ALONE)


def _prepare(rank: First, plan: Plan, spec: JobSpec, manifest: Manifest, seed: int) -> None:
    """As a rank prepares, without the other ranks."""
    import torch

    from ..checkpoint import randomness

    device = group.choose_device(plan.node_of(0))
    torch.manual_seed(seed)
    randomness.seed(seed)
    rank.shell = shell.install(Display(Path(os.devnull), lambda _: None), vars(rank.main))
    remember_cell(spec.source, spec.label, spec.first_line)
    loaded = marshal.load_bundle(manifest, rank.blobs, rank.main, source_dir=rank.paths.source)
    ModuleAttributes(vars(rank.main), manifest.bound, lambda _: None)
    Carried(vars(rank.main), Place((spec.source,), 0, str(device)), lambda _: None, loaded.unread)


def _send_steps(connection: Connection, count: int, made: list[int]) -> None:
    from ..strategies.core.patches import Patches
    from ..strategies.step.verifying import StepNotes

    def taken(step: Any) -> None:
        made[0] += 1
        try:
            connection.send_bytes(pickle.dumps(step))
        except OSError:  # rank 0 has ended, or needs no more
            _end()
        if made[0] == count:
            _end()

    StepNotes(taken).install(Patches())


def _out_of_memory() -> tuple[type[BaseException], ...]:
    import torch

    return (MemoryError, torch.OutOfMemoryError)


def _end() -> None:
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)
