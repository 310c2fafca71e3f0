"""When a rank wrote its output: the form of its ``.times`` file (``ranks/streams`` writes, ``store/times`` reads).

The file is a row of records of 16 bytes, little-endian: seconds since the epoch; the stream in the top bit (0 out,
1 err) and below it the size of that stream's file by then.
"""

from __future__ import annotations

import struct

RECORD = struct.Struct("<dQ")

ERR = 1 << 63
"""The stream's bit."""
