"""Loads a bundle: in a rank before user code, and in a kernel that needs what an earlier kernel captured."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import pickle
import pickletools
import platform
import shutil
import sys
import tempfile
import types
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..protocol.bundle import Manifest, Package
from ..protocol.errors import CaptureError, DamagedJob
from ..protocol.machine.inventory import installed
from ..protocol.paths import Home
from . import codes, mapping, portable, rebuild

_ATOMS: frozenset[type] = frozenset(
    {str, bytes, int, float, bool, complex, tuple, frozenset, type(None), range, slice, types.CodeType}
)

STATES = b"states"
"""The marker in a stream before the state of the notebook (``states``). The state is last, so that an error in it
affects nothing else."""


@dataclass
class Loaded:
    """What a rank loaded. ``memo`` maps an object's place in the stream to the object."""

    names: tuple[str, ...]
    memo: dict[int, Any]
    manifest: Manifest
    blob_dir: Path
    main: dict[str, Any]
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """Memory (start, end) of the mapped buffers."""
    unread: str = ""
    """Why some of the notebook's state could not be rebuilt."""

    @cached_property
    def places(self) -> dict[int, int]:
        """``id`` of an object → its place. The memo keeps the objects alive, so their ids are not reused."""
        return {id(value): place for place, value in self.memo.items()}

    @cached_property
    def storages(self) -> dict[int, rebuild.Storage]:
        """The captured storages by torch's handle (``_cdata``)."""
        found = (value for value in self.memo.values() if isinstance(value, rebuild.Storage))
        return {storage.untyped._cdata: storage for storage in found}

    @cached_property
    def scopes(self) -> dict[int, rebuild.Scope]:
        """The captured scopes by the ``id`` of their dictionary."""
        return {id(value.names): value for value in self.memo.values() if isinstance(value, rebuild.Scope)}

    @cached_property
    def pristine(self) -> Loaded | None:
        """The same bundle loaded again, with the captured values; None if that fails."""
        scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        try:
            return read_stream(self.manifest, self.blob_dir, scope)
        except Exception:  # noqa: BLE001  # reading runs the user's __setstate__, which may raise anything
            return None


class Memo(dict[int, Any]):
    """{place in the stream: object}; ``notes`` name functions and classes that had to be taken from the bundle."""

    notes: tuple[str, ...] = ()


def load_bundle(
    manifest: Manifest, blob_dir: Path, main: types.ModuleType, *, source_dir: Path | None = None
) -> Loaded:
    """Fill ``main`` with the captured names, after unpacking local modules and the lines for tracebacks.

    The local modules are unpacked into ``source_dir`` (default: the job's source directory, beside the blobs).
    Raises ``DamagedJob`` for a blob that is missing or was changed, ``CaptureError`` for an object that cannot be
    rebuilt here.
    """
    if not (manifest.portable or portable.is_ours(manifest.python)):
        message = f"the functions were captured by Python {manifest.python}; this is {platform.python_version()}"
        raise CaptureError(message, "run the cell again: it is captured for the hosts of the job")
    for blob in dict.fromkeys(manifest.blobs):
        mapping.check_blob(blob, blob_dir)
    install_lines(manifest, blob_dir)
    if manifest.sources:
        directory = source_dir or Home(blob_dir.parent).job(manifest.job).source
        unpack_sources(manifest, blob_dir, directory)
        if str(directory) not in sys.path:
            sys.path.insert(0, str(directory))
    return read_stream(manifest, blob_dir, vars(main), registers=True)


def read_stream(
    manifest: Manifest,
    blob_dir: Path,
    main: dict[str, Any],
    resolve: rebuild.Resolve | None = None,
    *,
    registers: bool = False,
) -> Loaded:
    """Load the captured names into ``main``, from checked blobs. ``registers`` as in ``rebuild.Loading``."""
    buffers = [mapping.map_private(blob_dir / blob.digest, blob.size) for blob in manifest.buffers]
    ranges = [(start := mapping.address_of(buffer), start + len(buffer)) for buffer in buffers]
    loading = rebuild.loading(main, resolve, registers=registers)
    with open(blob_dir / manifest.stream.digest, "rb") as file, loading, without_warnings():
        unpickler = pickle.Unpickler(file, buffers=iter(buffers))
        parts = _loads(unpickler, file, manifest.packages)
        passing, unread = b"", ""
        for names in parts:
            if (extra := names.pop("", None)) == STATES:
                unread = _load_states(unpickler, file, main)
                break
            passing = extra if isinstance(extra, bytes) else passing
            main.update(names)
    memo: dict[int, Any] = unpickler.memo.copy()
    del unpickler, parts, names, extra
    for place in array("Q", passing):
        memo.pop(place, None)
    return Loaded(manifest.names, keep_shared(memo), manifest, blob_dir, main, ranges, unread)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """The other process has shown the warnings of what is rebuilt. The filters stay: an import may set them."""
    shown = warnings.showwarning

    def silent(*_: Any, **__: Any) -> None: ...

    warnings.showwarning = silent
    try:
        yield
    finally:
        if warnings.showwarning is silent:
            warnings.showwarning = shown


def _load_states(unpickler: pickle.Unpickler, file: Any, main: dict[str, Any]) -> str:
    """Load the last part of the stream. Returns the first error, or ""; the job continues without the rest."""
    try:
        for state in _loads(unpickler, file, ()):
            main.update(state)
    except CaptureError as error:
        return str(error.__cause__)
    return ""


