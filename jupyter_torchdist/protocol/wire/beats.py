"""What the agents of a job say to each other, a datagram each: an HMAC of the job's secret, then a JSON object.

Whoever has not the secret can make no beat. One that was sent before counts for nothing, because its number is old.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Literal

from .. import codec
from ..errors import ChannelError
from ..typed import Malformed, Record
from .again import Again

Part = Literal["runs", "done", "short"]
"""How a node's part of a job stands: it goes on; all its ranks are done; it ended without that."""

LONGEST = 16 * 1024
"""Bytes of a datagram."""

_SIZE = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Beat(Record):
    """A sign of life of a node."""

    job: str
    attempt: int
    node: str
    number: int
    """Larger than in every beat of the node before."""
    part: Part
    driver: bool
    """Whether a driver is connected: then it decides, and no agent does."""
    lost: tuple[str, ...] = ()
    """Nodes of which the steward hears nothing: the attempt must end."""
    second: tuple[str, int] | None = None
    """Where the steward hears the second node, which takes its place when it is missed."""
    again: Again | None = None
    """The attempt of this beat, which the others are to begin, too."""


def sealed(beat: Beat, secret: str) -> bytes:
    """The datagram."""
    text = codec.dumps(beat.to_json()).encode("ascii")
    return seal(text, secret) + text


def opened(datagram: bytes, secret: str) -> Beat:
    """Raises ``ChannelError`` for what is no beat, or was made without the secret."""
    came, text = datagram[:_SIZE], datagram[_SIZE:]
    if not hmac.compare_digest(came, seal(text, secret)):
        raise ChannelError("a datagram of somebody who does not know the job's secret")
    try:
        return Beat.from_json(codec.loads(text))
    except (ValueError, RecursionError, Malformed) as error:
        raise ChannelError("a datagram that is no beat") from error


def seal(text: bytes, secret: str) -> bytes:
    """What only somebody with the secret can make of the text."""
    return hmac.digest(secret.encode("ascii"), text, "sha256")
