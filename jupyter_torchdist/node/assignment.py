"""A launcher takes on its assignment: environment, working directory, limits, and the mark of the job."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time

from ..protocol.machine import tickets
from ..protocol.process import JOB_TOKEN, JOB_TOKEN_LENGTH
from ..protocol.wire.assignment import Assignment

IMPORT_PREFIXES = ("LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "PYTHON", "TORCH_", "PYTORCH_", "ATEN_")
"""Prefixes of variables that are read at import or start. A zygote serves only jobs with equal values of these."""

_IMPORT_IGNORED = ("TORCHDIST_",)


def import_environment(environ: dict[str, str]) -> dict[str, str]:
    """The variables that are read at import or start, sorted by name."""
    chosen = (name for name in environ if name.startswith(IMPORT_PREFIXES) and not name.startswith(_IMPORT_IGNORED))
    return {name: environ[name] for name in sorted(chosen)}


def rank_environment(assignment: Assignment) -> dict[str, str]:
    """The notebook's environment with what the plan adds to it."""
    node = assignment.node_plan()
    environ = dict(assignment.world.environ)
    environ.setdefault("OMP_NUM_THREADS", str(node.threads))
    environ.setdefault("MPLBACKEND", "Agg")
    environ["MPLBACKEND"] = "Agg" if "inline" in environ["MPLBACKEND"] else environ["MPLBACKEND"]
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(node.gpus)
    environ.setdefault("GLOO_SOCKET_IFNAME", node.interface)
    if node.interface != "lo":
        environ.setdefault("NCCL_SOCKET_IFNAME", node.interface)
    environ[JOB_TOKEN] = assignment.token
    environ["TORCHDIST_RESTARTS"] = str(assignment.restarts)
    return environ


def stamp_job_token(token: str) -> None:
    """Write a job's token into this process's initial environment block, where ``/proc/PID/environ`` shows it.

    A forked process has a copy of its parent's block, and ``setenv`` would store the variable outside the block.
    So the zygote starts with a placeholder of the right length, which is overwritten in place (as setproctitle does).
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end: fields 50 and 51 of proc(5)
    block = ctypes.string_at(start, end - start)
    name = f"{JOB_TOKEN}=".encode()
    at = block.find(name)
    if at >= 0 and len(block) >= at + len(name) + JOB_TOKEN_LENGTH:
        ctypes.memmove(start + at + len(name), token.encode("ascii"), JOB_TOKEN_LENGTH)


def enter(assignment: Assignment) -> None:
    """Apply the notebook's environment, working directory, ``sys.path``, umask and resource limits to this process.

    From now on this process and its forks keep the job's GPUs, with or without agent and driver.
    """
    tickets.hold(assignment.job)
    world = assignment.world
    os.environ.clear()
    os.environ.update(rank_environment(assignment))
    time.tzset()
    os.umask(world.umask)
    try:
        os.chdir(world.cwd)
    except OSError:
        work = assignment.job_paths.work
        work.mkdir(mode=0o700, exist_ok=True)
        os.chdir(work)
    sys.path[:] = [*world.sys_path] or sys.path
    for name, (soft, hard) in world.rlimits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            try:
                resource.setrlimit(kind, (soft, hard))
            except (ValueError, OSError):
                continue  # above this process's hard limit, which it cannot raise
