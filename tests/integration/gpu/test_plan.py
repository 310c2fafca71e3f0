"""The memory plan beside what torch's allocator held at its peak."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jupyter_torchdist.client.submit import Request, prepare, submit
from jupyter_torchdist.protocol.options.parsing import parse_options
from tests.memory import MEASURED, MODEL, gpt
from tests.places import PATIENCE, Place

ALLOCATOR = """
import sys
import jupyter_torchdist as td

{loop}
peak = {{"later": torch.cuda.max_memory_allocated()}}
peaks = td.gather(peak)
"""
"""A GPU's allocator counts by itself: in it are cuBLAS's workspaces, which the plan does not know."""

WORKSPACES = 100 * 1024**2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_peak_is_what_ranks_allocate(
    most: Place, strategy: str, record_property: Callable[[str, object], None]
) -> None:
    source = gpt(width=512, layers=8, length=513) if most.on_gpu else gpt(width=64, layers=2, length=129)
    line = f"{most.line} --strategy {strategy}"
    planned = prepare(Request(source=source, options=parse_options(f"{line} --plan"))).memory()
    assert planned is not None and planned.need.peak is not None
    model, loop = source[: len(MODEL)], source[len(MODEL) :]
    measured = (ALLOCATOR if most.on_gpu else MEASURED).format(loop=loop)
    job = submit(Request(source=model + measured, options=parse_options(line)))
    job.wait(PATIENCE)
    job.raise_for_state()
    highest = max(peak["later"] for peak in job.result()["peaks"])
    record_property(f"{strategy}: planned / measured MB", f"{planned.need.peak / 1e6:.0f} / {highest / 1e6:.0f}")
    assert planned.fits is True, planned.verdict
    assert planned.need.peak == pytest.approx(highest, rel=0.1, abs=WORKSPACES if most.on_gpu else 0)
