"""The items that a generator yields on a rank. Each is a pickle of its own, after its length (8 bytes, big endian)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ... import marshal
from ...protocol.errors import UserError

LENGTH = 8


class Items:
    """The file of items of one rank, made with the first one."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank, self._count = path, rank, 0

    def put(self, item: Any) -> None:
        """Write one item as it is now. Raises ``UserError`` that names the part that cannot be pickled."""
        self._count += 1
        data, why = marshal.dump_item(item)
        if why:
            raise UserError(
                f"item {self._count} of rank {self._rank} cannot be pickled: {why}", "yield its parts that can"
            )
        with open(self._path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(len(data).to_bytes(LENGTH, "big") + data)
