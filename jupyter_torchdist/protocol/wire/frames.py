"""The channel between driver and agent: frames over any byte stream (a unix socket, the stdio of SSH).

A frame is ``magic(2) header_length(4) body_length(8)`` in network order, a JSON object and raw bytes. No pickle.
Frames do not depend on earlier frames: a channel that broke anywhere is opened again, and both sides send the offsets
that they have.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from .. import codec
from ..errors import ChannelError

_HEAD = struct.Struct("!2sIQ")
_MAGIC = b"\xa7T"
HEADER_LIMIT = 16 * 1024 * 1024
BODY_LIMIT = 64 * 1024 * 1024

CHUNK = 4 * 1024 * 1024
"""The largest number of bytes of a file in one frame."""

Message = tuple[dict[str, Any], bytes]


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame."""
    text = codec.dumps(header).encode("ascii")
    return _HEAD.pack(_MAGIC, len(text), len(body)) + text + body


class Decoder:
    """Cuts a byte stream, which may arrive in any pieces, into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def empty(self) -> bool:
        """Whether no part of a frame is buffered."""
        return not self._buffer

    def feed(self, data: bytes) -> Iterator[Message]:
        """The complete frames so far. Raises ``ChannelError`` for invalid bytes; the channel is then useless."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            magic, header_length, body_length = _HEAD.unpack_from(self._buffer)
            if magic != _MAGIC or header_length > HEADER_LIMIT or body_length > BODY_LIMIT:
                raise ChannelError("the other side of the channel does not speak this protocol")
            end = _HEAD.size + header_length + body_length
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                text = bytes(view[_HEAD.size : _HEAD.size + header_length])
                body = bytes(view[_HEAD.size + header_length : end])
            del self._buffer[:end]
            try:
                header = codec.loads(text)
            except (ValueError, RecursionError) as error:
                raise ChannelError("a frame's header is not JSON") from error
            if not isinstance(header, dict):
                raise ChannelError("a frame's header is not an object")
            yield header, body
