"""Captured data, addressed by content: one file per digest, written once and shared by all jobs."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from ..protocol.bundle import Blob
from ..protocol.errors import DamagedJob
from ..protocol.paths import Home
from .files import LARGE, Data, private, publish, publish_as, writing

_CHUNK = 1024 * 1024

Record = tuple[int, int, int, int]


def record_of(status: os.stat_result) -> Record:
    """Values that change whenever a file's content changes: inode, size (bytes), mtime and ctime (ns)."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _record_at(path: Path) -> Record:
    """The record of a file that was just published. Raises ``StoreError``."""
    with writing(path.parent):
        return record_of(path.stat())


class BlobStore:
    """The blobs below one data directory.

    A blob that exists already costs one hash of the data and no write. Its file is trusted if its record is the one
    that this process last wrote or verified; else it is hashed once. A changed file is replaced by the right content.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self._known: dict[str, Record] = {}
        self.written = 0
        """Bytes written so far."""

    def put(self, data: Data) -> Blob:
        """Store ``data`` (contiguous). Raises ``StoreError``, which tells how much space is needed and where."""
        view = memoryview(data).cast("B")
        if view.nbytes >= LARGE and not self._has_one_of(view.nbytes):
            return self._put_new(view)
        digest = hashlib.sha256(view).hexdigest()
        path = self.home.blob(digest)
        record = self._sound(path, digest, view.nbytes)
        if record is None:
            private(self.home.root, self.home.blobs)
            publish(path, view)
            record = _record_at(path)
            self.written += view.nbytes
        self._known[digest] = record
        return Blob(digest, view.nbytes, record)

    def _has_one_of(self, size: int) -> bool:
        """Whether a blob of this size exists: only such a blob could have the same content."""
        try:
            with os.scandir(self.home.blobs) as entries:
                return any(entry.stat().st_size == size for entry in entries)
        except FileNotFoundError:
            return False

    def _put_new(self, view: memoryview) -> Blob:
        """Store data that is surely new: hash and write it in parallel (both release the GIL)."""
        blobs = private(self.home.root, self.home.blobs)
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(lambda: hashlib.sha256(view).hexdigest())
            publish_as(blobs, view, lambda: self.home.blob(digest.result()))
        record = _record_at(self.home.blob(digest.result()))
        self.written += view.nbytes
        self._known[digest.result()] = record
        return Blob(digest.result(), view.nbytes, record)

    def _sound(self, path: Path, digest: str, size: int) -> Record | None:
        try:
            record = record_of(path.stat())
        except OSError:
            return None
        if record[1] != size:
            return None
        return record if self._known.get(digest) == record or digest_of(path) == digest else None

    def verify(self, blob: Blob) -> Path:
        """The blob's file. Raises ``DamagedJob`` if it is missing or its content does not match the digest."""
        path = self.home.blob(blob.digest)
        try:
            record = record_of(path.stat())
        except FileNotFoundError:
            raise _damaged(path, "is missing") from None
        if record[1] != blob.size:
            raise _damaged(path, f"has {record[1]} bytes instead of {blob.size}")
        if record != blob.record and record != self._known.get(blob.digest) and digest_of(path) != blob.digest:
            raise _damaged(path, "has changed since it was written")
        self._known[blob.digest] = record
        return path


@lru_cache(maxsize=8)
def blob_store(home: Home) -> BlobStore:
    """This process's store of ``home``. It is shared, so that files that it wrote are not read again."""
    return BlobStore(home)


def digest_of(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_CHUNK):
            found.update(piece)
    return found.hexdigest()


def _damaged(path: Path, why: str) -> DamagedJob:
    return DamagedJob(f"captured data {why}: {path}", "run the cell in the notebook again: that writes the data anew")
