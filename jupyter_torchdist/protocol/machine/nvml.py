"""GPU data from NVIDIA's management library, without a CUDA context. Structures and codes are from nvml.h."""

from __future__ import annotations

import ctypes
import os
from types import TracebackType
from typing import Any

from ..plan import Gpu

Device = ctypes.c_void_p

_UUID_LENGTH = 96
_NAME_LENGTH = 96
_MAX_PROCESSES = 256
_SM, _CHIP = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU

_NOT_AVAILABLE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE, used instead of a number of bytes."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """The library, open until ``close``. Raises ``OSError`` if it is missing or the driver does not answer."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ.get("TORCHDIST_NVML", "libnvidia-ml.so.1"))
        if self._library.nvmlInit_v2() != 0:
            raise OSError("the NVIDIA driver does not answer")

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._library.nvmlShutdown()

    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs (or the MIG instances of a divided GPU) in the library's order."""
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found: list[Gpu] = []
        for index in range(count.value):
            device = Device()
            if self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                found += [self._gpu(part, index) for part in self._mig_parts(device) or [device]]
        return tuple(found)

    def driver(self) -> str:
        """The release of the driver; empty if it is not told."""
        said = ctypes.create_string_buffer(_NAME_LENGTH)
        return said.value.decode() if self._ask("nvmlSystemGetDriverVersion", said, _NAME_LENGTH) else ""

    def find(self, uuid: str) -> Device | None:
        """The GPU or MIG instance with this UUID; None if it does not exist."""
        device = Device()
        done = self._ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
        return device if done else None

    def utilisation(self, device: Device) -> int | None:
        """Per cent of the last 1/6 to 1 second in which a kernel ran; None for MIG instances."""
        found = _Utilization()
        return int(found.gpu) if self._ask("nvmlDeviceGetUtilizationRates", device, ctypes.byref(found)) else None

    def clock(self, device: Device) -> int | None:
        """MHz of the multiprocessors now."""
        found = ctypes.c_uint()
        return found.value if self._ask("nvmlDeviceGetClockInfo", device, _SM, ctypes.byref(found)) else None

    def temperature(self, device: Device) -> int | None:
        """Degrees Celsius of the chip."""
        found = ctypes.c_uint()
        return found.value if self._ask("nvmlDeviceGetTemperature", device, _CHIP, ctypes.byref(found)) else None

    def memory(self, device: Device) -> tuple[int, int] | None:
        """Bytes in use by all processes, and total bytes."""
        found = _Memory()
        done = self._ask("nvmlDeviceGetMemoryInfo", device, ctypes.byref(found))
        return (int(found.used), int(found.total)) if done else None

    def processes(self, device: Device) -> dict[int, int | None]:
        """Bytes that each process holds (None: not reported), with pids of this pid namespace."""
        count = ctypes.c_uint(_MAX_PROCESSES)
        entries = (_Process * _MAX_PROCESSES)()
        if not self._ask("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), entries):
            return {}
        told = entries[: count.value]
        return {entry.pid: None if entry.memory == _NOT_AVAILABLE else int(entry.memory) for entry in told}

    def _ask(self, function: str, *arguments: Any) -> bool:
        """Call a function that not every driver has. Returns whether it succeeded."""
        query = getattr(self._library, function, None)
        return query is not None and query(*arguments) == 0

    def _mig_parts(self, device: Device) -> list[Device]:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        told = self._ask("nvmlDeviceGetMigMode", device, ctypes.byref(current), ctypes.byref(pending))
        if not told or not current.value:
            return []
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(count)) != 0:
            return []
        parts = []
        for index in range(count.value):
            part = Device()
            if self._library.nvmlDeviceGetMigDeviceHandleByIndex(device, index, ctypes.byref(part)) == 0:
                parts.append(part)
        return parts

    def _gpu(self, device: Device, index: int) -> Gpu:
        uuid = ctypes.create_string_buffer(_UUID_LENGTH)
        name = ctypes.create_string_buffer(_NAME_LENGTH)
        self._library.nvmlDeviceGetUUID(device, uuid, _UUID_LENGTH)
        self._library.nvmlDeviceGetName(device, name, _NAME_LENGTH)
        used, total = self.memory(device) or (0, 0)
        pids = tuple(self.processes(device))
        return Gpu(uuid.value.decode(), index, name.value.decode(), total, used, pids)
