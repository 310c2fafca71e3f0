"""What of the facts about hosts would stop a job on them, or slow it. Pure: ``node/examine.py`` collects the facts."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..protocol.plan import Inventory, Limits
from ..protocol.times import CLOCK_SECONDS
from ..protocol.wire.reports import Examined

FINE, WARNING, FAULT = "fine", "warning", "fault"

DISK = 2_000_000_000
SHARED = 1_000_000_000
"""Bytes of /dev/shm. NCCL and the workers of a DataLoader share memory there."""
FILES = 1024
ENOUGH = 0.5
"""A smaller part of what the link can do is worth a look."""


@dataclass(frozen=True)
class Check:
    """One line of ``doctor``. ``remedy`` says what to do if it is not fine."""

    name: str
    level: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """A host that answered. ``clock``: seconds that it is ahead of this machine."""

    inventory: Inventory
    examined: Examined
    clock: float = 0.0

    @property
    def host(self) -> str:
        return self.inventory.host

    @property
    def limits(self) -> Limits:
        """Raises ``ValueError`` for a host that only an engine has described."""
        if self.inventory.limits is None:
            raise ValueError(f"{self.host} has not said what it lets processes use")
        return self.inventory.limits

    @property
    def build(self) -> str:
        """``torch 2.13.0, CUDA 12.8, NCCL 2.27.5``."""
        named = {"torch": self.inventory.torch, "CUDA": self.examined.cuda, "NCCL": self.examined.nccl}
        return ", ".join(f"{name} {value}" for name, value in named.items() if value)


def checks(hosts: Sequence[Facts]) -> Iterator[Check]:
    """All that facts decide. What only a job shows is not among them."""
    yield from _alike(
        "torch",
        {host.host: host.build for host in hosts},
        FAULT,
        "ranks with different releases of torch or NCCL do not understand each other: install one release on all",
    )
    yield from _alike(
        "python",
        {host.host: ".".join(host.inventory.python.split(".")[:2]) for host in hosts},
        WARNING,
        "functions of the notebook are pickled for one release of Python: use the same on all",
    )
    yield from _gpus(hosts)
    yield from _alike(
        "driver",
        {host.host: host.examined.driver for host in hosts if host.inventory.gpus},
        WARNING,
        "a difference is allowed; look here first when one host fails alone",
    )
    yield from _each("name", hosts, _name)
    yield from _alike(
        "network",
        {host.host: f"MTU {host.examined.mtu}" for host in hosts},
        FAULT,
        "large messages between them may vanish: `ip link set dev INTERFACE mtu N`, the same N on all",
    )
    yield from _each("interface", hosts, _interface)
    yield from _each("clock", hosts, _clock)
    limits = [(host.host, host.limits) for host in hosts]
    yield from _judged("shared memory", [(name, _shared_memory(one)) for name, one in limits])
    yield from _judged("locked memory", [(name, _locked(one)) for name, one in limits])
    yield from _judged("open files", [(name, _files(one)) for name, one in limits])
    yield from _each("disk", hosts, _disk)
    yield from _judged("InfiniBand", [(name, _infiniband(one)) for name, one in limits])
    yield from _each("GPUDirect", hosts, _gpu_direct)
    yield from _each("PCI access control", hosts, _acs)
    yield from _judged("end of the login", [(name, _logind(one)) for name, one in limits])


def at_start(hosts: Sequence[Inventory], *, nccl: bool) -> list[Check]:
    """What would stop or slow a job on these hosts, from what its start knows anyway; only what is not fine."""
    known = [(host.host, host.limits) for host in hosts if host.limits is not None]
    found = [
        *_judged("shared memory", [(name, _shared_memory(one)) for name, one in known]),
        *_judged("open files", [(name, _files(one)) for name, one in known]),
        *_judged("end of the login", [(name, _logind(one)) for name, one in known]),
    ]
    if nccl:
        found += _judged("locked memory", [(name, _locked(one)) for name, one in known])
        found += _judged("InfiniBand", [(name, _infiniband(one)) for name, one in known] if len(hosts) > 1 else [])
    return [check for check in found if check.level != FINE]


def _alike(name: str, values: Mapping[str, str], level: str, remedy: str) -> Iterator[Check]:
    """A line for each host whose value is not the most frequent one; one line where all are alike."""
    if not values:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    others = {host: value for host, value in values.items() if value != usual}
    same = ", ".join(host for host in values if host not in others)
    if not others:
        yield Check(name, FINE, usual or "not known")
        return
    for host, value in others.items():
        yield Check(name, level, f"{host} has {value or 'none'}; {same}: {usual or 'none'}", remedy)


Judged = tuple[str, str, str]
"""Level, what was found, remedy."""


def _each(name: str, hosts: Sequence[Facts], judge: Callable[[Facts], Judged | None]) -> Iterator[Check]:
    return _judged(name, [(host.host, judge(host)) for host in hosts])


def _judged(name: str, found: Sequence[tuple[str, Judged | None]]) -> Iterator[Check]:
    """One line for the hosts with which all is well in the same words, and one for each other host.

    None: the question does not arise on this host.
    """
    judged = [(host, *one) for host, one in found if one is not None]
    fine: dict[str, list[str]] = {}
    for host, level, words, _ in judged:
        if level == FINE:
            fine.setdefault(words, []).append(host)
    for words, names in fine.items():
        yield Check(name, FINE, words if len(names) == len(found) else f"{', '.join(names)}: {words}")
    for host, level, words, remedy in judged:
        if level != FINE:
            yield Check(name, level, f"{host}: {words}", remedy)


def _gpus(hosts: Sequence[Facts]) -> Iterator[Check]:
    if not any(host.inventory.gpus for host in hosts):
        yield Check("GPUs", FINE, "no host has one; `--ranks N` runs on their processors")
        return
    yield from _alike(
        "GPUs",
        {host.host: ", ".join(dict.fromkeys(gpu.name for gpu in host.inventory.gpus)) for host in hosts},
        WARNING,
        "all ranks wait for the slowest GPU: use hosts with the same",
    )
    yield from _each("free GPUs", hosts, _free)


def _free(host: Facts) -> Judged | None:
    gpus = host.inventory.gpus
    if not gpus:
        return None
    free = sum(gpu.idle for gpu in gpus)
    holders = [*(f"GPU {gpu.index} has job {gpu.job}" for gpu in gpus if gpu.job), *host.examined.holders]
    words = "; ".join([f"{free} of {len(gpus)} free", *holders])
    return (FINE if free else WARNING), words, "wait, or use other hosts"


def _name(host: Facts) -> Judged:
    name, found = host.examined.name, host.examined.resolves
    remedy = "ranks are given addresses, so jobs run; other programs may fail: correct /etc/hosts there"
    if not found:
        return WARNING, f"its own name {name} does not resolve", remedy
    if all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found):
        return WARNING, f"its own name {name} resolves to loopback, {found[0]}", remedy
    return FINE, "own names resolve", ""


def _interface(host: Facts) -> Judged:
    found = host.examined
    if not found.interface:
        return WARNING, "no interface has an address that others reach", "look with `ip address` there"
    return FINE, f"{found.interface}" + (f", {found.speed / 1000:g} Gbit/s" if found.speed else ""), ""


def _clock(host: Facts) -> Judged:
    if abs(host.clock) < CLOCK_SECONDS:
        return FINE, "within 2 s of this machine", ""
    return (
        WARNING,
        f"{host.clock:+.1f} s from this machine",
        "times in logs cannot be compared: start chrony or ntpd there",
    )


def _shared_memory(limits: Limits) -> Judged:
    size = limits.shared_memory
    if size < 0:
        return FINE, "this system has no /dev/shm", ""
    words = f"/dev/shm has {size / 1e9:.1f} GB"
    remedy = "NCCL and DataLoader workers may die of SIGBUS: start the container with --shm-size=8g, or enlarge it"
    return (FINE, "/dev/shm has 1 GB or more", "") if size >= SHARED else (WARNING, words, remedy)


def _locked(limits: Limits) -> Judged:
    limit = limits.locked
    if limit < 0:
        return FINE, "no limit", ""
    if not limits.infiniband:
        return FINE, "limited, which counts with InfiniBand only", ""
    remedy = "NCCL cannot register memory: `* soft memlock unlimited` and hard, in /etc/security/limits.conf there"
    return FAULT, f"{limit / 1e6:.0f} MB at most", remedy


def _files(limits: Limits) -> Judged:
    limit = limits.files
    if limit < 0 or limit >= FILES:
        return FINE, "1,024 or more", ""
    return WARNING, f"{limit} at most", "workers of a DataLoader need more: `ulimit -n 65536` in the login"


def _disk(host: Facts) -> Judged:
    free = host.inventory.disk
    if free >= DISK:
        return FINE, "2 GB or more are free for our code and data", ""
    return WARNING, f"{free / 1e9:.1f} GB are free", "name another disk with --host-option scratch=DIR"


def _infiniband(limits: Limits) -> Judged | None:
    ports = limits.infiniband
    if not ports:
        return None
    active = [port for port in ports if port.state == "ACTIVE"]
    words = ", ".join(f"{port.port} {port.layer} {port.state} {port.rate}" for port in ports)
    if active:
        return FINE, words, ""
    return FAULT, f"no port is active: {words}", "look with `ibstat` there; without, NCCL uses the slower network"


def _gpu_direct(host: Facts) -> Judged | None:
    active = any(port.state == "ACTIVE" for port in host.limits.infiniband)
    if not (active and host.inventory.gpus):
        return None
    if host.examined.peer_memory:
        return FINE, "nvidia_peermem is loaded", ""
    remedy = "`modprobe nvidia-peermem` there, unless the kernel has DMA-BUF (5.12 or newer with the open driver)"
    return WARNING, "nvidia_peermem is not loaded: traffic may go through the processor's memory", remedy


def _acs(host: Facts) -> Judged | None:
    if len(host.inventory.gpus) < 2:
        return None
    if host.examined.acs < 0:
        return FINE, "only root can read it", ""
    if not host.examined.acs:
        return FINE, "off", ""
    remedy = "GPUs reach each other slowly, or hang: switch ACS off in the BIOS, or set NCCL_P2P_DISABLE=1"
    return WARNING, f"on, in {host.examined.acs} PCI bridges", remedy


def _logind(limits: Limits) -> Judged | None:
    if not limits.kills:
        return None
    remedy = "a job ends with your last login there: `loginctl enable-linger`"
    return WARNING, "KillUserProcesses=yes", remedy


@dataclass(frozen=True)
class Measured:
    """An all-reduce over all hosts: its bytes, and how long it took."""

    size: int
    seconds: float
    ranks: int
    backend: str

    @property
    def bus(self) -> float:
        """Bytes a second, counted as nccl-tests do: what each link carries, whatever the number of ranks."""
        return self.size / self.seconds * 2 * (self.ranks - 1) / self.ranks


def bandwidth(measured: Measured, hosts: Sequence[Facts]) -> Check:
    """The measured bandwidth beside what the slowest link can do."""
    tried = f"{measured.backend}, {measured.ranks} ranks, {measured.size >> 20} MiB"
    words = f"{tried}: {measured.bus / 1e9:.2f} GB/s on the bus"
    speeds = [_link(host) for host in hosts]
    if not all(speeds):
        return Check("all-reduce", FINE, f"{words}; what the links can do is not told")
    link = min(speeds)
    words += f" of {link / 1e9:.2f} that the slowest link can do"
    if measured.bus >= ENOUGH * link:
        return Check("all-reduce", FINE, words)
    return Check(
        "all-reduce",
        WARNING,
        words,
        "see which network was taken: NCCL_DEBUG=INFO shows NET/IB or NET/Socket; name it with NCCL_SOCKET_IFNAME",
    )


def _link(host: Facts) -> float:
    """Bytes a second of its fastest active link; 0 where it is not told."""
    rates = [port.rate.partition(" ")[0] for port in host.limits.infiniband if port.state == "ACTIVE"]
    gigabits = [float(rate) for rate in rates if rate.replace(".", "", 1).isdigit()]
    return max([*(rate * 1e9 / 8 for rate in gigabits), host.examined.speed * 1e6 / 8])
