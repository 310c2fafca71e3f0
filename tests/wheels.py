"""Small packages: their wheels, and what installing one leaves."""

from __future__ import annotations

import base64
import ensurepip
import hashlib
import shutil
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path


def wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str], *, tag: str = "py3-none-any", needs: str = ""
) -> Path:
    """``needs``: lines of the metadata."""
    stem = f"{name}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    about = f"{stem}.dist-info"
    inside = {
        **files,
        f"{about}/METADATA": metadata,
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{path},sha256={_hash(text)},{len(text.encode())}\n" for path, text in inside.items())
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**inside, f"{about}/RECORD": f"{record}{about}/RECORD,,\n"}.items():
            archive.writestr(member, text)
    return path


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def install(site: Path, made: Path) -> None:
    """As an installer does it for a wheel without programs."""
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site)


def installer(folder: Path) -> None:
    """The wheel of pip that comes with Python."""
    for bundled in (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"):
        shutil.copy(bundled, folder)


def source(folder: Path, name: str, version: str, backend: str) -> Path:
    """An archive of sources. ``backend``: the module that builds it (PEP 517)."""
    inside = folder / f".{name}-{version}"
    inside.mkdir()
    (inside / "backend.py").write_text(backend)
    (inside / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (inside / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(inside, f"{name}-{version}")
    shutil.rmtree(inside)
    return path
