"""The source of the user's own modules as this process ran it, even when the files changed later.

``note`` reads the files of local modules that are new or were reloaded. The extension calls ``note`` after each
cell, and a capture calls it first. Like its functions, a module's text here changes only when it is reloaded.
"""

from __future__ import annotations

import ast
import functools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

_OWN = __name__.partition(".")[0]


@dataclass
class Kept:
    """A module as it was imported. ``text`` is None if the file had changed before ``note`` first read it."""

    spec: ModuleSpec | None
    file: str
    stamp: tuple[int, int] | None
    """(mtime_ns, size) of the file that was read; None if the text differs from the file."""
    text: bytes | None
    reloaded: float
    """The last mtime of the file that autoreload recorded; 0 if it recorded none."""

    @property
    def is_current(self) -> bool:
        """Whether the file is still what the process runs."""
        return self.text is not None and self.stamp is not None and self.stamp == _stamp(self.file)

    def place(self, name: str) -> str:
        """The path of the module ``name``'s file, relative to a directory on ``sys.path``."""
        path = name.replace(".", "/")
        return f"{path}/__init__.py" if os.path.basename(self.file) == "__init__.py" else f"{path}.py"


_kept: dict[str, Kept] = {}
_seen: set[str] = set()


def note(reloads: Mapping[str, float] | None = None) -> None:
    """Read modules that are new. ``reloads``: {module: mtime of its file as autoreload recorded it}; autoreload
    updates modules without a new ``__spec__``. Takes microseconds when nothing is new."""
    times = reloads or {}
    for name in sys.modules.keys() - _seen:
        _seen.add(name)
        if (file := _local_file(name)) is not None:
            _keep(name, file, times.get(name, 0))
    for name, kept in list(_kept.items()):
        _look_again(name, kept, times.get(name, 0))


def _look_again(name: str, kept: Kept, reloaded: float) -> None:
    module = sys.modules.get(name)
    if module is None:
        del _kept[name]
        _seen.discard(name)
    elif getattr(module, "__spec__", None) is not kept.spec or reloaded > kept.reloaded > 0:
        _keep(name, _local_file(name) or kept.file, reloaded, kept.text)
    else:
        kept.reloaded = reloaded


def _keep(name: str, file: str, reloaded: float, before: bytes | None = None) -> None:
    """``before``: the text until now. It is kept when the new text cannot have been run."""
    spec = getattr(sys.modules[name], "__spec__", None)
    stamp = _stamp(file)
    try:
        text: bytes | None = Path(file).read_bytes()
    except OSError:
        text = None
    if text is None or (before is not None and not _compiles(text)):
        text, stamp = before, None
    elif before is None and not _as_compiled(spec, stamp):
        text = None
    _kept[name] = Kept(spec, file, stamp, text, reloaded)


def _compiles(text: bytes) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _as_compiled(spec: ModuleSpec | None, stamp: tuple[int, int] | None) -> bool:
    """Whether Python's bytecode cache says that the file is the one compiled at the import."""
    try:
        with open(str(spec.cached if spec else None), "rb") as cache:
            header = cache.read(16)
    except OSError:
        return True
    if stamp is None or len(header) < 16 or header[4] & 1:  # a hash-based cache has no time
        return True
    time, size = (int.from_bytes(header[start : start + 4], "little") for start in (8, 12))
    return (time, size) == (stamp[0] // 10**9 & 0xFFFFFFFF, stamp[1] & 0xFFFFFFFF)


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _local_file(name: str) -> str | None:
    """The source file of a loaded module, if it belongs to the user."""
    module = sys.modules.get(name)
    if not issubclass(type(module), types.ModuleType) or name.partition(".")[0] in ("__main__", "__mp_main__", _OWN):
        return None
    file = vars(module).get("__file__")
    return os.path.abspath(file) if isinstance(file, str) and file.endswith(".py") and is_local(file) else None


def is_loaded(name: str) -> bool:
    """Whether ``name`` is a loaded local module."""
    return name in _kept


def text_of(name: str) -> bytes:
    """The source of a loaded local module; empty if it is unknown."""
    return (_kept[name].text or b"") if name in _kept else b""


def of_package(top: str) -> Iterator[tuple[str, Kept]]:
    """The loaded local modules in the top-level module ``top``, including ``top`` itself."""
    for name, kept in _kept.items():
        if name.partition(".")[0] == top:
            yield name, kept


def is_local(file: str) -> bool:
    """Whether the module file belongs to the user, not to Python or an installed distribution."""
    if file.startswith(_installed()):
        return False
    path = os.path.realpath(file)
    if any(part in ("site-packages", "dist-packages") for part in Path(path).parts):
        return False
    return not path.startswith(_installed())


@functools.lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple({text for path in paths if path for text in (path + os.sep, os.path.realpath(path) + os.sep)})
