"""Which files of a job have grown, and shipping what is new with its offset."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..protocol.channel import Channel
from ..protocol.events import Event, Source, parse_lines
from ..protocol.frames import CHUNK
from ..protocol.paths import JobPaths

_FIRST = 4096
"""Bytes in the first frame; each next one may have twice as many. A channel that breaks soon still brings some."""

_SETTLED = 1_000_000_000
"""Nanoseconds after which a directory's time has changed if anything in it has: clocks of file systems are coarse."""

_BACKLOG = 2 * CHUNK
"""Bytes a slow driver may have outstanding before no more are read for it."""


@dataclass
class EventTail:
    """New events of one ``*.events`` file, whole lines only."""

    path: Path
    source: Source | None
    """Who may write into it; None: anybody."""
    offset: int = 0

    def read(self) -> list[Event]:
        try:
            if os.stat(self.path).st_size <= self.offset:
                return []
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                parsed = parse_lines(file.read(CHUNK), self.source)
        except OSError:  # not there yet, or no longer
            return []
        self.offset += parsed.taken
        return parsed.events


@dataclass
class Shipment:
    """What one driver has of one job's files on this node.

    ``shared``: the driver sees the very files (this machine), so only the growth of event files is told.
    """

    channel: Channel
    paths: JobPaths
    node: str
    shared: bool
    offsets: dict[str, int] = field(default_factory=dict)
    _chunk: int = _FIRST
    _listed: dict[Path, tuple[int, list[str]]] = field(default_factory=dict)
    """By directory: when it last changed, and what was in it."""
    _gauges: tuple[int, int] = (0, 0)
    """Which of its versions the driver has: time and inode."""

    def pump(self) -> bool:
        """Tell or send what is new; whether the driver has everything there is now."""
        if not self.shared:
            self._send_gauges()  # first: a flood of lines need not hold them up
        for name, size in self._files():
            known = self.offsets.get(name, -1 if self.shared else 0)
            if size == known or (known > size and not self.shared):
                continue
            if self.shared:
                self.offsets[name] = size
                self.channel.send({"type": "grown", "job": self.paths.job, "file": name, "size": size})
                continue
            if not self._send(name, known, size):
                return False
        return self.channel.pending == 0

    def _send_gauges(self) -> None:
        """The one file that is replaced, not appended to: sent whole, and only its latest version."""
        path = self.paths.node(self.node).gauges
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            version = status.st_mtime_ns, status.st_ino
            if version != self._gauges and self.channel.pending <= _BACKLOG:
                name = f"nodes/{self.node}/{path.name}"
                with open(path, "rb") as file:
                    self.channel.send({"type": "whole", "job": self.paths.job, "file": name}, file.read(CHUNK))
                self._gauges = version

    def _send(self, name: str, offset: int, size: int) -> bool:
        with open(self.paths.root / name, "rb") as file:
            file.seek(offset)
            while offset < size:
                if self.channel.pending > _BACKLOG:
                    return False
                data = file.read(min(self._chunk, size - offset))
                if not data:
                    break
                self.channel.send({"type": "bytes", "job": self.paths.job, "file": name, "offset": offset}, data)
                offset += len(data)
                self.offsets[name] = offset
                self._chunk = min(CHUNK, 2 * self._chunk)
        return True

    def _files(self) -> Iterator[tuple[str, int]]:
        folders = [(f"nodes/{self.node}", self.paths.node(self.node).root)]
        if not self.shared:
            folders.append(("results", self.paths.results))
        for prefix, folder in folders:
            for name in self._names(folder):
                with contextlib.suppress(FileNotFoundError):
                    yield f"{prefix}/{name}", os.stat(f"{folder}/{name}").st_size

    def _names(self, folder: Path) -> list[str]:
        """Files to tell of, buffers before the result that names them. Listed anew only when the directory changed."""
        try:
            changed = os.stat(folder).st_mtime_ns
            known = self._listed.get(folder)
            if known is not None and known[0] == changed:
                return known[1]
            names = sorted(name for name in os.listdir(folder) if self._wanted(name))
        except FileNotFoundError:
            return []
        if time.time_ns() - changed > _SETTLED:
            self._listed[folder] = changed, names
        return names

    def _wanted(self, name: str) -> bool:
        if self.shared:
            return name.endswith(".events")
        replaced = name == self.paths.node(self.node).gauges.name
        return not (name.startswith(".") or name.endswith(".tmp") or replaced)
