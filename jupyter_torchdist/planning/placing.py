"""Which of several hosts get ranks, and how many each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..protocol.errors import ResourceError
from ..protocol.plan import Inventory


def places(wanted: int | None, inventories: Sequence[Inventory], free: Sequence[int]) -> list[int]:
    """Ranks on each host. ``wanted`` in all; None: all that are free. ``free``: how many each host can take.

    A host with ``slots`` gets so many. The others share the rest as evenly as their room allows, the first ones more.
    Raises ``ResourceError`` when that is impossible.
    """
    if wanted is None:
        return [room if host.slots is None else host.slots for host, room in zip(inventories, free, strict=True)]
    given = [host.slots or 0 for host in inventories]
    open_ones = [index for index, host in enumerate(inventories) if host.slots is None]
    rest = wanted - sum(given)
    if rest < len(open_ones) or (rest and not open_ones):
        raise _impossible(wanted, inventories, sum(given), open_ones)
    for _ in range(rest):
        takers = [index for index in open_ones if given[index] < free[index]]
        if not takers:
            rooms = ", ".join(f"{host.host} {room}" for host, room in zip(inventories, free, strict=True))
            raise ResourceError(f"{wanted} ranks do not fit on the hosts; they have room for: {rooms}", "ask for fewer")
        given[min(takers, key=lambda index: given[index])] += 1
    return given


def _impossible(wanted: int, hosts: Sequence[Inventory], fixed: int, open_ones: Sequence[int]) -> ResourceError:
    if open_ones:
        return ResourceError(
            f"{len(hosts)} hosts need more than {wanted} ranks: each gets at least one"
            + (f", and {fixed} ranks have a host by its :N" if fixed else ""),
            f"ask for at least {fixed + len(open_ones)}, or name fewer hosts",
        )
    return ResourceError(
        f"{wanted} ranks were asked for, and the hosts get {fixed} by their :N",
        "leave out the number of ranks, or the :N of a host",
    )


def with_gpus_of_type(kind: str, inventories: Sequence[Inventory], *, leave_out: bool) -> list[Inventory]:
    """The inventories with only their GPUs of this name. ``leave_out``: without the hosts that have none.

    Raises ``ResourceError`` that says what a host has instead.
    """
    found = [replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu.is_a(kind))) for host in inventories]
    without = [host for host, left in zip(inventories, found, strict=True) if not left.gpus]
    if without and (not leave_out or len(without) == len(found)):
        raise ResourceError(
            "; ".join(f"{host.host} has no GPU {kind}: it has {_gpus_of(host)}" for host in without),
            "name one of these with --gpu-type, or --ranks N for a rehearsal on the CPU",
        )
    return [host for host in found if host.gpus]


def as_few_as_will_do(wanted: int | None, inventories: Sequence[Inventory], room: Sequence[int]) -> list[Inventory]:
    """Hosts with the most room until ``wanted`` ranks fit, in the given order; all that have room for None.

    ``room``: how many ranks each can take. If they never fit: all hosts, for the caller's message.
    """
    chosen: list[int] = []
    for index in sorted(range(len(room)), key=lambda index: -room[index]):
        if wanted is not None and sum(room[one] for one in chosen) >= wanted:
            break
        if room[index]:
            chosen.append(index)
    return [inventories[index] for index in sorted(chosen)] or list(inventories)


def _gpus_of(host: Inventory) -> str:
    names = [gpu.name for gpu in host.gpus]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "none"