def _loads(unpickler: pickle.Unpickler, file: Any, packages: Sequence[Package]) -> Iterator[dict[str, Any]]:
    """Every pickle of the stream; they share one memo, so they share objects."""
    size = os.fstat(file.fileno()).st_size
    while (start := file.tell()) < size:
        try:
            yield unpickler.load()
        except (EOFError, pickle.UnpicklingError) as error:
            raise DamagedJob(f"the captured names cannot be read: {error}", "run the cell again") from error
        except Exception as error:  # rebuilding runs the user's own code, which may raise anything
            name = _name_at(file, start)
            hint = f"load or create it inside the cell, or leave it behind with --exclude {name or 'NAME'}"
            what, why = name or "a captured object", f"{type(error).__name__}: {error}{_other_versions(packages)}"
            raise CaptureError(f"{what} could not be rebuilt on the rank: {why}", hint) from error


def _name_at(file: Any, start: int) -> str:
    """The name whose value the part of the stream that begins there is; empty if it does not say."""
    file.seek(start)
    try:
        for operation, value, _ in pickletools.genops(file):
            if operation.name not in ("PROTO", "FRAME", "EMPTY_DICT", "MEMOIZE"):
                return value if isinstance(value, str) else ""
    except ValueError:  # cut short
        pass
    return ""


def _other_versions(packages: Sequence[Package]) -> str:
    """A line for each package of another version than in the notebook, after a line's end."""
    found = [(package, installed(package.name)) for package in packages if package.version]
    return "".join(
        f"\n{package.name} is {here or 'missing'} here, and {package.version} in the notebook"
        for package, here in found
        if here != package.version
    )


def keep_shared(memo: dict[int, Any]) -> dict[int, Any]:
    """The memo without atoms and without objects to which only the pickling itself referred.

    Storages and scopes are kept: tensors and functions refer to them without a Python reference.
    """
    memo[-1] = object()
    counts = {}
    for place in memo:
        value = memo[place]
        if type(value) not in _ATOMS:
            counts[place] = sys.getrefcount(value)
    # Only the memo and this loop refer to the object made above; an object with as few references is unreachable.
    alone = counts.pop(-1)
    del value
    return {
        place: memo[place]
        for place, count in counts.items()
        if count > alone or type(memo[place]) in (rebuild.Storage, rebuild.Scope)
    }


def install_lines(manifest: Manifest, blob_dir: Path) -> None:
    """Put the notebook's source in ``linecache``, so that tracebacks show it."""
    texts = json.loads((blob_dir / manifest.linecache.digest).read_bytes())
    for name, text in texts.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def unpack_sources(manifest: Manifest, blob_dir: Path, directory: Path) -> None:
    """Write local modules as files below ``directory``. The first process to finish wins; the others use its files."""
    if directory.is_dir():
        return
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".source-", dir=directory.parent))
    for source in manifest.sources:
        target = aside / source.path
        if not target.resolve().is_relative_to(aside.resolve()):
            hint = "run the cell again: it is captured anew"
            raise DamagedJob(f"the bundle names a source file outside its directory: {source.path}", hint)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(mapping.check_blob(source.blob, blob_dir), target)
    try:
        os.rename(aside, directory)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not directory.is_dir():
            raise


def memo_from_bundle(
    manifest: Manifest, blob_dir: Path, main_dict: dict[str, Any], *, source_dir: Path | None = None
) -> Memo:
    """The captured objects by place, for a kernel that did not capture them.

    A function or class in ``main_dict`` with the same code replaces the captured one. All other objects come from
    the bundle, as captured. ``notes`` name functions and classes whose code differs here.
    Raises ``DamagedJob``.
    """
    for blob in dict.fromkeys(manifest.blobs):
        mapping.check_blob(blob, blob_dir)
    differing: list[str] = []

    def resolve(name: str, digest: str) -> Any:
        found = find_current(main_dict, name)
        if found is None or digest_of(found) == digest:
            return found
        if name not in differing:
            differing.append(name)
        return None

    scope = {"__name__": "__main__", "__builtins__": __builtins__}
    with _sources_on_path(manifest, blob_dir, source_dir or Home(blob_dir.parent).job(manifest.job).source):
        memo = Memo(read_stream(manifest, blob_dir, scope, resolve).memo)
    memo.update({place: main_dict for place, value in memo.items() if value is scope})
    if differing:
        memo.notes = (
            f"{', '.join(differing)}: the code here differs from the job's; values that come back use the job's code",
        )
    return memo


@contextlib.contextmanager
def _sources_on_path(manifest: Manifest, blob_dir: Path, directory: Path) -> Iterator[None]:
    """While this is open, the bundle's local modules can be imported if no others are found."""
    if not manifest.sources:
        yield
        return
    unpack_sources(manifest, blob_dir, directory)
    sys.path.append(str(directory))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(directory))


def find_current(main_dict: Mapping[str, Any], qualname: str) -> Any:
    """The function or class with this qualified name in the namespace, or None."""
    head, *rest = qualname.split(".")
    found = main_dict.get(head)
    for part in rest:
        found = vars(found).get(part) if isinstance(found, type) else None
    if isinstance(found, (type, types.FunctionType)) and found.__qualname__ == qualname:
        return found
    return None


def digest_of(value: Any) -> str:
    """A digest of the code, which identifies a function or class."""
    digest: Callable[[Any], str] = codes.class_digest
    return codes.code_digest(value.__code__) if isinstance(value, types.FunctionType) else digest(value)
