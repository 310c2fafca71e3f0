"""What travels from the notebook to the ranks: a manifest over content-addressed blobs."""

from __future__ import annotations

from dataclasses import dataclass

from .typed import Record


@dataclass(frozen=True)
class Blob:
    """One file below ``blobs/``, named by the SHA-256 of its content.

    ``record`` is (inode, size, mtime_ns, ctime_ns) when it was written. A reader that finds the same values trusts
    the content; otherwise it hashes the content again. Size in bytes.
    """

    digest: str
    size: int
    record: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True)
class Captured:
    """One line of the receipt: a name, its kind and description, its size (bytes), and the line that needs it."""

    name: str
    kind: str
    """``module``, ``function``, ``class``, ``tensor``, ``array``, ``model``, ``data``…"""
    what: str
    """For example ``torch as import`` or ``Tensor float32 (60000, 784)``."""
    size: int
    needed: str
    """For example ``line 4`` or ``function evaluate (Cell In[3], line 2)``."""


@dataclass(frozen=True)
class Package:
    """An installed package that the capture names."""

    module: str
    """At the top level: ``sklearn``."""
    name: str
    """Of the distribution, normalised: ``scikit-learn``."""
    version: str
    """In the notebook; empty if it is not known."""
    user: str
    """What needs it: ``line 3``, or an object of its."""
    certain: bool
    """Whether the job cannot run without it. An import in a function, or below ``try``, is not certain."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a local module, at ``path`` below the ranks' source directory."""

    path: str
    blob: Blob


@dataclass(frozen=True)
class Manifest(Record):
    """The bundle. ``stream`` is the pickle, ``buffers`` its out-of-band buffers in order."""

    job: str
    python: str
    stream: Blob
    buffers: tuple[Blob, ...]
    names: tuple[str, ...]
    """Captured names, in the order of the stream."""
    receipt: tuple[Captured, ...]
    linecache: Blob
    """JSON object: file name → source text, for tracebacks on the ranks."""
    sources: tuple[SourceFile, ...] = ()
    flags: int = 0
    """Compiler flags of the notebook's ``from __future__`` imports."""
    bound: tuple[str, ...] = ()
    """Names that the cell binds at its top level."""
    notes: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()
    """Of a job on hosts."""
    portable: bool = False
    """Whether another release of Python than ``python`` can read it."""

    @property
    def blobs(self) -> tuple[Blob, ...]:
        return (self.stream, self.linecache, *self.buffers, *(source.blob for source in self.sources))
