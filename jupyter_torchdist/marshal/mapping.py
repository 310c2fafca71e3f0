"""Maps blobs and result buffers into memory privately (copy on write), and checks blobs against their digest."""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..protocol.bundle import Blob
from ..protocol.errors import DamagedJob

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_PRIVATE = 0x2
_CHUNK = 1 << 20
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "afs")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def map_private(path: Path, size: int) -> Any:
    """``size`` bytes of the file as a writable buffer whose changes stay in this process.

    The module ``mmap`` would keep a file descriptor open for every buffer: too many for a model of a thousand layers.
    A file on a network file system is read instead, because access to its map can fault at any later time.
    """
    if size == 0:
        return bytearray()
    if on_network(path):
        return bytearray(path.read_bytes())
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size < size:
            raise DamagedJob(f"{path} is shorter than {size} bytes", "run the cell again")
        address = _libc.mmap(None, size, _PROT_READ_WRITE, _MAP_PRIVATE, descriptor, 0)
    finally:
        os.close(descriptor)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    view = (ctypes.c_ubyte * size).from_address(address)
    # At interpreter exit other threads may still read the map: the operating system removes it.
    weakref.finalize(view, _libc.munmap, address, size).atexit = False
    return view


def view_memory(address: int, size: int, owner: object) -> Any:
    """A buffer over memory of ``owner``; the buffer keeps the owner alive."""
    view: Any = (ctypes.c_ubyte * size).from_address(address)
    view.owner = owner
    return view


def address_of(buffer: Any) -> int:
    """The memory address of a writable buffer."""
    return ctypes.addressof(buffer if isinstance(buffer, ctypes.Array) else ctypes.c_ubyte.from_buffer(buffer))


def equal_memory(first: int, second: int, size: int) -> bool:
    """Whether ``size`` bytes at two addresses are the same."""
    return size == 0 or first == second or _libc.memcmp(first, second, size) == 0


def on_network(path: Path) -> bool:
    """Whether ``path`` is on a network file system, according to /proc/self/mountinfo."""
    best, kind = "", ""
    real = os.path.realpath(path)
    for point, filesystem in _mounts():
        if len(point) > len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, kind = point, filesystem
    return kind in _REMOTE or kind.startswith("fuse.")


def _mounts() -> Iterator[tuple[str, str]]:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 4 and after:
            yield fields[4].replace("\\040", " "), after.split(" ", 1)[0]


def check_blob(blob: Blob, directory: Path) -> Path:
    """The blob's file, after a check of its content.

    A file that did not change since it was written (``Blob.record``) is trusted; any other file is hashed.
    Raises ``DamagedJob``.
    """
    path = directory / blob.digest
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DamagedJob(f"the captured data {path} is missing", "run the cell again: it is captured anew") from None
    if (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns) == blob.record:
        return path
    if status.st_size != blob.size or digest_of(path) != blob.digest:
        hint = f"delete {path} and run the cell again: it is captured anew"
        raise DamagedJob(f"the captured data {path} was changed after it was written (its digest differs)", hint)
    return path


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


class Pages:
    """Which private maps were written: a written page is a copy in the process, not a page of the file.

    Linux reports this in /proc/self/pagemap (admin-guide/mm/pagemap.rst: bit 61 file page, 62 swapped, 63 present).
    Without this file, or if it does not show a write of our own, every map counts as written.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._ranges = sorted(ranges)
        self._untouched: dict[int, bool] = {}
        self._trusted: bool | None = None

    def find(self, address: int) -> tuple[int, int] | None:
        """The map (start, end) that holds ``address``."""
        index = bisect.bisect_right(self._ranges, (address, 1 << 63)) - 1
        if index >= 0 and address < self._ranges[index][1]:
            return self._ranges[index]
        return None

    def untouched(self, address: int) -> bool:
        """Whether ``address`` is in a map without a written page. False when that cannot be known."""
        found = self.find(address)
        if found is None:
            return False
        if self._trusted is None:
            self._trusted = _sees_writes()
        if found[0] not in self._untouched:
            self._untouched[found[0]] = self._trusted and not _has_own_pages(*found)
        return self._untouched[found[0]]


def _has_own_pages(start: int, end: int) -> bool:
    """Whether a page of the map was copied for this process, and perhaps swapped out. Raises ``OSError``."""
    size = mmap.PAGESIZE
    entries = bytearray()
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(start // size * 8)
        wanted = (-(-end // size) - start // size) * 8
        while len(entries) < wanted and (part := file.read(wanted - len(entries))):
            entries += part
    pages, count = int.from_bytes(entries, "little"), len(entries) // 8
    present, swapped, of_file = (pages & _every(bit, count) for bit in (63, 62, 61))
    return count * 8 < wanted or bool(swapped or present & ~(of_file << 2))


def _every(bit: int, count: int) -> int:
    return int.from_bytes((1 << bit).to_bytes(8, "little") * count, "little")


def _sees_writes() -> bool:
    """Whether the page map shows a write into a private map."""
    with open(__file__, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as own:
        start = address_of(own)
        try:
            touched = bool(own[0]) and _has_own_pages(start, start + 1)
            own[0] = own[0]
            return not touched and _has_own_pages(start, start + 1)
        except OSError:
            return False
