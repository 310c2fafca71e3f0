"""Facts about hosts, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jupyter_torchdist.diagnosis.hosts import FAULT, FINE, WARNING, Facts, Measured, at_start, bandwidth, checks
from jupyter_torchdist.node.examine import acs_control, examine
from jupyter_torchdist.protocol.machine.inventory import local_inventory
from jupyter_torchdist.protocol.plan import Gpu, InfinibandPort, Inventory, Limits
from jupyter_torchdist.protocol.wire.reports import Examined

GPUS = tuple(Gpu(f"GPU-{index}", index, "H200", 141_000_000_000, 0) for index in range(8))
PORT = InfinibandPort("mlx5_0:1", "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand")
EXAMINED = Examined(
    name="gpu",
    resolves=("10.0.0.1",),
    interface="eth0",
    mtu=9000,
    speed=25_000,
    cuda="12.8",
    nccl="2.27.5",
    driver="580.65",
    peer_memory=True,
    acs=0,
    holders=(),
)
LIMITS = Limits(shared_memory=64_000_000_000, locked=-1, files=65536, infiniband=(PORT,), kills=False)
INVENTORY = Inventory("gpu1", 96, 10**12, GPUS, "3.11.4", "2.13.0", disk=10**12, limits=LIMITS)
ONE = Facts(INVENTORY, EXAMINED)
TWO = Facts(replace(INVENTORY, host="gpu2"), EXAMINED)


def said(*hosts: Facts) -> list[tuple[str, str, str]]:
    """What is not fine."""
    return [(check.level, check.name, check.found) for check in checks(hosts) if check.level != FINE]


def examined(**changes: Any) -> Facts:
    return replace(TWO, examined=replace(EXAMINED, **changes))


def limited(**changes: Any) -> Facts:
    return having(limits=replace(LIMITS, **changes))


def having(**changes: Any) -> Facts:
    return replace(TWO, inventory=replace(TWO.inventory, **changes))


def test_all_is_fine_in_one_line_each() -> None:
    found = list(checks([ONE, TWO]))
    assert {check.level for check in found} == {FINE}
    words = [f"{check.name}: {check.found}" for check in found]
    assert "torch: torch 2.13.0, CUDA 12.8, NCCL 2.27.5" in words
    assert "InfiniBand: mlx5_0:1 InfiniBand ACTIVE 400 Gb/sec (4X NDR)" in words
    assert len(words) == len(set(words))


BUSY = replace(GPUS[0], pids=(4711,))


@pytest.mark.parametrize(
    ("host", "level", "name", "words"),
    [
        (having(torch="2.12.0"), FAULT, "torch", "gpu2 has torch 2.12.0, CUDA 12.8, NCCL 2.27.5; gpu1: torch 2.13.0"),
        (examined(nccl="2.26.2"), FAULT, "torch", "NCCL 2.26.2; gpu1: "),
        (examined(cuda=""), FAULT, "torch", "gpu2 has torch 2.13.0, NCCL"),
        (having(python="3.12.1"), WARNING, "python", "gpu2 has 3.12; gpu1: 3.11"),
        (having(gpus=(replace(GPUS[0], name="A10"),)), WARNING, "GPUs", "gpu2 has A10; gpu1: H200"),
        (examined(driver="550.1"), WARNING, "driver", "gpu2 has 550.1; gpu1: 580.65"),
        (examined(resolves=()), WARNING, "name", "gpu2: its own name gpu does not resolve"),
        (examined(resolves=("127.0.1.1",)), WARNING, "name", "gpu2: its own name gpu resolves to loopback, 127.0.1.1"),
        (examined(mtu=1500), FAULT, "network", "gpu2 has MTU 1500; gpu1: MTU 9000"),
        (examined(interface="", mtu=9000), WARNING, "interface", "gpu2: no interface has an address"),
        (replace(TWO, clock=-7.5), WARNING, "clock", "gpu2: -7.5 s from this machine"),
        (limited(shared_memory=64_000_000), WARNING, "shared memory", "gpu2: /dev/shm has 0.1 GB"),
        (limited(locked=65536), FAULT, "locked memory", "gpu2: 0 MB at most"),
        (limited(files=256), WARNING, "open files", "gpu2: 256 at most"),
        (having(disk=1_000_000), WARNING, "disk", "gpu2: 0.0 GB are free"),
        (limited(infiniband=(replace(PORT, state="DOWN"),)), FAULT, "InfiniBand", "gpu2: no port is active"),
        (examined(peer_memory=False), WARNING, "GPUDirect", "gpu2: nvidia_peermem is not loaded"),
        (examined(acs=3), WARNING, "PCI access control", "gpu2: on, in 3 PCI bridges"),
        (limited(kills=True), WARNING, "end of the login", "gpu2: KillUserProcesses=yes"),
    ],
)
def test_what_differs_or_lacks_is_named_with_its_host(host: Facts, level: str, name: str, words: str) -> None:
    found = said(ONE, host)
    assert [one[:2] for one in found] == [(level, name)]
    assert words in found[0][2]
    assert all(check.remedy for check in checks([ONE, host]) if check.level != FINE)


def test_who_has_the_gpus() -> None:
    host = replace(having(gpus=(BUSY,)), examined=replace(EXAMINED, holders=("GPU 0: alice, python train.py",)))
    assert (WARNING, "free GPUs", "gpu2: 0 of 1 free; GPU 0: alice, python train.py") in said(host)


def test_hosts_without_gpus_are_asked_nothing_of_gpus() -> None:
    limits = replace(LIMITS, infiniband=(), locked=65536)
    plain = replace(ONE, inventory=replace(INVENTORY, gpus=(), limits=limits))
    assert said(plain) == []
    assert {check.name for check in checks([plain])}.isdisjoint({"GPUDirect", "PCI access control", "driver"})


def test_the_bandwidth_beside_the_slowest_link() -> None:
    slow = replace(limited(infiniband=()), examined=replace(EXAMINED, speed=10_000))
    measured = Measured(size=64 << 20, seconds=0.064, ranks=2, backend="nccl")
    check = bandwidth(measured, [ONE, slow])
    assert check.found == "nccl, 2 ranks, 64 MiB: 1.05 GB/s on the bus of 1.25 that the slowest link can do"
    assert check.level == FINE
    assert bandwidth(measured, [ONE, TWO]).level == WARNING
    assert bandwidth(measured, [replace(slow, examined=replace(EXAMINED, speed=0))]).found.endswith("is not told")


def test_this_machine_can_be_examined() -> None:
    found = examine()
    assert found == Examined.from_json(found.to_json())
    assert found.name
    here = local_inventory()
    assert here.limits is not None
    assert here.limits.files
    assert here == Inventory.from_json(here.to_json())


@pytest.mark.parametrize(
    ("changes", "nccl", "words"),
    [
        ({"shared_memory": 64_000_000}, False, "gpu2: /dev/shm has 0.1 GB"),
        ({"files": 256}, False, "gpu2: 256 at most"),
        ({"kills": True}, False, "gpu2: KillUserProcesses=yes"),
        ({"locked": 65536}, True, "gpu2: 0 MB at most"),
        ({"infiniband": (replace(PORT, state="DOWN"),)}, True, "gpu2: no port is active"),
    ],
)
def test_what_the_start_of_a_job_says_by_itself(changes: dict[str, Any], nccl: bool, words: str) -> None:
    hosts = [INVENTORY, limited(**changes).inventory]
    [check] = at_start(hosts, nccl=nccl)
    assert check.found.startswith(words)
    assert check.remedy
    assert at_start(hosts[:1], nccl=nccl) == []


def test_the_start_says_nothing_of_what_does_not_matter_or_is_not_known() -> None:
    bad = limited(locked=65536, infiniband=(replace(PORT, state="DOWN"),)).inventory
    assert at_start([INVENTORY, bad], nccl=False) == []
    assert at_start([limited(infiniband=(replace(PORT, state="DOWN"),)).inventory], nccl=True) == [], "one host"
    assert at_start([replace(INVENTORY, limits=None), limited(shared_memory=-1).inventory], nccl=True) == []
    with pytest.raises(ValueError, match="gpu1 has not said"):
        list(checks([replace(ONE, inventory=replace(INVENTORY, limits=None))]))


def space(*capabilities: tuple[int, int, bytes]) -> bytes:
    """A configuration space of 4096 bytes with extended capabilities: offset, id, bytes after the header."""
    data = bytearray(4096)
    for (offset, kind, rest), following in zip(capabilities, [*(one[0] for one in capabilities[1:]), 0], strict=True):
        data[offset : offset + 4] = (kind | 1 << 16 | following << 20).to_bytes(4, "little")
        data[offset + 4 : offset + 4 + len(rest)] = rest
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "control"),
    [
        (space((0x100, 0x0001, b""), (0x140, 0x000D, b"\x5f\x00\x1d\x00")), 0x1D),
        (space((0x100, 0x000D, b"\x5f\x00\x00\x00")), 0),
        (space((0x100, 0x0001, b"")), 0),
        (bytes(4096), 0),
        (bytes(256), 0),
        (space((0x100, 0x0001, b""), (0x100, 0x0002, b"")), 0),  # it points at itself
    ],
)
def test_access_control_is_read_from_the_configuration_space(data: bytes, control: int) -> None:
    assert acs_control(data) == control
