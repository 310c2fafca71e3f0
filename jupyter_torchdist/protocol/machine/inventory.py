"""The resources of this machine. GPU data comes from NVML, which neither opens a CUDA context nor needs torch."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from ..paths import scratch_dir
from ..plan import Gpu, Inventory, Software
from . import packages, tickets
from .limits import limits
from .nvml import Nvml


def local_inventory(environ: Mapping[str, str] | None = None) -> Inventory:
    """The resources that a job of this process may use, with ``environ`` instead of ``os.environ`` if given."""
    environ = os.environ if environ is None else environ
    return Inventory(
        host=socket.gethostname(),
        cores=_cores(),
        memory=_available_memory(),
        gpus=visible(tickets.with_jobs(gpus()), environ.get("CUDA_VISIBLE_DEVICES")),
        python=sys.version.split()[0],
        platform=packages.platform(),
        torch=installed("torch"),
        disk=_free_disk(scratch_dir(environ)),
        numactl=shutil.which("numactl", path=environ.get("PATH")) is not None,
        limits=limits(),
    )


def visible(found: tuple[Gpu, ...], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` makes visible, in its order.

    It is read as CUDA does: an invalid entry ends the list, and a GPU named twice means that no GPU is visible.
    """
    if cuda_visible_devices is None:
        return found
    chosen: list[Gpu] = []
    for entry in cuda_visible_devices.split(","):
        entry = entry.strip()
        if entry.isdigit():
            # CUDA uses the first instance of a divided GPU (MIG).
            matches = [gpu for gpu in found if gpu.index == int(entry)][:1]
        else:
            matches = [gpu for gpu in found if entry and gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return ()
        chosen.append(matches[0])
    return tuple(chosen)


def gpus() -> tuple[Gpu, ...]:
    """GPUs (or the MIG instances of a divided GPU) in NVML's order; empty without a driver."""
    try:
        with Nvml() as nvml:
            return nvml.gpus()
    except OSError:
        return ()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _available_memory() -> int:
    """Bytes that can be used without swapping; 0 if the system does not report them."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _free_disk(path: Path) -> int:
    """Free bytes where ``path`` is, or will be; 0 if the system does not tell."""
    try:
        return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free
    except OSError:
        return 0


def installed(package: str) -> str:
    """The release of a distribution; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_INSTALLED = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-.*)?\.(dist|egg)-info")


def normalised(distribution: str) -> str:
    """The name as indexes compare it: ``Scikit_Learn`` → ``scikit-learn``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def software(path: Sequence[str]) -> Software:
    """What this interpreter finds with ``path`` as its ``sys.path``. Only directories are listed: no file is read."""
    versions: dict[str, str] = {}
    modules = set(sys.stdlib_module_names)
    for entry in path:
        try:
            found = _listed(entry, os.stat(entry).st_mtime_ns)
        except OSError:
            continue
        versions = {**found[0], **versions}
        modules |= found[1]
    return Software(versions, tuple(sorted(modules)))


@lru_cache(maxsize=256)
def _listed(folder: str, modified: int) -> tuple[dict[str, str], frozenset[str]]:
    """The distributions and the modules in a directory that was ``modified`` then (ns)."""
    names = os.listdir(folder)
    installed = (found for name in names if (found := _INSTALLED.fullmatch(name)))
    versions = {normalised(found["name"]): found["version"] for found in installed}
    return versions, frozenset(stem for name in names if (stem := name.partition(".")[0]).isidentifier())
