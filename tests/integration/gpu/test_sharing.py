"""A GPU has one rank of one job: what asks for more is refused in words before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_torchdist.client import Request, submit
from jupyter_torchdist.protocol.errors import OptionError, ResourceError
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.spec import Options
from tests.leaks import wait_until
from tests.places import CPUS, GPUS, PATIENCE, Place

HOLDS = """
import os, time, torch
import jupyter_torchdist as td

held = torch.ones(1000, device=td.device)
print("holds", flush=True)
while not os.path.exists(stop):
    time.sleep(0.02)
"""


def test_more_ranks_than_gpus(one: Place, record_property: Callable[[str, object], None]) -> None:
    wanted = len(GPUS) + 1
    with pytest.raises(ResourceError) as refused:
        submit(Request("x = 1\n", "Cell In[3]", 2, Options(gpus=wanted), {}))
    record_property("refusal", refused.value)
    assert f"--ranks {wanted}" in str(refused.value)
    if one.on_gpu:
        assert f"--gpus {wanted}:" in str(refused.value) and GPUS[0].name in str(refused.value)
    with pytest.raises(OptionError, match="cannot be used together"):
        parse_options("--ranks 2 --gpus 1")


def test_cpu_ranks_beside_gpus_see_none(one: Place) -> None:
    source = "import torch\nimport jupyter_torchdist as td\nfound = str(td.device), torch.cuda.is_available()\n"
    assert CPUS.run(source).names["found"] == ("cpu", False)


def test_a_gpu_that_has_a_job_is_taken_and_then_free(one: Place, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = submit(Request(HOLDS, "Cell In[3]", 2, one.options, {"stop": str(stop)}))
    try:
        assert wait_until(lambda: "holds" in job.logs(0, "out"), PATIENCE)
        if one.on_gpu and len(GPUS) == 1:
            with pytest.raises(ResourceError, match=f"GPU 0 has job {job.id}"):
                submit(Request("x = 1\n", "Cell In[4]", 2, one.options, {}))
        else:
            assert one.run("x = 1\n").names["x"] == 1
    finally:
        stop.touch()
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert one.run("x = 1\n").names["x"] == 1
