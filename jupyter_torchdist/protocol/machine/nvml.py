"""GPU data from NVIDIA's management library, without a CUDA context. Structures and codes are from nvml.h."""

from __future__ import annotations

import ctypes
import os
from types import TracebackType
from typing import Any

from ..gauges import POWER_LIMIT
from ..plan import Gpu

Device = ctypes.c_void_p

_UUID_LENGTH = 96
_NAME_LENGTH = 96
_MAX_PROCESSES = 256
_MOST_EVENTS = 100
_SM, _CHIP = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU

_UNCORRECTED, _SINCE_LOAD = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
_XID = 0x8  # nvmlEventTypeXidCriticalError
_ALL_LINKS = 2**32 - 1
_NVLINK_SENT, _NVLINK_RECEIVED = 138, 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX, in KiB
_NVLINK_REPLAYS, _NVLINK_RECOVERIES = 52, 59  # NVML_FI_DEV_NVLINK_…_ERROR_COUNT_TOTAL

_SLOWED = {
    0x60: "heat",  # nvmlClocksEventReasonSwThermalSlowdown, nvmlClocksEventReasonHwThermalSlowdown
    0x04: POWER_LIMIT,  # nvmlClocksEventReasonSwPowerCap
    0x80: "the power supply",  # nvmlClocksEventReasonHwPowerBrakeSlowdown
}
"""What slows a GPU down, by bits. Idle GPUs and clocks that somebody has set are no such reason."""

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


class _Field(ctypes.Structure):
    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("time", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_int),
        ("result", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


class _Event(ctypes.Structure):
    _fields_ = [
        ("device", Device),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """The library, open until ``close``. Raises ``OSError`` if it is missing or the driver does not answer."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ.get("TORCHDIST_NVML", "libnvidia-ml.so.1"))
        if self._library.nvmlInit_v2() != 0:
            raise OSError("the NVIDIA driver does not answer")
        self._events: Device | None = None

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._events is not None:
            self._library.nvmlEventSetFree(self._events)
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

    def slowed(self, device: Device) -> str:
        """Why its clock is lower than it could be: ``heat, its power limit``; empty if nothing is known."""
        found = ctypes.c_ulonglong()
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")  # since 535
        if not any(self._ask(name, device, ctypes.byref(found)) for name in names):
            return ""
        return ", ".join(words for bits, words in _SLOWED.items() if found.value & bits)

    def memory_errors(self, device: Device) -> int | None:
        """Errors of its memory (ECC) that could not be corrected, since the driver was loaded."""
        found = ctypes.c_ulonglong()
        done = self._ask("nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _SINCE_LOAD, ctypes.byref(found))
        return found.value if done else None

    def nvlink(self, device: Device) -> tuple[int, int] | None:
        """Bytes that it received and sent over all its links since the driver was loaded; None without NVLink."""
        received, sent = self._fields(device, (_NVLINK_RECEIVED, _NVLINK_SENT), _ALL_LINKS)
        return None if received is None or sent is None else (received * 1024, sent * 1024)

    def nvlink_errors(self, device: Device) -> int | None:
        """How often its links had to send again or to start again, since the driver was loaded."""
        known = [count for count in self._fields(device, (_NVLINK_REPLAYS, _NVLINK_RECOVERIES), 0) if count is not None]
        return sum(known) if known else None

    def watch(self, device: Device) -> None:
        """From now on ``xids`` tells what the driver reports of this GPU."""
        if self._events is None:
            events = Device()
            if not self._ask("nvmlEventSetCreate", ctypes.byref(events)):
                return
            self._events = events
        self._ask("nvmlDeviceRegisterEvents", device, ctypes.c_ulonglong(_XID), self._events)

    def xids(self) -> dict[str, int]:
        """The newest error (Xid) of each GPU since the last call, by its UUID; does not wait."""
        found: dict[str, int] = {}
        event = _Event()
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            if not self._ask("nvmlEventSetWait_v2", self._events, ctypes.byref(event), 0):
                break
            if event.type == _XID:
                found[self._uuid(Device(event.device))] = int(event.data)
        return found

    def _fields(self, device: Device, numbers: tuple[int, ...], scope: int) -> list[int | None]:
        """Values of ``nvmlDeviceGetFieldValues``; None for one that this GPU does not have."""
        fields = (_Field * len(numbers))(*(_Field(field=number, scope=scope) for number in numbers))
        if not self._ask("nvmlDeviceGetFieldValues", device, len(numbers), fields):
            return [None] * len(numbers)
        return [int(field.value) if field.result == 0 else None for field in fields]

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

    def _uuid(self, device: Device) -> str:
        uuid = ctypes.create_string_buffer(_UUID_LENGTH)
        self._library.nvmlDeviceGetUUID(device, uuid, _UUID_LENGTH)
        return uuid.value.decode()

    def _gpu(self, device: Device, index: int) -> Gpu:
        name = ctypes.create_string_buffer(_NAME_LENGTH)
        self._library.nvmlDeviceGetName(device, name, _NAME_LENGTH)
        used, total = self.memory(device) or (0, 0)
        pids = tuple(self.processes(device))
        return Gpu(self._uuid(device), index, name.value.decode(), total, used, pids)
