"""Blobs go along the nodes: each node gets from the one before it what that one has, and what still comes there.

The node before listens at its address for the nodes; how it is asked is in ``protocol/wire/passing.py``. What cannot be
got there is told to the driver, which sends it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from ...protocol.errors import ChannelError
from ...protocol.wire.passing import NONCE, Question, opened
from .incoming import Incoming, part_of

OPEN_SECONDS = 20.0
"""How long a node listens after the last sign of another one."""

REACH_SECONDS = 3.0
"""How long a node tries to reach the other: a firewall may answer nothing."""

PATIENCE_SECONDS = 10.0
"""How long a node waits for bytes of the other, which may wait for the driver itself."""

PIECE, PIECES = 1024 * 1024, 16
"""Bytes that are read or written at once, and how often in one turn, so that the agent does other work, too."""


class Source:
    """A node that gets blobs from this one."""

    def __init__(self, connection: socket.socket, blobs: Path, secret: str, digests: Collection[str]) -> None:
        connection.setblocking(False)
        self._connection, self._blobs, self._secret, self._digests = connection, blobs, secret, digests
        self._nonce, self._said = secrets.token_bytes(NONCE), bytearray()
        self._left: list[tuple[str, int, int]] | None = None
        self._file = -1
        self.moved = time.monotonic()
        self.waits_for_room = False
        connection.send(self._nonce)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def known(self) -> bool:
        """Whether it has shown that it knows the secret."""
        return self._left is not None

    def turn(self, now: float) -> bool:
        """Send what can be sent. Returns whether the connection goes on; raises ``OSError``, ``ChannelError``."""
        self.waits_for_room = False
        with contextlib.suppress(BlockingIOError):
            if not (said := self._connection.recv(PIECE)):
                return False
            self._said += said
        if self._left is None:
            if (question := opened(self._said, self._nonce, self._secret)) is None:
                return True
            self._left = [blob for blob in question.blobs if blob[0] in self._digests]
        try:
            for _ in range(PIECES):
                if not self._left or not self._send(now):
                    break
        except BlockingIOError:
            self.waits_for_room = True
        return bool(self._left)

    def _send(self, now: float) -> bool:
        """Returns whether there may be more to send at once."""
        assert self._left is not None
        digest, total, offset = self._left[0]
        if self._file < 0:
            self._file = _opened(self._blobs, digest)
            if self._file < 0:
                return False  # nothing of it has come yet
        status = os.fstat(self._file)
        if not status.st_nlink:
            raise ChannelError(f"{digest} was damaged on its way here")
        most = min(PIECE, min(status.st_size, total) - offset)
        if most > 0:
            offset += os.sendfile(self._connection.fileno(), self._file, offset, most)
            self._left[0], self.moved = (digest, total, offset), now
        if offset >= total:
            self._left.pop(0)
            self._close_file()
        return offset < status.st_size or offset >= total

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def close(self) -> None:
        self._close_file()
        self._connection.close()


def _opened(blobs: Path, digest: str) -> int:
    for path in (blobs / digest, part_of(blobs, digest), blobs / digest):  # it may get its name in between
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return -1


class Fetching:
    """Blobs that this node gets from another one. ``tell`` is called with bytes that came, and what does not come."""

    def __init__(
        self,
        place: tuple[str, int],
        secret: str,
        blobs: dict[str, int],
        incoming: Incoming,
        tell: Callable[[int, dict[str, int]], None],
    ) -> None:
        self._secret, self._incoming, self._tell = secret, incoming, tell
        self._left = [(digest, size, min(size, incoming.have(digest))) for digest, size in blobs.items()]
        self._nonce = b""
        self._room = bytearray(PIECE)
        self.moved = time.monotonic()
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        self._connection = socket.socket(family, socket.SOCK_STREAM)
        self._connection.setblocking(False)
        with contextlib.suppress(OSError):  # what is wrong is said when it is read
            self._connection.connect(place)

    def fileno(self) -> int:
        return self._connection.fileno()

    def overdue(self, now: float) -> bool:
        return now - self.moved > (PATIENCE_SECONDS if self._nonce else REACH_SECONDS)

    def turn(self, now: float) -> bool:
        """Take what has come. Returns whether more is to come. Raises ``OSError``, ``ChannelError``."""
        if len(self._nonce) < NONCE:
            if not (said := self._connection.recv(NONCE - len(self._nonce))):
                raise ChannelError("the other node sends nothing")
            self._nonce += said
            if len(self._nonce) == NONCE:
                self._connection.sendall(Question(tuple(self._left)).sealed(self._nonce, self._secret))
            return True
        if not (count := self._connection.recv_into(self._room)):
            raise ChannelError("the other node sends nothing more")
        self.moved = now
        view = memoryview(self._room)[:count]
        while view and self._left:
            digest, size, offset = self._left[0]
            data, view = view[: size - offset], view[size - offset :]
            offset += len(data)
            self._incoming.take(digest, offset - len(data), data, offset == size)
            self._left[0] = (digest, size, offset)
            if offset == size:
                self._left.pop(0)
        self._tell(count, {})
        return bool(self._left)

    def fail(self) -> None:
        """Say what does not come from there."""
        self._tell(0, {digest: self._incoming.have(digest) for digest, _, _ in self._left})

    def close(self) -> None:
        self._connection.close()


class Listener:
    """Lets in the nodes that get blobs of one job from this one."""

    def __init__(self, address: str, blobs: Path, secret: str, digests: Collection[str]) -> None:
        """Raises ``OSError``: the address is none of this node."""
        self._blobs, self._secret, self._digests = blobs, secret, digests
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.create_server((address, 0), family=family)
        self.socket.setblocking(False)
        self.place = address, int(self.socket.getsockname()[1])
        self.until = time.monotonic() + OPEN_SECONDS

    def accept(self) -> Source | None:
        with contextlib.suppress(OSError):
            return Source(self.socket.accept()[0], self._blobs, self._secret, self._digests)
        return None


class Passing:
    """All that goes between this node and others. ``fileno`` is ready when there is something to do."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[str, Listener] = {}
        self._sources: dict[Source, str] = {}
        self._fetching: dict[Fetching, int] = {}

    def fileno(self) -> int:
        return self._selector.fileno()

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._sources or self._fetching)

    def listen(
        self, job: str, address: str, blobs: Path, secret: str, digests: Collection[str]
    ) -> tuple[str, int] | None:
        """Address and port at which nodes of the job fetch; None where that cannot be."""
        self._stop_listening(job)
        try:
            self._listeners[job] = listener = Listener(address, blobs, secret, digests)
        except OSError:
            return None
        self._selector.register(listener.socket, selectors.EVENT_READ)
        return listener.place

    def fetch(self, who: int, fetching: Fetching) -> None:
        """``who`` is a number for ``forget``."""
        self._fetching[fetching] = who
        self._selector.register(fetching, selectors.EVENT_READ)

    def forget(self, who: int) -> None:
        """Fetch nothing more for it."""
        for fetching in [fetching for fetching, of in self._fetching.items() if of == who]:
            self._end(fetching)

    def turn(self, now: float) -> None:
        """Let nodes in, send and take what is there, and give up what does not move."""
        for job, listener in list(self._listeners.items()):
            while source := listener.accept():
                self._sources[source] = job
                self._selector.register(source, selectors.EVENT_READ)
            if any(source.known for source, of in self._sources.items() if of == job):
                listener.until = now + OPEN_SECONDS
            elif now > listener.until:
                self._stop_listening(job)
        for source in list(self._sources):
            self._send(source, now)
        for fetching in list(self._fetching):
            self._take(fetching, now)

    def _send(self, source: Source, now: float) -> None:
        goes_on = False
        with contextlib.suppress(OSError, ChannelError):
            goes_on = source.turn(now) and now - source.moved < 2 * PATIENCE_SECONDS
        if goes_on:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if source.waits_for_room else 0)
            self._selector.modify(source, events)
        else:
            self._drop(source)

    def _drop(self, source: Source) -> None:
        del self._sources[source]
        self._selector.unregister(source)
        source.close()

    def _take(self, fetching: Fetching, now: float) -> None:
        try:
            for _ in range(PIECES):
                if not fetching.turn(now):
                    self._end(fetching)
                    return
        except BlockingIOError:
            if fetching.overdue(now):
                self._give_up(fetching)
        except (OSError, ChannelError):
            self._give_up(fetching)

    def _give_up(self, fetching: Fetching) -> None:
        self._end(fetching)
        fetching.fail()

    def _end(self, fetching: Fetching) -> None:
        del self._fetching[fetching]
        self._selector.unregister(fetching)
        fetching.close()

    def _stop_listening(self, job: str) -> None:
        if listener := self._listeners.pop(job, None):
            self._selector.unregister(listener.socket)
            listener.socket.close()

    def close(self) -> None:
        for job in list(self._listeners):
            self._stop_listening(job)
        for fetching in list(self._fetching):
            self._end(fetching)
        for source in list(self._sources):
            self._drop(source)
        self._selector.close()
