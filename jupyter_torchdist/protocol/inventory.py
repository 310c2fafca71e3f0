"""What this machine has. GPUs are asked of NVML, which neither opens a CUDA context nor needs torch."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib import metadata

from .plan import Gpu, Inventory

_UUID_LENGTH = 96
_NAME_LENGTH = 96
_MAX_PROCESSES = 256


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def local_inventory(environ: Mapping[str, str] | None = None) -> Inventory:
    """This machine as a job of this process (or of ``environ``) may use it."""
    environ = os.environ if environ is None else environ
    return Inventory(
        host=socket.gethostname(),
        cores=_cores(),
        memory=_available_memory(),
        gpus=visible(gpus(), environ.get("CUDA_VISIBLE_DEVICES")),
        python=sys.version.split()[0],
        torch=_version("torch"),
        numactl=shutil.which("numactl", path=environ.get("PATH")) is not None,
    )


def visible(found: tuple[Gpu, ...], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` lets through, in its order.

    As CUDA reads it: it stops at the first bad entry, and a GPU that is named twice leaves none at all.
    """
    if cuda_visible_devices is None:
        return found
    chosen: list[Gpu] = []
    for entry in cuda_visible_devices.split(","):
        entry = entry.strip()
        if entry.isdigit():
            # CUDA takes the first instance of a GPU that is divided (MIG).
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
    """GPUs (or MIG instances, where a GPU is divided) in NVML's order; empty without a driver."""
    try:
        nvml = ctypes.CDLL(os.environ.get("TORCHDIST_NVML", "libnvidia-ml.so.1"))
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found: list[Gpu] = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                found += [_gpu(nvml, part, index) for part in _mig_parts(nvml, handle) or [handle]]
        return tuple(found)
    finally:
        nvml.nvmlShutdown()


def _mig_parts(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    query = getattr(nvml, "nvmlDeviceGetMigMode", None)  # drivers before 450 have none
    if query is None or query(handle, ctypes.byref(current), ctypes.byref(pending)) != 0 or not current.value:
        return []
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetMaxMigDeviceCount(handle, ctypes.byref(count)) != 0:
        return []
    parts = []
    for index in range(count.value):
        part = ctypes.c_void_p()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index, ctypes.byref(part)) == 0:
            parts.append(part)
    return parts


def _gpu(nvml: ctypes.CDLL, handle: ctypes.c_void_p, index: int) -> Gpu:
    uuid = ctypes.create_string_buffer(_UUID_LENGTH)
    name = ctypes.create_string_buffer(_NAME_LENGTH)
    memory = _Memory()
    nvml.nvmlDeviceGetUUID(handle, uuid, _UUID_LENGTH)
    nvml.nvmlDeviceGetName(handle, name, _NAME_LENGTH)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Gpu(
        uuid=uuid.value.decode(),
        index=index,
        name=name.value.decode(),
        memory=memory.total,
        memory_used=memory.used,
        pids=_processes(nvml, handle),
    )


def _processes(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> tuple[int, ...]:
    count = ctypes.c_uint(_MAX_PROCESSES)
    entries = (_Process * _MAX_PROCESSES)()
    query = getattr(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if query is None or query(handle, ctypes.byref(count), entries) != 0:
        return ()
    return tuple(entries[index].pid for index in range(count.value))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _available_memory() -> int:
    """Bytes that can be taken without swapping; 0 where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
