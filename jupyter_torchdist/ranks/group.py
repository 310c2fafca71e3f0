"""The rank's device and process group."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ..protocol.errors import UserError
from ..protocol.plan import NodePlan, Plan
from . import parting

_PREFIX = "torchdist"
"""Prefix of our group's keys in the job's store, so that a group that user code creates finds no old keys."""


class Meeting:
    """Whether all ranks have joined. A rank that leaves earlier closes connections that other ranks still wait for.

    Gloo then fails in these ranks with "Connection closed by peer". Ranks connect in no common order, and code without
    a collective waits for nobody, so it can end before all connections exist.
    """

    def __init__(self, store: Store, size: int) -> None:
        """Record that this rank has joined."""
        self._store = store
        if store.add("joined", 1) == size:
            store.set("met", "")

    def wait(self) -> None:
        """Wait until all ranks have joined. A store that is gone means that a launcher has ended: then do not wait."""
        with contextlib.suppress(dist.DistError):
            while not self._store.check(["met"]):
                time.sleep(0.005)  # Python handles signals here


def choose_device(node: NodePlan, *, for_command: bool = False) -> torch.device:
    """This rank's GPU, set as the current device, or the CPU. A command opens the GPU in a process of its own."""
    if not node.gpus or for_command:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    try:
        torch.cuda.set_device(device)
    except AttributeError as error:  # what is not in a build for CPUs
        raise UserError(
            f"this rank has a GPU, and torch {torch.__version__} in {sys.executable} is built for CPUs",
            "install a torch with CUDA there, or use --ranks N",
        ) from error
    return device


def join(plan: Plan, device: torch.device) -> Meeting:
    """Initialise the process group over the store that torch elastic opened."""
    store, rank, size = next(rendezvous("env://"))
    backend = "gloo" if device.type == "cpu" and plan.backend == "nccl" else plan.backend
    chosen: dict[str, Any] = {"backend": backend, "rank": rank, "world_size": size}
    if device.type == "cuda" and plan.backend == "nccl":
        chosen["device_id"] = device
    own = PrefixStore(_PREFIX, store)
    dist.init_process_group(store=own, **chosen)
    meeting = Meeting(own, size)
    _let_user_code_join_again(meeting)
    parting.install()
    return meeting


def _let_user_code_join_again(meeting: Meeting) -> None:
    """Let user code call ``init_process_group``, as code for torchrun does. Its group then replaces ours."""
    original = dist.init_process_group
    ours = weakref.ref(dist.group.WORLD)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        parting.let_go()
        if dist.is_initialized() and dist.group.WORLD is ours():
            meeting.wait()
            dist.destroy_process_group()
        return original(*args, **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]


def answers(patience: float = 0.3) -> bool:
    """Whether values can be read from the device. False while a collective that hangs occupies it."""
    if not torch.cuda.is_initialized():
        return True
    end = time.monotonic() + patience
    while not torch.cuda.default_stream().query():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def leave(meeting: Meeting) -> None:
    """Destroy all groups. Do not call it after a failure, since it may wait for other ranks. Use no torch after it."""
    meeting.wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    parting.end()
