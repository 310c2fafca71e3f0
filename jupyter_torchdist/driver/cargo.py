"""What a node needs before its ranks start, on its way there: captured data, directories of ``--sync``, wheels."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..protocol.disk import size_of
from ..protocol.errors import LaunchError
from ..protocol.paths import Home, JobPaths
from ..protocol.plan import NodePlan, Plan
from ..protocol.wire.messages import Fetched, Missing
from ..store.blobs import digest_of
from ..store.jobdir import read_manifest
from ..views.wording import first_few
from .syncing import is_synced, source, synced
from .wheels import Getting

PIECE = 256 * 1024
"""Bytes of a blob in one frame."""

ROOM = 4 * PIECE
"""Bytes of blobs that may be queued in a channel: a ping waits behind them, at 8 Mbit/s for a second."""

LARGE = 16 * 1024 * 1024
"""Bytes of a blob that goes along the nodes: it takes longer than a connection that fails."""

Frame = tuple[dict[str, Any], bytes]

Fetch = tuple[tuple[str, int], dict[str, int]]
"""Where a node gets blobs from another one, and their sizes."""


def cargoes(paths: JobPaths, plan: Plan, blobs: Path) -> dict[str, Cargo]:
    """What each node needs, by its name. Raises ``LaunchError`` for packages that are not to be had."""
    manifest = read_manifest(paths)
    digests = tuple(dict.fromkeys(blob.digest for blob in manifest.blobs))
    needed = frozenset(package.name for package in manifest.packages if package.certain)
    place = Home(paths.root.parents[1]).wheels
    gettings: dict[str, Getting] = {}
    for node in plan.nodes:
        if node.packages is not None and node.packages.pins and node.packages.key not in gettings:
            key = node.packages.key
            hosts = [one.called for one in plan.nodes if one.packages and one.packages.key == key]
            gettings[key] = Getting(node.packages, place / key, needed, first_few(hosts))
    chains = Chains()
    return {
        node.name: Cargo(plan, node, blobs, digests, chains, gettings.get(node.packages.key if node.packages else ""))
        for node in plan.nodes
    }


class Chains:
    """Which node gets large blobs from which other one: from the one that answered before it.

    So each blob goes along the nodes, and leaves this machine once. A node that has a blob is the first in its chain.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_hex(32)
        self._chains: dict[str, list[str]] = {}
        """The nodes that have a blob, or get it, by its digest."""
        self._places: dict[str, tuple[str, int]] = {}
        """Where a node is asked, by its name."""

    def answered(
        self, node: str, place: tuple[str, int] | None, has: Collection[str], lacks: Mapping[str, int]
    ) -> list[Fetch]:
        """From where the node gets blobs. ``lacks``: with their sizes. The rest comes from this machine."""
        if place:
            self._places[node] = place
        found: dict[str, dict[str, int]] = {}
        for digest in has:
            chain = self._chains.setdefault(digest, [])
            if node not in chain:
                chain.insert(0, node)
        for digest, size in lacks.items():
            chain = self._chains.setdefault(digest, [])
            if node not in chain:
                chain.append(node)
            before = [name for name in chain[: chain.index(node)] if name in self._places]
            if before:
                found.setdefault(before[-1], {})[digest] = size
        return [(self._places[name], blobs) for name, blobs in found.items()]


