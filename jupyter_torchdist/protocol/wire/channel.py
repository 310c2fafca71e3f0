"""Sends and receives frames over two file descriptors without blocking: a unix socket, or the stdio of SSH."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from ..errors import ChannelError
from . import frames

_READ = 1024 * 1024


class Channel:
    """One end of a channel. Owns both descriptors; ``close`` may be called twice."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.closed = False
        self._decoder = frames.Decoder()
        self._queue: deque[memoryview] = deque()
        self.pending = 0
        """Bytes accepted by ``send`` and not yet written."""
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    @property
    def answered(self) -> bool:
        """Whether the other side takes what is sent; before that, bytes wait here."""
        return True

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Queue one frame and write what can be written now. Raises ``ChannelError`` if the peer is gone."""
        frame = memoryview(frames.encode(header, body))
        self._queue.append(frame)
        self.pending += len(frame)
        self.flush()

    def send_first(self, data: bytes) -> None:
        """Queue bytes that are no frame before all others. Only before anything was written."""
        self._queue.appendleft(memoryview(data))
        self.pending += len(data)

    def flush(self) -> None:
        """Write what can be written now. Raises ``ChannelError`` if the peer is gone."""
        if self.closed:
            raise ChannelError("the channel is closed")
        while self._queue:
            head = self._queue[0]
            try:
                count = os.write(self.write_fd, head)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelError(f"the other side of the channel is gone ({error.strerror})") from error
            self.pending -= count
            if count == len(head):
                self._queue.popleft()
            else:
                self._queue[0] = head[count:]

    def receive(self) -> list[frames.Message]:
        """Frames that have arrived. Raises ``EOFError`` at the end, ``ChannelError`` for invalid data."""
        return self.decode(self.read())

    def decode(self, data: bytes) -> list[frames.Message]:
        """The frames that are complete with these bytes. Raises ``ChannelError`` for invalid data."""
        return list(self._decoder.feed(data))

    def read(self) -> bytes:
        """Bytes that have arrived. Raises ``EOFError`` at the end."""
        if self.closed:  # another channel may have the descriptor's number by now
            raise EOFError
        try:
            data = os.read(self.read_fd, _READ)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return data

    @property
    def between_frames(self) -> bool:
        """Whether no part of a frame is buffered, so that another process could take over the descriptors."""
        return not self._queue and self._decoder.empty

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for fd in {self.read_fd, self.write_fd}:
            try:
                os.close(fd)
            except OSError:
                continue
