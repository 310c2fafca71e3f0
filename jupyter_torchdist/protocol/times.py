"""When a rank wrote its output: the format of its ``.times`` file (``ranks/streams`` writes, ``store/times`` reads).

The file is a sequence of little-endian records of 16 bytes: seconds since the epoch, then a 64-bit number. Its top bit
is the stream (0 out, 1 err); the other bits are the size of this stream's file at that time.
"""

from __future__ import annotations

import struct

CLOCK_SECONDS = 2.0
"""Clocks of hosts that differ by more are worth a warning."""

RECORD = struct.Struct("<dQ")

ERR = 1 << 63
"""The bit for stderr."""
