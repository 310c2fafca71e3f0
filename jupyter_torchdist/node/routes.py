"""Addresses and interfaces of this node, from the routes of the kernel."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import replace

from ..protocol.plan import Plan
from ..protocol.wire.assignment import Assignment

_SIOCGIFADDR = 0x8915
"""netdevice(7)."""


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
    """Our addresses for other nodes; first that over which the login with this environment came (sshd(8))."""
    own = interfaces()
    came = environ.get("SSH_CONNECTION", "").split()[2:3]
    return list(dict.fromkeys([*(address for address in came if address in own), *own]))


def with_route(assignment: Assignment) -> Plan:
    """The plan with our own address and interface, where it leaves them open. Raises ``OSError``: no route."""
    node = assignment.node_plan()
    if node.interface:
        return assignment.plan
    towards = assignment.rendezvous[0] if assignment.rendezvous else node.address
    address, interface = route_to(towards)
    found = replace(node, address=address, interface=interface)
    nodes = tuple(found if one.name == node.name else one for one in assignment.plan.nodes)
    return replace(assignment.plan, nodes=nodes)
