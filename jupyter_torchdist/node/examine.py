"""Facts about this node that decide whether and how fast a job of several hosts runs. ``doctor --hosts`` asks for them.

It reads files and asks NVML; it changes nothing, and needs no right that the user lacks.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ..protocol.machine.limits import lines, user
from ..protocol.machine.nvml import Nvml
from ..protocol.wire import frames
from ..protocol.wire.reports import Examined
from .routes import interfaces

_BRIDGE = 0x0604
"""The class of PCI bridges."""

_ACS = 0x000D
"""The extended capability Access Control Services. PCI Express Base Specification 5.0, 7.7.8."""

_REDIRECTS = 0b11100
"""Its control bits that send traffic between two devices through the root: request, completion, upstream."""


def main() -> None:
    """Write one frame, ``examined``, to standard output."""
    os.write(1, frames.encode({"type": "examined", **examine().to_json()}))


def examine() -> Examined:
    came = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    own = interfaces()
    address = came[0] if came and came[0] in own else next(iter(own), "")
    interface = own.get(address, "")
    return Examined(
        name=socket.gethostname(),
        resolves=_resolved(socket.gethostname()),
        interface=interface,
        mtu=_number(Path("/sys/class/net", interface, "mtu")) if interface else 0,
        speed=max(0, _number(Path("/sys/class/net", interface, "speed"))) if interface else 0,
        cuda=_cuda(),
        nccl=_nccl(),
        driver=_driver(),
        peer_memory=any(re.match(r"nv(idia)?_peer_?mem ", line) for line in lines(Path("/proc/modules"))),
        acs=_with_acs(),
        holders=tuple(_holders()),
    )


def _resolved(name: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None)))
    except OSError:
        return ()


def _number(path: Path) -> int:
    """What the file says; 0 where it cannot be read."""
    with contextlib.suppress(ValueError):
        return int("".join(lines(path)))
    return 0


def _cuda() -> str:
    """The release of CUDA that torch was built with. Importing torch would take seconds."""
    found = find_spec("torch")
    if found is None or not found.origin:
        return ""
    said = re.search(r"^cuda\b.*?=\s*'([^']+)'", "\n".join(lines(Path(found.origin).with_name("version.py"))), re.M)
    return said[1] if said else ""


def _nccl() -> str:
    """The release of the library that comes with torch."""
    for dist in metadata.distributions():
        if re.fullmatch(r"nvidia-nccl-cu\d+", dist.metadata["Name"] or ""):
            return dist.version
    return ""


def _driver() -> str:
    try:
        with Nvml() as nvml:
            return nvml.driver()
    except OSError:
        return ""


def _with_acs() -> int:
    """How many PCI bridges send traffic between GPUs through the root; -1 where that cannot be read."""
    found, hidden = 0, False
    for device in Path("/sys/bus/pci/devices").glob("*"):
        if int("".join(lines(device / "class")) or "0", 16) >> 8 != _BRIDGE:
            continue
        try:
            space = (device / "config").read_bytes()
        except OSError:
            continue
        if len(space) <= 256:  # the rest is for root only
            hidden = True
        else:
            found += bool(acs_control(space) & _REDIRECTS)
    return -1 if hidden and not found else found


def acs_control(space: bytes) -> int:
    """The control register of Access Control Services in a device's configuration space; 0 without."""
    offset, seen = 256, set()
    while offset not in seen and 256 <= offset <= len(space) - 8:
        seen.add(offset)
        header = int.from_bytes(space[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(space[offset + 6 : offset + 8], "little")
        offset = header >> 20
    return 0


def _holders() -> Iterator[str]:
    """``GPU 0: alice, python train.py (process 4711, 3.2 GB)``."""
    try:
        with Nvml() as nvml:
            for gpu in nvml.gpus():
                device = nvml.find(gpu.uuid)
                for pid, held in (nvml.processes(device) if device else {}).items():
                    size = f", {held / 1e9:.1f} GB" if held is not None else ""
                    yield f"GPU {gpu.index}: {_process(pid)} (process {pid}{size})"
    except OSError:
        return


def _process(pid: int) -> str:
    try:
        owner = user(os.stat(f"/proc/{pid}").st_uid)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]
    except OSError:
        return "a process that cannot be seen from here"
    return f"{owner}, {b' '.join(words).decode('utf-8', 'replace').strip()[:80]}"
