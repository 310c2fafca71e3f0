"""How many ranks each of several hosts gets."""

from __future__ import annotations

from collections.abc import Sequence

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
