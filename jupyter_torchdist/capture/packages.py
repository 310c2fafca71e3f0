"""The installed packages that a capture names, with their versions here."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ..marshal import byvalue
from ..protocol.bundle import Package
from ..protocol.machine import inventory
from .cell import Capture

_GO_ALONG = frozenset({__name__.partition(".")[0], "cloudpickle", "IPython", "__main__", "__mp_main__"})
"""Modules that every rank has. Where there is no IPython, ``display`` and ``clear_output`` are there all the same."""

_STAY = ("jupyter", "notebook", "ipykernel", "pip", "uv", "wheel")
"""Beginnings of the names of distributions that no rank needs: ours, Jupyter's, and what installs others."""


def packages(capture: Capture) -> tuple[Package, ...]:
    """One for each module at the top level that is installed here and not of the standard library, by name."""
    local = {path.partition("/")[0].partition(".")[0] for path in capture.sources}
    apart = _GO_ALONG | local | sys.stdlib_module_names
    found: dict[str, Package] = {}
    versions = inventory.software(sys.path).versions
    for module, user in sorted(capture.modules.items(), key=lambda item: item[0] not in capture.referred):
        top = module.partition(".")[0]
        if top in found or top in apart or not _is_here(top):
            continue
        name = inventory.normalised(top)
        name = name if name in versions else _owner(top)
        found[top] = Package(top, name or top, versions.get(name, ""), user, module in capture.referred)
    return tuple(found[top] for top in sorted(found))


def _is_here(top: str) -> bool:
    if top in sys.modules:
        return not byvalue.exists_only_here(top)
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def installed() -> dict[str, str]:
    """The versions of the distributions here that a host can get from an index too, by name. Jupyter's stay here."""
    found = inventory.software(sys.path).versions
    gone = {name for entry in sys.path for name in _local(Path(entry))}
    return {name: version for name, version in found.items() if name not in gone and not name.startswith(_STAY)}


def _local(folder: Path) -> Iterator[str]:
    """Distributions that were installed from a directory or a file of this machine (PEP 610)."""
    for record in folder.glob("*.dist-info/direct_url.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            said = json.loads(record.read_text("utf-8"))
            if "dir_info" in said or said.get("url", "").startswith("file:"):
                yield inventory.normalised(record.parent.name.partition("-")[0])


@functools.lru_cache(maxsize=1024)
def _owner(top: str) -> str:
    """The distribution that installed the module, which has another name; empty if it is not found."""
    spec = importlib.util.find_spec(top) if top not in sys.modules else sys.modules[top].__spec__
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec is not None else []
    for place in filter(None, places):
        for information in Path(place).parent.glob("*.dist-info"):
            if any(_names(information / "top_level.txt", top)) or any(_names(information / "RECORD", top)):
                return inventory.normalised(information.name.partition("-")[0])
    return ""


def _names(file: Path, top: str) -> Iterator[str]:
    """The lines of a distribution's list that are of the module."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    yield from (line for line in lines if line == top or line.startswith((f"{top}/__init__.py", f"{top}.py,")))
