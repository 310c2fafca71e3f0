"""Objects of JSON over a stream, and descriptors beside them. macOS has no local sockets that keep packets apart."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

ROOM = 1024 * 1024
MOST_FDS = 4
"""Descriptors that come with one packet."""


class Packets:
    """One end of the stream. Only one thread may send at a time, and one receive."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._bytes = b""
        self._fds: list[int] = []

    def send(self, words: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Raises ``OSError`` when the other end is closed."""
        data = json.dumps({**words, "fds": len(fds)}).encode() + b"\n"
        sent = socket.send_fds(self._end, [data], fds)
        self._end.sendall(data[sent:])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next packet with its descriptors; None when the other end is closed.

        Raises ``BlockingIOError`` where the socket does not block and no whole packet is there.
        """
        while b"\n" not in self._bytes:
            data, fds = b"", list[int]()
            with contextlib.suppress(ConnectionError):
                data, fds, _, _ = socket.recv_fds(self._end, ROOM, MOST_FDS)
            if not data:
                return None
            self._bytes += data
            self._fds += fds
        line, _, self._bytes = self._bytes.partition(b"\n")
        words = json.loads(line)
        count = words.pop("fds")
        fds, self._fds = self._fds[:count], self._fds[count:]
        return words, fds
