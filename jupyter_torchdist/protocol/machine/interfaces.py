"""What goes over this machine's network interfaces: ``/proc/net/dev`` (proc(5)), and the counters of InfiniBand."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..gauges import Traffic, rounded

BUSY = 10_000
"""Bytes a second. An interface is reported from its first look with as much: others are idle."""

_WORD = 4
"""An InfiniBand port counts words of four bytes: Documentation/ABI/stable/sysfs-class-infiniband of the kernel."""

Counters = dict[str, tuple[int, int]]
"""Bytes that were received and sent, by interface."""


class Interfaces:
    """Looks at the counters again and again. RDMA does not pass an interface: its ports (``mlx5_0:1``) are read too."""

    def __init__(self, devices: Path = Path("/proc/net/dev"), ports: Path = Path("/sys/class/infiniband")) -> None:
        self._devices, self._ports = devices, ports
        self._before: Counters = {}
        self._looked = 0.0
        self._busy: set[str] = set()

    def look(self, now: float) -> dict[str, Traffic]:
        """Since the look before; empty at the first. ``now``: seconds on a monotonic clock."""
        counters, before = self._counters(), self._before
        passed, self._before, self._looked = now - self._looked, counters, now
        found = {}
        for name, (received, sent) in counters.items():
            if name in before and passed > 0:
                into, out = (received - before[name][0]) / passed, (sent - before[name][1]) / passed
                if max(into, out) >= BUSY:
                    self._busy.add(name)
                if name in self._busy:  # a counter that was reset counts as none
                    found[name] = Traffic(rounded(max(into, 0), 2), rounded(max(out, 0), 2))
        return found

    def _counters(self) -> Counters:
        found: Counters = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in self._devices.read_text("ascii", "replace").splitlines()[2:]:
                name, _, numbers = line.partition(":")
                fields = numbers.split()
                if name.strip() != "lo":
                    found[name.strip()] = int(fields[0]), int(fields[8])
        for port in sorted(self._ports.glob("*/ports/*/counters")):
            with contextlib.suppress(OSError, ValueError):
                words = [int((port / f"port_{way}_data").read_text()) for way in ("rcv", "xmit")]
                found[f"{port.parts[-4]}:{port.parts[-2]}"] = words[0] * _WORD, words[1] * _WORD
        return found
