"""The job's files and blobs on a node without the driver's disk, received over the channel.

``scratch`` is the directory of all replicas. Each connection has its own: the user may have changed it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol import codec
from ...protocol.bundle import Manifest
from ...protocol.disk import size_of
from ...protocol.paths import JobPaths, make_private, safe_name


def replica_paths(scratch: Path, job: str) -> JobPaths:
    return JobPaths(scratch / "jobs" / safe_name(job))


def replica(scratch: Path, job: str) -> JobPaths:
    """The job's directory on this node, created if it is missing."""
    paths = replica_paths(scratch, job)
    for folder in (paths.root, paths.nodes, paths.results):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return paths


def discard(paths: JobPaths) -> None:
    """Delete the replica, but no file that the cell wrote."""
    unlink_synced(paths.work)
    with contextlib.suppress(OSError):
        paths.work.rmdir()
    for path in list(paths.root.iterdir()) if paths.root.exists() else []:
        if path.is_dir() and path != paths.work:
            shutil.rmtree(path, ignore_errors=True)
        elif path != paths.work:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        paths.root.rmdir()


def unlink_synced(work: Path) -> None:
    """Remove the links to directories of ``--sync``, and the folders that are empty then."""
    synced = str(work.parent.parent.parent / "synced")
    for folder, folders, _ in os.walk(work, topdown=False):
        for path in (os.path.join(folder, name) for name in folders):
            with contextlib.suppress(OSError):
                if os.path.islink(path) and os.readlink(path).startswith(synced):
                    os.unlink(path)
                    if folder != str(work):
                        os.rmdir(folder)


def replica_blobs(scratch: Path) -> Path:
    return make_private(scratch / "blobs")


def prepare(scratch: Path, job: str, files: dict[str, str], digests: Sequence[str], store: str = "") -> list[str]:
    """Write the job's files, and remove results of an earlier attempt. Returns the digests of blobs that are missing.

    ``store``: where the driver has the blobs. On a file system that both see they are used from there. Empty: nowhere.
    """
    paths, blobs = replica(scratch, job), replica_blobs(scratch)
    for name, text in files.items():
        write_private(paths.root / safe_name(name), text.encode("utf-8"))
    for result in paths.results.iterdir():
        result.unlink(missing_ok=True)
    return [digest for digest in digests if not _have(blobs / safe_name(digest), Path(store) / safe_name(digest))]


APPENDED = (".events", ".out", ".err", ".metrics", ".display", ".items", ".times", ".log")
"""Kinds of files of a node that grow, and are never replaced."""


def continued(paths: JobPaths, node: str, offsets: Mapping[str, int]) -> dict[str, int]:
    """What the driver has of the node's files, of ``offsets``, so that the next attempt goes on after it.

    An earlier attempt may have run on another machine, as an engine chose. Its part of a file that grows is then a gap
    here, of zeros, which is one bad line. Other files are sent as a whole.
    """
    known = dict(offsets)
    for name, size in offsets.items():
        path = paths.root / name
        if size <= size_of(path):
            continue
        if path.parent == paths.node(node).root and path.suffix in APPENDED:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(path, "ab", opener=_private) as file:
                os.truncate(file.fileno(), size - 1)
                file.write(b"\n")
        else:
            del known[name]
    return known


def _have(blob: Path, original: Path) -> bool:
    if blob.exists():
        return True
    if not original.is_absolute():
        return False
    try:
        if not stat.S_ISREG(original.lstat().st_mode) or original.stat().st_uid != os.getuid():
            return False
        blob.unlink(missing_ok=True)  # a link to what is not there any more
        blob.symlink_to(original)
    except OSError:
        return False
    return True


def trust_replica(paths: JobPaths, blobs: Path) -> None:
    """Record in the manifest that the received blobs were verified, so that ranks do not hash them again."""
    value = Manifest.from_json(codec.loads(paths.manifest.read_bytes())).to_json()
    for blob in (value["stream"], value["linecache"], *value["buffers"], *(s["blob"] for s in value["sources"])):
        status = (blobs / safe_name(blob["digest"])).stat()
        blob["record"] = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    write_private(paths.manifest, codec.dumps(value).encode("ascii"))


def write_private(path: Path, data: bytes) -> None:
    """Write the whole file with mode 0600."""
    with open(path, "wb", opener=_private) as file:
        file.write(data)


def publish_private(path: Path, data: bytes) -> None:
    """Like ``write_private``, but atomic by rename. On ``OSError`` no temporary file remains."""
    aside = path.with_suffix(".tmp")
    try:
        write_private(aside, data)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


MOST = 10_000
"""The largest number of files of a cell that go to the notebook."""


@dataclass(frozen=True)
class Written:
    """Paths below ``work``. Sizes in bytes."""

    work: Path
    going: dict[str, int] = field(default_factory=dict)
    staying: dict[str, int] = field(default_factory=dict)

    def discard(self) -> None:
        """Delete what has come to the notebook, if it is still what was sent; then directories that are empty."""
        for name, size in self.going.items():
            with contextlib.suppress(OSError):
                if (self.work / name).lstat().st_size == size:
                    (self.work / name).unlink()
        for folder, _, _ in os.walk(self.work, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def told(self, host: str, limit: int) -> str:
        """A sentence on what stays; empty if nothing does."""
        if not self.staying:
            return ""
        names = [f"{name} ({size / 1e6:,.1f} MB)" for name, size in list(self.staying.items())[:3]]
        more = f" and {len(self.staying) - 3} more" if len(self.staying) > 3 else ""
        return (
            f"files that the cell wrote stay on {host} in {self.work}: {', '.join(names)}{more}; "
            f"--host-option bring=SIZE says how much comes back ({limit / 1e6:,.0f} MB)"
        )


def written(work: Path, limit: int) -> Written:
    """The files below ``work``. The small ones go, while all of them have at most ``limit`` bytes."""
    unlink_synced(work)
    found = Written(work)
    total = 0
    for size, name, plain in sorted(_files(work)):
        total += size
        goes = plain and total <= limit and len(found.going) < MOST
        (found.going if goes else found.staying)[name] = size
    return found


def _files(work: Path) -> Iterator[tuple[int, str, bool]]:
    """Size and path, and whether it is a file and no link, pipe or device."""
    for folder, folders, files in os.walk(work):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*files, *links):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                yield status.st_size, os.path.relpath(path, work), stat.S_ISREG(status.st_mode)
