"""What hosts have installed, compared with the notebook: what differs is noted, what is missing refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.capture import capture_cell, packages
from jupyter_torchdist.planning.software import compare, install
from jupyter_torchdist.protocol.bundle import Package
from jupyter_torchdist.protocol.errors import ResourceError
from jupyter_torchdist.protocol.machine import inventory
from jupyter_torchdist.protocol.plan import Inventory, Reach, Software

MODULES = ("einops", "numpy", "pip")
EINOPS = Package("einops", "einops", "0.8.1", "line 3", certain=True)
NUMPY = Package("numpy", "numpy", "2.1.0", "normalise", certain=False)


def host(
    name: str,
    versions: dict[str, str] | None = None,
    modules: tuple[str, ...] = MODULES,
    torch: str = "2.13.0",
    python: str = "3.11.9",
) -> Inventory:
    versions = {"einops": "0.8.1", "numpy": "2.1.0"} if versions is None else versions
    software = Software(versions, modules)
    return Inventory(name, 8, 2**36, python=python, torch=torch, reach=Reach("/env/bin/python"), software=software)


def note(*hosts: Inventory) -> str:
    return compare([EINOPS, NUMPY], "3.11.7", "2.13.0", hosts)


def test_equal_hosts_are_not_spoken_of() -> None:
    assert not note(host("gpu1"), host("gpu2", torch="2.13.0+cu130"), host("gpu3", torch="2.13.0+cu130")).count("torch")
    assert not note(host("gpu1"), host("gpu2"))
    assert not note(Inventory("here", 2, 2**30, python="3.10.1", torch="2.0"))


def test_what_differs_is_one_note() -> None:
    told = note(
        host("gpu1", {"einops": "0.7.0", "numpy": "2.1.0"}, python="3.10.13", torch="2.11.0+cu126"),
        host("gpu2", {"einops": "0.8.1", "numpy": "1.26.4"}, torch="2.13.0+cu130"),
    )
    assert told.splitlines() == [
        "what hosts have differs from this notebook: Python, torch, CUDA, einops, numpy",
        "  Python 3.11 here; 3.10 on gpu1; 3.11 on gpu2",
        "  torch 2.13.0 here; 2.11.0 on gpu1; 2.13.0 on gpu2",
        "  CUDA 12.6 on gpu1; 13.0 on gpu2",
        "  einops 0.8.1 here; 0.7.0 on gpu1; 0.8.1 on gpu2",
        "  numpy 2.1.0 here; 2.1.0 on gpu1; 1.26.4 on gpu2",
    ]


def test_the_cuda_of_a_torch_that_does_not_name_it() -> None:
    old = {"einops": "0.8.1", "numpy": "2.1.0", "nvidia-cuda-runtime-cu12": "12.8.90"}
    assert "CUDA 12.8 on gpu1; 13.0 on gpu2" in note(host("gpu1", old), host("gpu2", torch="2.13.0+cu130"))


def test_a_package_that_is_missing_and_perhaps_not_needed_is_noted() -> None:
    assert "numpy 2.1.0 here; none on gpu1" in note(host("gpu1", {"einops": "0.8.1"}, ("einops",)))


def test_a_package_that_is_missing_is_refused_with_the_command() -> None:
    with pytest.raises(ResourceError) as caught:
        note(host("gpu1", {}, ("pip",)), host("gpu2"), host("gpu3", {}, ()))
    words = "gpu1 (/env/bin/python) lacks einops (line 3); gpu3 (/env/bin/python) lacks einops (line 3)"
    assert caught.value.message == f"the cell needs packages: {words}"
    assert "ssh gpu1 '/env/bin/python -m pip install einops==0.8.1'" in caught.value.hint
    assert "ssh gpu3 'uv pip install -p /env/bin/python einops==0.8.1'" in caught.value.hint


def test_a_package_without_a_distribution_is_there_if_it_can_be_imported() -> None:
    assert not note(host("gpu1", {"numpy": "2.1.0"}))


def test_a_requirement_that_a_shell_would_read_is_quoted() -> None:
    assert install(host("gpu1"), "torch>=2.8") == "ssh gpu1 '/env/bin/python -m pip install \"torch>=2.8\"'"


def test_what_an_interpreter_finds(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for name in ("Py_Yaml-6.0.1.dist-info", "old.thing-1.0-py3.11.egg-info", "yaml", "one-2.0.dist-info"):
        (tmp_path / name).mkdir()
    for name in ("flat.py", "fast.cpython-311-x86_64-linux-gnu.so", "old-style.pth"):
        (tmp_path / name).touch()
    found = inventory.software(["", "/nowhere", str(tmp_path)])
    assert found.versions == {"py-yaml": "6.0.1", "old-thing": "1.0", "one": "2.0"}
    assert {"yaml", "flat", "fast", "one", "json"} <= set(found.modules)
    assert "pth" not in found.modules
    (tmp_path / "two-1.dist-info").mkdir()  # installed since
    os.utime(tmp_path, ns=(1, 1))
    assert inventory.software([str(tmp_path)]).versions["two"] == "1"


def test_what_a_cell_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook: dict[str, Any] = {"__name__": "__main__"}
    (tmp_path / "helpers.py").write_text("import hypothesis\n")
    monkeypatch.syspath_prepend(tmp_path)
    exec("import yaml, json, helpers\nfrom packaging.version import Version\nv = Version('1')", notebook)
    source = "import numpy.linalg\nimport nowhere\ndef later():\n    import torch\nyaml.dump(v), helpers, json\n"
    found = {one.module: one for one in packages(capture_cell(source, "Cell", 2, notebook, cwd=tmp_path))}
    assert {name: (one.name, one.user, one.certain) for name, one in found.items()} == {
        "hypothesis": ("hypothesis", "a local module", False),
        "numpy": ("numpy", "line 2", True),
        "packaging": ("packaging", "Version", True),
        "torch": ("torch", "line 5", False),
        "yaml": ("pyyaml", "module yaml", True),
    }
    assert all(one.version for one in found.values())
    sys.modules.pop("helpers", None)