class Cargo:
    """For one node. ``blobs`` is the driver's directory of captured data; the node needs those of ``digests``.

    ``getting``: the wheels of ``--env-sync``; None without it.
    """

    def __init__(
        self,
        plan: Plan,
        node: NodePlan,
        blobs: Path,
        digests: Sequence[str],
        chains: Chains,
        getting: Getting | None = None,
    ) -> None:
        self._plan, self._node, self._blobs, self._digests = plan, node, blobs, tuple(digests)
        self._getting, self._chains = getting, chains
        self._wanted: set[str] = set()
        """What the node still lacks."""
        self.total: int | None = None
        """Bytes that the node lacked when it was asked; None before it has answered."""
        self.sent = 0
        self._built = False
        self._going: deque[Iterator[Frame]] = deque()
        """Pieces that are not yet queued in the channel (see ``ROOM``)."""

    @property
    def getting(self) -> bool:
        """Whether the wheels are still to be got. Raises ``LaunchError`` when they are not to be had."""
        if self._getting is None:
            return False
        if self._getting.error is not None:
            raise self._getting.error
        return self._getting.found is None

    @property
    def left(self) -> str:
        """A sentence on packages that hosts do not get; empty if they get all."""
        found = self._getting.found if self._getting else None
        if self._getting is None or found is None or not found.left:
            return ""
        return f"--env-sync leaves out what has no wheel for {self._getting.hosts}: {', '.join(found.left)}"

    @property
    def wheels(self) -> Mapping[str, str]:
        """Digests by file name."""
        return self._getting.found.files if self._getting and self._getting.found else {}

    def asked(self) -> dict[str, Any]:
        """The part of ``prepare`` by which the node knows what it needs."""
        store = {"blobs": list(self._digests), "store": str(self._blobs)}
        listen = {"secret": self._chains.secret, "address": self._node.address} if self._large else {}
        return {**store, **synced(self._plan), "wheels": dict(self.wheels), **listen}

    @cached_property
    def _large(self) -> dict[str, int]:
        """The sizes of large blobs, if there are nodes to send them along. Known once the wheels are."""
        if len(self._plan.nodes) == 1:
            return {}
        sizes = {digest: size_of(self._path(digest)) for digest in {*self._digests, *self.wheels.values()}}
        return {digest: size for digest, size in sizes.items() if size >= LARGE}

    def lacks(self, said: Missing) -> list[dict[str, Any]]:
        """The node's answer. Returns what it is told in return: what it gets from other nodes."""
        self._built = said.built
        self._wanted, self.sent = set(said.blobs), 0
        self.total = sum(self._path(name).stat().st_size - said.have.get(name, 0) for name in said.blobs)
        lacked = {digest: size for digest, size in self._large.items() if digest in self._wanted}
        fetches = self._chains.answered(self._node.name, said.place, self._large.keys() - lacked, lacked)
        elsewhere = {digest for _, blobs in fetches for digest in blobs}
        self._going = deque(self._pieces(name, said.have.get(name, 0)) for name in said.blobs if name not in elsewhere)
        common = {"type": "fetch", "job": self._plan.job, "secret": self._chains.secret}
        return [{**common, "address": place[0], "port": place[1], "blobs": blobs} for place, blobs in fetches]

    def fetched(self, said: Fetched) -> None:
        """What has come from another node; what does not come from there goes from here."""
        self.sent += said.size
        self._going.extend(self._pieces(name, have) for name, have in said.left.items() if name in self._wanted)

    def stored(self, name: str, right: bool) -> None:
        """The node has all of it; if it is not ``right``, it goes once more."""
        if right:
            self._wanted.discard(name)
        elif name in self._wanted:
            self._damaged(name)
            self._going.append(self._pieces(name))

    def _damaged(self, name: str) -> None:
        """Raises ``LaunchError`` when the data is damaged here: it would never come whole."""
        path = self._path(name)
        if not is_synced(name) and digest_of(path) != name:
            raise LaunchError(f"{path} is damaged: it is not what its name says", "delete it, and run the cell again")

    def _path(self, name: str) -> Path:
        wheel = self._getting.path(name) if self._getting else None
        return wheel or source(self._plan, self._blobs, name)

    def _pieces(self, name: str, offset: int = 0) -> Iterator[Frame]:
        path = self._path(name)
        size = path.stat().st_size
        with open(path, "rb") as file:
            file.seek(offset)
            last = False
            while not last:
                data = file.read(PIECE)
                last = not data or offset + len(data) >= size
                yield {"type": "blob", "digest": name, "offset": offset, "last": last}, data
                offset += len(data)
                self.sent += len(data)

    def frame(self) -> Frame | None:
        """The next piece to send; None when all are on their way."""
        while self._going:
            if (piece := next(self._going[0], None)) is not None:
                return piece
            self._going.popleft()
        return None

    @property
    def going(self) -> bool:
        """Whether there are pieces to send."""
        return bool(self._going)

    def stop(self) -> None:
        """The channel broke: send nothing more before the node is asked again."""
        self._going.clear()
        self._wanted.clear()
        self.total = None

    @property
    def there(self) -> bool:
        """Whether the node has all files."""
        return self.total is not None and not self._wanted

    @property
    def building(self) -> bool:
        """Whether the node is to make an environment, or makes one."""
        return self.there and bool(self.wheels) and not self._built

    def built(self) -> None:
        self._built = True

    def end(self) -> None:
        """Get and send nothing more."""
        self.stop()
        if self._getting is not None:
            self._getting.close()

    @property
    def complete(self) -> bool:
        """Whether the ranks may start."""
        return self.there and not self.building
