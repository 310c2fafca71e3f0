"""The Python of the hosts: an environment with torch and numpy, what these need, and nothing of ours or of Jupyter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement

from tests.lacking import lacking

PLACE = Path("/opt/node-python")
"""Where it is on a host."""
OTHER = Path("/opt/other-python")
"""Where an environment of another release of Python is on a host, if there is one here."""
SITE = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


def required(*names: str) -> dict[str, Distribution]:
    """The installed distributions of these names, and those that they need, by name."""
    found: dict[str, Distribution] = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # a need of another platform's, or of an extra
        needs = map(Requirement, found[name].requires or [])
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def entries(distributions: Iterable[Distribution]) -> set[str]:
    """What they have put into ``site-packages``."""
    files = (file.parts for each in distributions for file in each.files or ())
    return {parts[0] for parts in files} - {"..", "__pycache__"}


def make(place: Path, *more: str) -> Path:
    """A virtual environment of empty folders and files, onto which a host mounts this interpreter's packages.

    ``more``: packages beside torch and numpy.
    """
    (place / "bin").mkdir(parents=True)
    interpreter = Path(sys.base_prefix, "bin", SITE.parts[1])
    for name in ("python", "python3"):
        (place / "bin" / name).symlink_to(interpreter)
    (place / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    site = place / SITE
    site.mkdir(parents=True)
    for name in entries(required("torch", "numpy", *more).values()):
        if _source(name).is_dir():
            (site / name).mkdir()
        else:
            (site / name).touch()
    _compile()
    return place


def _source(name: str) -> Path:
    """Of an entry: in this environment, or in the one below it."""
    return next(found for folder in sys.path if (found := Path(folder, name)).exists())


def _compile() -> None:
    """Hosts only read the packages: without compiled files each import there would compile them again, for seconds."""
    if not Path(cache_from_source(str(_source("torch") / "__init__.py"))).exists():
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run([sys.executable, "-c", "import numpy, torch"], env=environ, check=True)


def mounts(place: Path) -> dict[Path, Path]:
    """What is mounted on a host for the environment made at ``place``, by where."""
    found = {PLACE: place}
    for entry in sorted((place / SITE).iterdir()):
        found[PLACE / SITE / entry.name] = _source(entry.name)
    if other := _other():
        found[OTHER] = other.parents[1]
    return found


def _other() -> Path | None:
    """The Python of an environment of another release, as ``make test-torch`` makes it; None if there is none."""
    environments = Path(__file__).parents[2].glob(".venv-py*-torch*/bin/python")
    return next((python for python in sorted(environments) if f"-py{SITE.parts[1][6:]}-" not in str(python)), None)


def other() -> Path:
    """Of a host: the Python of another release. Skips the test if there is none."""
    if _other() is None:
        lacking("one release of Python: make test-torch V=2.13.0 PYTHON=python3.10")
    return OTHER / "bin/python"


def too_old() -> Path:
    """A Python that is too old for this package, as pyenv keeps it. Skips the test if there is none."""
    return _too_old() or lacking("no Python 3.9 of pyenv: pyenv install 3.9")


def _too_old() -> Path | None:
    return next(Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9"), None)


def installations() -> list[Path]:
    """The folders of other releases of Python, which a host must see."""
    return [python.resolve().parents[1] for python in (_other(), _too_old()) if python]
