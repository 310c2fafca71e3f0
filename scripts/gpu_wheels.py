"""The packages of ``scripts/gpu_check``: downloaded here, installed on the GPU machine, which has no internet."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_processes import ROOT, run, tail_of

WHEELS = ROOT / ".gpu-check" / "wheels"

PYTHON = (3, 12)
"""That of the GPU machine; the wheels are for it alone."""
GLIBC = ("2_5", "2_12", "2_17", "2_24", "2_26", "2_27", "2_28")
"""Every tag that such a machine takes: pip compares them by name."""
PLATFORMS = [
    *(f"manylinux_{tag}_x86_64" for tag in GLIBC),
    *(f"manylinux{tag}_x86_64" for tag in ("1", "2010", "2014")),
]
IN_THE_IMAGE = ("torch",)
"""What is there, with its CUDA libraries, and far too large to travel."""
FOR_THE_TESTS = ("jupyter-client", "psutil", "pytest", "pytest-timeout")
MOST_BYTES = 60_000_000


def requirements() -> list[str]:
    """Ours and the tests', as ``pyproject.toml`` says them, but for what is in the machine's image."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = [one for one in project["optional-dependencies"]["dev"] if _name(one) in FOR_THE_TESTS]
    return [one for one in (*project["dependencies"], *tests) if _name(one) not in IN_THE_IMAGE]


def _name(requirement: str) -> str:
    return requirement.replace("_", "-").partition(">")[0].partition("=")[0].strip().lower()


def collect() -> int:
    """Download the wheels that the machine may lack; say what to carry."""
    with tempfile.TemporaryDirectory() as fresh:
        words = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--only-binary=:all:"]
        words += [f"--platform={name}" for name in PLATFORMS]
        version = ".".join(map(str, PYTHON))
        words += [f"--python-version={version}", "--implementation=cp", f"--abi=cp{version.replace('.', '')}"]
        words += ["--abi=abi3", "--abi=none", f"--constraint={ROOT / 'constraints.txt'}", f"--dest={fresh}"]
        done = subprocess.run([*words, *requirements()], check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"The wheels could not be downloaded:\n{done.stderr.strip()}", file=sys.stderr)
            return 1
        shutil.rmtree(WHEELS, ignore_errors=True)
        shutil.copytree(fresh, WHEELS)
    found = list(WHEELS.iterdir())
    size = sum(wheel.stat().st_size for wheel in found)
    print(f"{len(found)} wheels, {size / 1e6:.1f} MB, in {WHEELS.relative_to(ROOT)}: carry that folder, and there run")
    print("  bash scripts/gpu_check")
    if size > MOST_BYTES:
        print(f"That is more than the {MOST_BYTES / 1e6:.0f} MB that may travel.", file=sys.stderr)
        return 1
    return 0


def environment(place: Path) -> tuple[str, str]:
    """The Python that the steps run on, and how it came to be.

    Where the wheels fit: an environment of its own over this Python's, in which pip puts only what is missing or too
    old. Raises ``RuntimeError`` when that fails.
    """
    if not WHEELS.is_dir() or sys.version_info[:2] != PYTHON:
        return sys.executable, "as it was found" if WHEELS.is_dir() else "as it was found: no wheels were carried"
    target, log = place / "environment", place / "install.log"
    python = str(target / "bin" / "python")
    _must([sys.executable, "-m", "venv", "--without-pip", str(target)], log)
    (library,) = target.glob("lib/python*/site-packages")
    below = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    lines = [f"import site; site.addsitedir({entry!r})" for entry in below]
    (library / "gpu_check.pth").write_text("\n".join([str(ROOT), *lines]) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
    _must([*pip, "--no-index", "--no-cache-dir", f"--find-links={WHEELS}", *requirements()], log)
    names = sorted(entry.name.split(".dist-info")[0] for entry in library.glob("*.dist-info"))
    return python, f"installed over it: {', '.join(names)}"


def _must(words: Sequence[str], log: Path) -> None:
    code = run(words, 60, log)
    if code != 0:
        raise RuntimeError(f"{' '.join(words[1:4])} ended with {code}:\n{tail_of(log)}")
