"""Writes what torch's flight recorder holds into the job's directory: when asked, on failure, when the code has ended.

Whoever asks touches the rank's file of stacks (``node/stacks.py``), and inotify(7) wakes a thread here. The thread
holds Python's global lock while it writes the stacks, so no frame ends meanwhile. That works while the main thread
hangs in a collective. A rank whose lock is held by C code does not answer, and is asked by a signal. Then no thread
runs Python.

``diagnosis/dumps.py`` reads the file: one line of JSON for each dump, each a whole one.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from ...protocol import codec
from ...protocol.paths import NodePaths
from ...usercode.frames import is_users, places_of_main
from . import flight

KEPT = 100
"""Collectives of each group that a dump has: the last ones."""

PATIENCE = 1.0
"""Seconds that a dump waits for another one. Reading GPU events may never end."""

_TOUCHED, _MODIFIED = 0x4, 0x2  # IN_ATTRIB, IN_MODIFY


def write_into(environ: MutableMapping[str, str], files: NodePaths, rank: int) -> None:
    """Have NCCL and torch write into the job's directory, unless the user has set where and what.

    NCCL's warnings go to a file of their own. After the first one NCCL is as talkative as with ``NCCL_DEBUG=INFO``.
    torch's recorders are on by default, and NCCL's is dumped at a time-out.
    """
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in environ:  # the old name, of which newer releases warn
        environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(files.nccl_dump))
    if "NCCL_DEBUG" not in environ:
        environ.setdefault("NCCL_DEBUG_FILE", str(files.nccl(rank)).replace("%", "%%") + ".%p")
        environ.setdefault("NCCL_WARN_ENABLE_DEBUG_INFO", "1")
        environ["NCCL_DEBUG"] = "WARN"


class Recording:
    """Of this process."""

    def __init__(self, files: NodePaths, rank: int) -> None:
        self._file, self._stacks = files.recorder(rank), files.stacks(rank)
        self._rank = rank
        self._last = b""
        """The dump with which the rank's code has ended: nothing is new after it."""
        self._ended = ("", "")
        """``end`` and ``place`` of ``write`` once the rank's code has ended."""
        self._lock = threading.Lock()

    def listen(self, requests: Path, heard: Callable[[], None]) -> None:
        """Answer from now on, and call ``heard`` when ``requests`` has grown. Without inotify only ``write`` writes."""
        libc = ctypes.CDLL(None, use_errno=True)
        init = getattr(libc, "inotify_init1", None)
        fd = -1 if init is None else init(os.O_CLOEXEC)
        if fd >= 0 and (stacks := libc.inotify_add_watch(fd, os.fsencode(self._stacks), _TOUCHED)) >= 0:
            libc.inotify_add_watch(fd, os.fsencode(requests), _MODIFIED)
            arguments = fd, stacks, heard
            threading.Thread(target=self._answer, args=arguments, name="torchdist-recorder", daemon=True).start()

    def _answer(self, fd: int, watch: int, heard: Callable[[], None]) -> None:
        while news := _watches(os.read(fd, 65536)):
            heard()
            if watch not in news:
                continue
            with contextlib.suppress(OSError):  # it was deleted: that wakes this thread, too
                stacks = os.open(self._stacks, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                try:
                    faulthandler.dump_traceback(stacks, all_threads=True)
                finally:
                    os.close(stacks)
                self.write()

    def write(self, end: str = "", place: str = "") -> None:
        """``end``: ``done`` or ``failed`` once the rank's code has ended, at ``place``. Never raises.

        ``place``: the user's line, ``Cell In[3], line 6``. A thread that is already writing tells of the end, too.
        """
        if end:
            self._ended = end, place
        if not self._lock.acquire(timeout=PATIENCE):
            return
        try:
            line = self._last or self._line()
            fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)
        except Exception:  # noqa: BLE001  # a full disk, a recorder that cannot be read: the job goes on
            return
        finally:
            self._lock.release()

    def _line(self) -> bytes:
        recorders = [_shortened(dump) for dump in flight.dumps()]
        end, place = self._ended
        place = place if end else innermost(places_of_main())
        told = {"rank": self._rank, "t": time.time(), "end": end, "place": place, "groups": flight.groups()}
        line = (codec.dumps({**told, "recorders": recorders}) + "\n").encode("ascii")
        self._last = line if end else b""
        return line


def _watches(events: bytes) -> set[int]:
    """Of which watches these events are (inotify(7), for watched files)."""
    return {watch for watch, _, _, _ in struct.iter_unpack("iIII", events)}


def innermost(places: Iterable[tuple[str, int]]) -> str:
    """The first line of the user's code among (file, line): ``Cell In[3], line 6``; empty if there is none."""
    return next((f"{file}, line {line}" for file, line in places if is_users(file)), "")


def _shortened(dump: dict[str, Any]) -> dict[str, Any]:
    """The last collectives of each group."""
    left: dict[int, int] = {}
    kept = []
    for entry in reversed(dump.get("entries", ())):
        left[entry["pg_id"]] = left.get(entry["pg_id"], KEPT) - 1
        if left[entry["pg_id"]] >= 0:
            kept.append(entry)
    return {**dump, "entries": kept[::-1]}
