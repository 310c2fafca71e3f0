"""Finds which files of a job have grown, and ships the new bytes with their offset."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.disk import open_plain
from ...protocol.paths import JobPaths, safe_name
from ...protocol.wire.channel import Channel
from ...protocol.wire.frames import CHUNK

_FIRST = 4096
"""Bytes in the first frame; each later frame may be twice as large. A channel that breaks early still delivers some."""

_SETTLED = 1_000_000_000
"""A directory's mtime is reliable only when it is older than these nanoseconds: file systems have coarse clocks."""

_BACKLOG = 2 * CHUNK
"""When a slow driver has so many bytes outstanding, no more are read for it."""


@dataclass
class Shipment:
    """Sends one job's files on this node to one driver, and keeps what the driver already has.

    ``shared``: the driver can read the files itself (this machine), so it is told only the new sizes of event files.
    """

    channel: Channel
    paths: JobPaths
    node: str
    shared: bool
    offsets: dict[str, int] = field(default_factory=dict)
    blobs: tuple[str, ...] = ()
    """Digests of captured data that the driver lacks."""
    attempt: int = 1
    """That the driver knows of."""
    _chunk: int = _FIRST
    _listed: dict[Path, tuple[int, list[str]]] = field(default_factory=dict)
    """By directory: its mtime, and the file names in it."""
    _gauges: tuple[int, int] = (0, 0)
    """The version of the gauges file that the driver has: mtime and inode."""
    _work: deque[tuple[str, int]] | None = None
    """What is left to send of the files that the cell wrote; None before the job's end."""

    def pump(self) -> bool:
        """Report or send what is new. Returns whether the driver now has everything."""
        if not self.shared:
            self._send_gauges()  # first, so that much output does not delay them
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

    def send_work(self, files: Mapping[str, int]) -> bool:
        """Send what the cell wrote: sizes by path below the work directory. Returns whether the driver has it all."""
        if self._work is None:
            self._work = deque((f"{self.paths.work.name}/{name}", size) for name, size in files.items())
        while self._work:
            name, size = self._work[0]
            with contextlib.suppress(OSError):  # removed since, by a process that has left the job
                if size == 0 and name not in self.offsets:
                    self.channel.send({"type": "bytes", "job": self.paths.job, "file": name, "offset": 0})
                elif not self._send(name, self.offsets.get(name, 0), size):
                    return False
            self._work.popleft()
        return self.channel.pending == 0

    def _send_gauges(self) -> None:
        """Send the gauges file. It is replaced, not appended to, so its latest version is sent as a whole."""
        path = self.paths.node(self.node).gauges
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            version = status.st_mtime_ns, status.st_ino
            if version != self._gauges and self.channel.pending <= _BACKLOG:
                name = f"nodes/{self.node}/{path.name}"
                with open_plain(path) as file:
                    self.channel.send({"type": "whole", "job": self.paths.job, "file": name}, file.read(CHUNK))
                self._gauges = version

    def _send(self, name: str, offset: int, size: int) -> bool:
        with open_plain(self._path(name)) as file:
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

    def _path(self, name: str) -> Path:
        scratch = self.paths.root.parent.parent
        return (scratch / name).resolve() if name.startswith("blobs/") else self.paths.root / name

    def _files(self) -> Iterator[tuple[str, int]]:
        folders = [(f"nodes/{self.node}", self.paths.node(self.node).root)]
        if not self.shared:
            folders.append(("results", self.paths.results))
        for prefix, folder in folders:
            for name in self._names(folder):
                with contextlib.suppress(FileNotFoundError):
                    yield f"{prefix}/{name}", os.stat(f"{folder}/{name}").st_size
        for digest in self.blobs:
            name = f"blobs/{safe_name(digest)}"
            with contextlib.suppress(FileNotFoundError):
                yield name, self._path(name).stat().st_size

    def _names(self, folder: Path) -> list[str]:
        """Files to report, buffers before the result that names them. Lists again only when the directory changed."""
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
