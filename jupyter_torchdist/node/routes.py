"""Addresses and interfaces of this node, from the routes of the kernel."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import replace

from ..protocol.machine.inventory import gpus, visible
from ..protocol.plan import NodePlan, Plan, is_open
from ..protocol.wire.assignment import Assignment

_SIOCGIFADDR = 0x8915
"""netdevice(7)."""


ADDRESS = "TORCHDIST_NODE_ADDRESS"
"""A variable with the address by which an engine knows the node."""


def interfaces() -> dict[str, str]:
    """{address: interface} of this node, without loopback."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            address, _, _, scope, _, name = line.split()
            if scope == "00":  # a global address
                found[str(ipaddress.IPv6Address(int(address, 16)))] = name
    return {address: name for address, name in found.items() if not ipaddress.ip_address(address).is_loopback}


def route_to(address: str) -> tuple[str, str]:
    """Our address and interface on the way to ``address``, which may be our own. Raises ``OSError``: no route."""
    own = interfaces()
    if address in own:
        return address, own[address]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        mine = str(probe.getsockname()[0])
    return mine, own.get(mine, "lo")


def addresses(environ: Mapping[str, str]) -> list[str]:
    """Our addresses for other nodes; first that over which the login with this environment came.

    SSH tells it (sshd(8)), and an engine that knows it. Of a node of Slurm it is what the node's name means.
    """
    own = interfaces()
    came = environ.get(ADDRESS, "").split() or environ.get("SSH_CONNECTION", "").split()[2:3]
    if name := environ.get("SLURMD_NODENAME"):
        with contextlib.suppress(OSError):
            came = [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([*(address for address in came if address in own), *own]))


def with_route(assignment: Assignment) -> Plan:
    """The plan with our own address, interface and GPUs, where it leaves them open.

    Raises ``OSError``: no route, or fewer GPUs than ranks.
    """
    node = assignment.node_plan()
    environ = assignment.world.environ
    found = replace(node, gpus=_given(node, environ))
    if not node.interface:
        towards = assignment.rendezvous[0] if assignment.rendezvous else node.address
        address, interface = route_to(towards or next(iter(addresses(environ)), "127.0.0.1"))
        found = replace(found, address=address, interface=interface)
    nodes = tuple(found if one.name == node.name else one for one in assignment.plan.nodes)
    return replace(assignment.plan, nodes=nodes)


def _given(node: NodePlan, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs of the node's ranks: for those that were left to the engine, what it made visible here."""
    if not any(map(is_open, node.gpus)):
        return node.gpus
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    found = [gpu.uuid for gpu in visible(gpus(), allowed)] or list(filter(None, (allowed or "").split(",")))
    if len(found) < len(node.gpus):
        raise OSError(f"the engine gave {len(found)} GPUs, and {len(node.gpus)} ranks need one each")
    return tuple(found[: len(node.gpus)])
