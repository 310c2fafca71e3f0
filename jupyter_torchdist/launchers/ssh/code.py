"""The code that hosts need, as an archive: the rooms that run on a node, and cloudpickle."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ...protocol.version import NODE_ROOMS

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the archive, so that equal files make equal archives."""


@dataclass(frozen=True)
class Code:
    """``archive`` is a zip file. ``digest`` is of its content, so equal code has one directory on a host."""

    archive: bytes
    digest: str


@lru_cache(maxsize=1)
def code() -> Code:
    """The code of this installation."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, path in sorted(_files()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return Code(data, hashlib.sha256(data).hexdigest()[:16])


def _files() -> Iterator[tuple[str, Path]]:
    ours = Path(__file__).resolve().parents[2]
    yield from ((f"{ours.name}/{file.name}", file) for file in ours.glob("*.py"))
    for folder in (*(ours / room for room in NODE_ROOMS), _folder_of("cloudpickle")):
        for file in folder.rglob("*.py"):
            yield str(file.relative_to(folder.parent if folder.parent != ours else ours.parent)), file


def _folder_of(package: str) -> Path:
    """Where an installed package is, without importing it."""
    found = find_spec(package)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
