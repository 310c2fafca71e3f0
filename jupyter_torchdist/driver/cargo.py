"""What a node needs before its ranks start, on its way there: captured data, directories of ``--sync``, wheels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..protocol.paths import Home, JobPaths
from ..protocol.plan import Plan
from ..store.jobdir import read_manifest
from ..views.wording import first_few
from .syncing import source, synced
from .wheels import Getting

PIECE = 256 * 1024
"""Bytes of a blob in one frame."""

ROOM = 4 * PIECE
"""Bytes of blobs that may be queued in a channel: a ping waits behind them, at 8 Mbit/s for a second."""

Frame = tuple[dict[str, Any], bytes]


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
    return {
        node.name: Cargo(plan, blobs, digests, gettings.get(node.packages.key) if node.packages else None)
        for node in plan.nodes
    }


class Cargo:
    """For one node. ``blobs`` is the driver's directory of captured data; the node needs those of ``digests``.

    ``getting``: the wheels of ``--env-sync``; None without it.
    """

    def __init__(self, plan: Plan, blobs: Path, digests: Sequence[str], getting: Getting | None) -> None:
        self._plan, self._blobs, self._digests, self._getting = plan, blobs, tuple(digests), getting
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
        return {**store, **synced(self._plan), "wheels": dict(self.wheels)}

    def lacks(self, names: Sequence[str], *, built: bool) -> None:
        """The node's answer. ``built``: it has the environment."""
        self._built = built
        self._wanted, self.sent = set(names), 0
        self.total = sum(self._path(name).stat().st_size for name in names)
        self._going = deque(self._pieces(name) for name in names)

    def stored(self, name: str, right: bool) -> None:
        """The node has all of it; if it is not ``right``, it goes once more."""
        if right:
            self._wanted.discard(name)
        elif name in self._wanted:
            self._going.append(self._pieces(name))

    def _path(self, name: str) -> Path:
        wheel = self._getting.path(name) if self._getting else None
        return wheel or source(self._plan, self._blobs, name)

    def _pieces(self, name: str) -> Iterator[Frame]:
        path = self._path(name)
        size = path.stat().st_size
        with open(path, "rb") as file:
            offset, last = 0, False
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
