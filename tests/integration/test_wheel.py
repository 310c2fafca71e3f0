"""What is in the wheel: all other tests run on an editable install, where nothing can be forgotten."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.lacking import lacking

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jupyter_torchdist"
FRONT = PACKAGE / "labextension"

EXTENSION = "share/jupyter/labextensions/jupyter-torchdist/"


def build_wheel(directory: Path) -> Path:
    """The wheel of this tree, as ``pip install .`` builds it; the front end is packed as it was built last."""
    if not (FRONT / "static" / "style.js").exists():
        lacking("the front end is not built: make front (it needs npm)")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def files_of(wheel: Path) -> tuple[set[str], set[str]]:
    """What lands among Python's packages, and what below the environment's root."""
    with ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    data = {name for name in names if ".data/data/" in name}
    return names - data, {name.partition(".data/data/")[2] for name in data}


def test_the_package_is_whole(wheel: Path) -> None:
    package, _ = files_of(wheel)
    sources = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    others = {f"jupyter_torchdist/{name}" for name in ("py.typed", "static/widget.js", "static/widget.css")}
    assert package == sources | others


def test_jupyter_finds_what_is_its(wheel: Path) -> None:
    _, data = files_of(wheel)
    built = {EXTENSION + str(path.relative_to(FRONT)) for path in FRONT.rglob("*") if path.is_file()}
    configured = "etc/jupyter/jupyter_server_config.d/jupyter_torchdist.json"
    assert data == built | {EXTENSION + "install.json", configured}
    with ZipFile(wheel) as packed:
        by_name = {name.partition(".data/data/")[2]: name for name in packed.namelist()}
        package = json.loads(packed.read(by_name[EXTENSION + "package.json"]))
        server = json.loads(packed.read(by_name[configured]))
        told = json.loads(packed.read(by_name[EXTENSION + "install.json"]))
    assert EXTENSION + package["jupyterlab"]["_build"]["load"] in data
    assert any(fnmatch(name, EXTENSION + "static/remoteEntry*.js") for name in data)
    assert any(fnmatch(name, EXTENSION + "schemas/jupyter-torchdist/*.json") for name in data)
    assert server["ServerApp"]["jpserver_extensions"] == {"jupyter_torchdist": True}
    assert told["packageName"] == "jupyter_torchdist"


def test_nothing_else_is_in_it(wheel: Path) -> None:
    package, data = files_of(wheel)
    stray = re.compile(r"(^|/)(tests|node_modules|__pycache__|src)/|\.(map|ts|tsbuildinfo|pyc)$")
    assert [name for name in sorted(package | data) if stray.search(name)] == []
    assert wheel.stat().st_size < 2_000_000
