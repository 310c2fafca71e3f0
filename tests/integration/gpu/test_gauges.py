"""What NVML tells of a rank's GPU, beside what torch tells of it there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from jupyter_torchdist.client import Request, submit
from jupyter_torchdist.protocol.gauges import Gauges
from jupyter_torchdist.store import gauges
from tests.leaks import wait_until
from tests.places import GPUS, PATIENCE, Place

MB = 1_000_000
CONTEXT = 2_000 * MB
"""The most that CUDA's context, NCCL and cuBLAS may hold beside torch's allocator."""

BUSY = """
import os, torch
import jupyter_torchdist as td

gpu = td.device.type == "cuda"
held = torch.ones(SIZE, dtype=torch.uint8, device=td.device)
x = torch.ones(1000, 1000, device=td.device)
while not os.path.exists(stop):
    x = (x @ x).clamp(0, 1)
    if gpu:
        torch.cuda.synchronize()
reserved = torch.cuda.max_memory_reserved() if gpu else None
total = torch.cuda.get_device_properties(0).total_memory if gpu else None
"""


def test_the_gauges_of_a_busy_rank(one: Place, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    size = 4_000 * MB if one.on_gpu else 300 * MB
    stop = tmp_path / "stop"
    source = BUSY.replace("SIZE", str(size))
    job = submit(Request(source, "Cell In[3]", 2, one.options, {"stop": str(stop)}))

    def seen() -> bool:
        told = gauges.read(job.paths).get(0, Gauges())
        on_gpu = (told.gpu or 0) > 10 and (told.gpu_memory or 0) > size
        return (told.cpu or 0) > 5 and (on_gpu if one.on_gpu else (told.memory or 0) > size)

    try:
        wait_until(seen, 20)
        told = gauges.read(job.paths).get(0, Gauges())
    finally:
        stop.touch()
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    names = job.result()
    record_property("gauges", told)
    assert (told.cpu or 0) > 5 and (told.memory or 0) > 0
    if not one.on_gpu:
        assert (told.gpu, told.gpu_memory, told.gpu_total) == (None, None, None)
        return
    reserved, total = names["reserved"], names["total"]
    record_property("torch reserved MB", reserved // MB)
    assert (told.gpu or 0) > 10
    assert reserved * 0.99 <= (told.gpu_memory or 0) <= reserved + CONTEXT
    assert abs((told.gpu_total or 0) - total) < 0.05 * total


def test_the_inventory_is_what_torch_sees(one: Place, record_property: Callable[[str, object], None]) -> None:
    """This process asks torch in a rank only: it opens no GPU itself."""
    names = one.run("import torch\nfound = torch.cuda.device_count(), torch.cuda.is_available()\n").names
    record_property("GPUs", [(gpu.name, gpu.memory // MB) for gpu in GPUS])
    assert names["found"] == ((1, True) if one.on_gpu else (0, False))
    assert not torch.cuda.is_initialized()
