"""Blobs on their way to this node, in pieces, from drivers and from other nodes.

What has come of a blob is kept when its sender is cut off, also over the agent's death: the next one goes on after it.
Two nodes may share the directory, and two drivers may send one blob: pieces of one digest are equal wherever they come
from, and a blob gets its name only after its content was compared with the digest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...protocol.disk import size_of
from ...protocol.paths import safe_name

HASHED = 32 * 1024 * 1024
"""Bytes of earlier pieces that are hashed in one turn of the agent."""


def part_of(blobs: Path, digest: str) -> Path:
    """Where a blob is put together. Raises ``ValueError`` for what is no digest."""
    return blobs / f".{safe_name(digest)}"


@dataclass
class Part:
    """A blob of which the first ``size`` bytes are here, and the first ``hashed`` are in the digester."""

    path: Path
    size: int
    total: int | None = None
    """The whole size, once the last piece is here."""
    hashed: int = 0
    digester: Any = field(default_factory=hashlib.sha256)

    fd: int = -1

    def append(self, data: memoryview) -> None:
        """Raises ``OSError``; ``FileNotFoundError`` if the file is gone."""
        if self.fd < 0:
            flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT if self.size == 0 else 0)
            self.fd = os.open(self.path, flags, 0o600)
        if self.hashed == self.size:
            self.digester.update(data)
            self.hashed += len(data)
        while data:
            count = os.pwrite(self.fd, data, self.size)
            self.size, data = self.size + count, data[count:]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def hash(self, most: int) -> None:
        """Hash what was not hashed as it came."""
        with open(self.path, "rb") as file:
            file.seek(self.hashed)
            data = file.read(min(most, self.size - self.hashed))
        self.digester.update(data)
        self.hashed += len(data)


class Incoming:
    """In one directory of blobs."""

    def __init__(self, blobs: Path) -> None:
        self._blobs = blobs
        self._parts: dict[str, Part] = {}
        self._ended: list[tuple[str, bool]] = []

    def have(self, digest: str) -> int:
        """How many bytes of an unfinished blob are here."""
        return self._part(digest).size

    def _part(self, digest: str) -> Part:
        part = self._parts.get(digest)
        if part is None:
            path = part_of(self._blobs, digest)
            self._parts[digest] = part = Part(path, size_of(path))
        return part

    def release(self, digests: Collection[str]) -> None:
        """Their sender is gone. What is here of them stays on the disk."""
        for digest in [digest for digest, part in self._parts.items() if digest in digests and part.total is None]:
            self._parts.pop(digest).close()

    def take(self, digest: str, offset: int, data: bytes | memoryview, last: bool) -> None:
        """A piece. Raises ``OSError`` when the disk is full; nothing of the blob is kept then."""
        if digest not in self._parts and (self._blobs / safe_name(digest)).exists():
            self._ended += [(digest, True)] if last else []
            return
        part = self._part(digest)
        view = memoryview(data)
        end = offset + len(view)
        if offset > part.size or part.total is not None:  # a part was damaged or removed; or another sender was faster
            self._ended += [(digest, False)] if last and part.total is None else []
            return
        fresh = view[part.size - offset :]
        try:
            part.append(fresh)
        except FileNotFoundError:  # another node that shares the directory has finished it, or found it damaged
            self._end(digest, part.path.with_name(digest).exists())
            return
        except OSError as error:  # of a write, it has no name
            self._drop(digest)
            raise OSError(error.errno, error.strerror, str(part.path)) from None
        part.total = end if last else None

    def turn(self) -> list[tuple[str, bool]]:
        """Blobs that have come since the last turn, and whether each one is what its digest says."""
        for digest, part in list(self._parts.items()):
            if part.hashed < part.size or part.total is not None:
                self._look(digest, part)
        ended, self._ended = self._ended, []
        return ended

    def _look(self, digest: str, part: Part) -> None:
        try:
            if part.hashed < part.size:
                part.hash(HASHED)
            if part.total is None or part.hashed < part.size:
                return
            right = part.digester.hexdigest() == digest
            if right:
                part.path.rename(self._blobs / digest)
            self._end(digest, right)
        except FileNotFoundError:
            self._end(digest, (self._blobs / digest).exists())

    def _end(self, digest: str, right: bool) -> None:
        self._ended.append((digest, right))
        self._drop(digest)

    def _drop(self, digest: str) -> None:
        part = self._parts.pop(digest)
        part.close()
        part.path.unlink(missing_ok=True)

    @property
    def busy(self) -> bool:
        """Whether the next turn has work."""
        return bool(self._ended) or any(part.total is not None for part in self._parts.values())
