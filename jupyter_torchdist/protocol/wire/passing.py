"""How one node asks another for blobs. The other sends a nonce, and after the question the bytes, blob after blob.

A question is an HMAC with the job's secret over nonce and text, the text's length, and the text: a JSON object.
Whoever has not the secret gets nothing, and a question that was heard cannot be asked again.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from .. import codec
from ..errors import ChannelError
from ..typed import Malformed, Record
from .beats import seal

NONCE = 16
"""Bytes."""

_HEAD = struct.Struct("!32sI")
_LONGEST = 1024 * 1024


@dataclass(frozen=True)
class Question(Record):
    """``blobs``: digest, whole size, and how many bytes the asking node has, in the order in which they are to come."""

    blobs: tuple[tuple[str, int, int], ...]

    def sealed(self, nonce: bytes, secret: str) -> bytes:
        text = codec.dumps(self.to_json()).encode("ascii")
        return _HEAD.pack(seal(nonce + text, secret), len(text)) + text


def opened(data: bytes | bytearray, nonce: bytes, secret: str) -> Question | None:
    """None while bytes are missing. Raises ``ChannelError`` for what is no question, or was made without the secret."""
    if len(data) < _HEAD.size:
        return None
    came, length = _HEAD.unpack_from(data)
    if length > _LONGEST:
        raise ChannelError("a question that is too long")
    if len(data) < _HEAD.size + length:
        return None
    text = bytes(data[_HEAD.size : _HEAD.size + length])
    if not hmac.compare_digest(came, seal(nonce + text, secret)):
        raise ChannelError("a question of somebody who does not know the job's secret")
    try:
        return Question.from_json(codec.loads(text))
    except (ValueError, RecursionError, Malformed) as error:
        raise ChannelError("a question that is none") from error
