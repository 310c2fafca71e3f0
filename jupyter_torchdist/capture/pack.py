"""Turns a capture into a bundle: blobs, named by their content, and the manifest that lists them."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable

from ..protocol.bundle import Blob, Manifest, SourceFile
from .cell import Capture
from .modules import Source

Put = Callable[["bytes | memoryview"], Blob]
"""Stores bytes once and names them by their digest; buffers are handed over without a copy."""


def pack(capture: Capture, job: str, put: Put) -> Manifest:
    """Store everything with ``put`` and return the manifest. Raises what ``put`` raises (``StoreError``)."""
    return Manifest(
        job=job,
        python=platform.python_version(),
        stream=put(capture.stream),
        buffers=tuple(put(buffer.raw()) for buffer in capture.buffers),
        names=capture.names,
        receipt=capture.receipt,
        linecache=put(json.dumps(capture.lines).encode("ascii")),
        sources=tuple(SourceFile(path, _put_source(source, put)) for path, source in sorted(capture.sources.items())),
        flags=capture.flags,
        bound=capture.bound,
        notes=capture.notes,
        packages=capture.packages,
        portable=capture.portable,
    )


def _put_source(source: Source, put: Put) -> Blob:
    return put(source if isinstance(source, bytes) else source.read_bytes())
