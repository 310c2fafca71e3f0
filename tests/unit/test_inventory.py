"""GPUs as NVML tells them: asked of a library of the test's own, through the same C interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.machine.inventory import local_inventory, visible
from jupyter_torchdist.protocol.plan import Gpu, Inventory
from tests.nvml import compiled

Ask = Callable[..., Inventory]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """The inventory of a machine whose NVML is compiled so; asked in a process of its own, as libraries stay."""

    def ask(cuda_visible_devices: str | None = None, **defines: int) -> Inventory:
        environ = {**os.environ, "TORCHDIST_NVML": str(compiled(tmp_path, **defines))}
        environ.pop("CUDA_VISIBLE_DEVICES", None)
        if cuda_visible_devices is not None:
            environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
        program = (
            "from jupyter_torchdist.protocol import codec; from jupyter_torchdist.protocol.machine import inventory\n"
            "print(codec.dumps(inventory.local_inventory().to_json()))"
        )
        done = subprocess.run([sys.executable, "-c", program], env=environ, check=True, capture_output=True)
        return Inventory.from_json(codec.loads(done.stdout))

    return ask


def test_what_nvml_tells(ask: Ask) -> None:
    gpus = ask(PROCESSES=0).gpus
    assert gpus[1] == Gpu("GPU-101", 1, "NVIDIA Test 101", 80 * 2**30, 3 * 2**30, (4711, 4712))
    assert [(gpu.uuid, gpu.index, gpu.pids) for gpu in gpus] == [
        ("GPU-100", 0, ()),
        ("GPU-101", 1, (4711, 4712)),
        ("GPU-102", 2, ()),
    ]


def test_a_divided_gpu_is_its_instances(ask: Ask) -> None:
    gpus = ask(MIG=101).gpus
    assert [(gpu.uuid, gpu.index) for gpu in gpus] == [("GPU-100", 0), ("MIG-1010", 1), ("MIG-1011", 1), ("GPU-102", 2)]


def test_a_gpu_that_has_fallen_off_the_bus_is_passed_over(ask: Ask) -> None:
    assert [gpu.index for gpu in ask(BROKEN=1).gpus] == [0, 2]


def test_processes_that_nvml_does_not_tell(ask: Ask) -> None:
    assert [gpu.pids for gpu in ask(PROCESSES=7).gpus] == [(), (), ()]


def test_a_driver_that_does_not_start(ask: Ask) -> None:
    assert ask(INIT=9).gpus == ()


def test_the_scheduler_may_have_chosen(ask: Ask) -> None:
    assert [gpu.uuid for gpu in ask("2,GPU-100").gpus] == ["GPU-102", "GPU-100"]
    assert ask("").gpus == ()


def test_no_library_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHDIST_NVML", str(tmp_path / "missing.so"))
    inventory = local_inventory()
    assert inventory.gpus == ()
    assert inventory.cores == len(os.sched_getaffinity(0))
    assert inventory.memory > 0
    assert inventory.torch.startswith("2.")


THREE = tuple(Gpu(uuid, index, "", 0, 0) for index, uuid in enumerate(["GPU-ab12", "GPU-ab34", "GPU-cd56"]))
DIVIDED = (Gpu("MIG-1", 0, "", 0, 0), Gpu("MIG-2", 0, "", 0, 0), Gpu("GPU-3", 1, "", 0, 0))


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("GPU-cd,GPU-ab1", [2, 0]),
        ("GPU-ab", []),  # two match
        ("1,7,0", [1]),  # CUDA stops at the first bad entry
        ("1,-1,0", [1]),
        ("NoDevFiles", []),
        ("", []),
        ("0,,1", [0]),
        ("0,1,0", []),  # and takes none where one is named twice
    ],
)
def test_cuda_visible_devices(variable: str | None, expected: list[int]) -> None:
    assert [gpu.index for gpu in visible(THREE, variable)] == expected


def test_cuda_visible_devices_of_instances() -> None:
    assert [gpu.uuid for gpu in visible(DIVIDED, "0")] == ["MIG-1"]
    assert [gpu.uuid for gpu in visible(DIVIDED, "MIG-2,1")] == ["MIG-2", "GPU-3"]
