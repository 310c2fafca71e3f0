"""Modules of the user's own project: which of them the captured code imports, and their source files.

A module is local if it is neither in the standard library nor in a site-packages directory: a file beside the
notebook, a package on ``sys.path``, a project installed in editable mode. Local modules travel as source, packages
as complete directories. The text of a loaded module is the text that was imported (``sources``), so the ranks run
what the notebook ran, even when the files are edited later.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import sources
from .describe import human
from .sources import is_local
from .touched import facts

Source = Path | bytes
"""A file, or the text that it had when the module was imported."""

FILE_LIMIT = 10_000_000
"""Bytes; larger files of a package do not travel."""
PACKAGE_LIMIT = 200_000_000
"""Bytes; of a larger package only the Python files travel."""

_OWN = __name__.partition(".")[0]
_NEVER = frozenset({"", "__main__", "__mp_main__", _OWN, *sys.builtin_module_names})
_MODULE_SUFFIXES = (".py", ".so", ".pyd", ".pyi")


class LocalSources:
    """Source files of the local modules that are added by name, and of the local modules that they import.

    ``found``: path below the ranks' source directory → file. ``notes`` say which files do not travel.
    """

    def __init__(self, cwd: Path) -> None:
        self.found: dict[str, Source] = {}
        self.notes: list[str] = []
        self.tops: set[str] = set()
        """The top-level modules that have files in ``found``."""
        self._cwd, self._seen = cwd, set(_NEVER)
        sources.note()

    @property
    def others(self) -> set[str]:
        """Top-level modules that are imported and have no files in ``found``."""
        return self._seen - _NEVER - self.tops

    def add(self, names: Iterable[str]) -> None:
        waiting = list(names)
        while waiting:
            top = waiting.pop().partition(".")[0]
            if top in self._seen:
                continue
            self._seen.add(top)
            files: dict[str, Source] = {**_files(top, self._cwd, self.notes), **_as_imported(top, self.notes)}
            if files:
                self.tops.add(top)
                self.found.update(files)
            for path, source in files.items():
                if path.endswith(".py"):
                    waiting.extend(_imported(source))


def _as_imported(top: str, notes: list[str]) -> dict[str, bytes]:
    """Texts of loaded modules whose files have changed since the import."""
    found = {}
    for name, kept in sources.of_package(top):
        if kept.is_current:
            continue
        reload = f"`importlib.reload({name})` loads it here, too"
        if kept.text is None:
            notes.append(f"{kept.file} is newer than the module in this notebook; the ranks use the new file; {reload}")
        else:
            found[kept.place(name)] = kept.text
            notes.append(f"{kept.file} has changed; the ranks use {name} as it was imported here; {reload}")
    return found


def _files(top: str, cwd: Path, notes: list[str]) -> dict[str, Path]:
    origin, directories = _locate(top, cwd)
    if directories:
        found: dict[str, Path] = {}
        for directory in directories:
            if is_local(os.path.join(directory, "x")):
                found.update(_package(top, Path(directory), notes))
        return found
    if origin and origin.endswith(_MODULE_SUFFIXES) and is_local(origin) and os.path.isfile(origin):
        return {top + os.path.basename(origin)[os.path.basename(origin).index(".") :]: Path(origin)}
    return {}


def _locate(top: str, cwd: Path) -> tuple[str | None, list[str]]:
    """The file and the package directories of a top-level module, loaded or not. Nothing is imported."""
    module = sys.modules.get(top)
    if module is not None:
        path = getattr(module, "__path__", None)
        file = getattr(module, "__file__", None)
        return (os.path.abspath(file) if file else None), [os.path.abspath(item) for item in path or ()]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None, []
    if spec is None:
        return _beside(top, cwd)
    origin = spec.origin if spec.has_location else None
    return origin, [os.path.abspath(item) for item in spec.submodule_search_locations or ()]


def _beside(top: str, cwd: Path) -> tuple[str | None, list[str]]:
    """A module beside the notebook that ``sys.path`` does not lead to."""
    if (cwd / top / "__init__.py").is_file():
        return None, [str(cwd / top)]
    file = cwd / f"{top}.py"
    return (str(file) if file.is_file() else None), []


def _package(top: str, directory: Path, notes: list[str]) -> dict[str, Path]:
    files = dict(_walk(directory))
    large = [name for name, path in files.items() if path.stat().st_size > FILE_LIMIT]
    for name in large:
        del files[name]
    if large:
        notes.append(f"files of {top} over {human(FILE_LIMIT)} stay behind: {', '.join(sorted(large)[:3])}")
    if sum(path.stat().st_size for path in files.values()) > PACKAGE_LIMIT:
        files = {name: path for name, path in files.items() if path.suffix in _MODULE_SUFFIXES}
        notes.append(f"the package {top} is over {human(PACKAGE_LIMIT)}: only its Python files travel")
    return {f"{top}/{name}": path for name, path in files.items()}


def _walk(directory: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(files):
            path = Path(root) / name
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(directory).as_posix(), path


def _imported(source: Source) -> frozenset[str]:
    """All absolute imports in a source, in functions, too."""
    if isinstance(source, bytes):
        return facts(source).imports
    status = source.stat()
    return _imported_in(source, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4096)
def _imported_in(file: Path, modified: int, size: int) -> frozenset[str]:
    try:
        return facts(file.read_bytes()).imports
    except OSError:
        return frozenset()
