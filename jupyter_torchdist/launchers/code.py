"""The code that hosts need, as an archive: the rooms that run on a node, and cloudpickle."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path

from ..protocol.version import NODE_ROOMS


@dataclass(frozen=True)
class Code:
    """The code of this installation. ``digest`` is of its content, so equal code has one directory on a host."""

    files: tuple[tuple[str, bytes], ...]
    digest: str

    @cached_property
    def archive(self) -> bytes:
        """A zip file. It takes a tenth of a second to make, and most hosts have the code."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for name, data in self.files:
                archive.writestr(name, data)
        return buffer.getvalue()


@lru_cache(maxsize=1)
def code() -> Code:
    files = tuple((name, path.read_bytes()) for name, path in sorted(_files()))
    digest = hashlib.sha256()
    for name, data in files:
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return Code(files, digest.hexdigest()[:16])


def _files() -> Iterator[tuple[str, Path]]:
    ours = Path(__file__).resolve().parents[1]
    yield from ((f"{ours.name}/{file.name}", file) for file in ours.glob("*.py"))
    for folder in (*(ours / room for room in NODE_ROOMS), _folder_of("cloudpickle")):
        for file in folder.rglob("*.py"):
            yield str(file.relative_to(folder.parent if folder.parent != ours else ours.parent)), file


def _folder_of(package: str) -> Path:
    """Where an installed package is, without importing it."""
    found = find_spec(package)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
