"""The last check of ``doctor --hosts``: a small job over the real path, which meets and reduces as every job does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..client.submit import Request, submit
from ..diagnosis.hosts import FAULT, Check, Facts, Measured, bandwidth
from ..protocol import codec
from ..protocol.errors import TorchDistError
from ..store import catalog
from . import defaults

SECONDS = 60.0
"""How long the job may take. A first one imports torch on the hosts."""

CELL = """\
import json, os, time, torch, torch.distributed as dist
gpu = dist.get_backend() == "nccl"
x = torch.ones((64 if gpu else 16) << 18, device="cuda" if gpu else "cpu")
def seconds():
    began = time.perf_counter()
    dist.all_reduce(x)
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began
seconds()
taken = sorted(seconds() for _ in range(5))
if dist.get_rank() == 0:
    words = {"size": x.numel() * 4, "seconds": taken[2], "ranks": dist.get_world_size(), "backend": dist.get_backend()}
    print(json.dumps(words), flush=True)
"""
"""The median of five, after one that makes the connections."""


def all_reduce(hosts: Sequence[Facts], settings: Sequence[str]) -> Check:
    """A rank on each host, on a GPU if one is free on all; two on a single host."""
    free = [sum(gpu.idle for gpu in host.inventory.gpus) for host in hosts]
    each = 2 if len(hosts) == 1 else 1
    names = ",".join(f"{host.host}:{each}" for host in hosts)
    words = ["--hosts", names, *(f"--host-option={setting}" for setting in settings), "--timeout", f"{SECONDS:g}s"]
    if min(free) < each:
        words += ["--ranks", str(each * len(hosts))]
    try:
        job = submit(Request(source=CELL, label="doctor", options=defaults.options(words, Path.cwd())))
        try:
            state = job.wait()
        except KeyboardInterrupt:
            job.kill()
            raise
    except TorchDistError as error:
        return Check("all-reduce", FAULT, error.message, error.hint)
    if state.state != "succeeded":
        remedy = next((finding.remedy for finding in state.findings), "")
        return Check("all-reduce", FAULT, state.reason, remedy or f"`%dist show {job.id}` shows the job")
    said = codec.loads(job.logs(0, stream="out"))
    catalog.remove(job.paths)
    return bandwidth(Measured(**said), hosts)
