"""How a cell on a GPU fails, what is said, and that the next cell finds the GPU as if nothing had been."""

from __future__ import annotations

import torch

from jupyter_torchdist.client import Request, submit
from tests.leaks import wait_until
from tests.places import PATIENCE, Place

HEALTHY = """
import torch
import jupyter_torchdist as td

healthy = torch.ones(100, device=td.device).sum().item()
"""


def healthy(place: Place) -> bool:
    return bool(place.run(HEALTHY).names["healthy"] == 100)


RAISES = """
import torch
import jupyter_torchdist as td

x = torch.ones(2, 3, device=td.device)
y = x @ x
"""


def test_an_exception_is_the_cells_own(one: Place) -> None:
    outcome = one.end_of(RAISES)
    assert outcome.state == "failed" and type(outcome.error) is RuntimeError
    assert "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)" in str(outcome.error)
    assert "y = x @ x" in outcome.errors + "".join(getattr(outcome.error, "__notes__", []))


ASSERTS = """
import torch
import jupyter_torchdist as td

kept = [1, 2]
lost = torch.ones(3, device=td.device)
table = torch.zeros(4, device=td.device)
value = table[torch.tensor([9], device=td.device)]
read = value.item()
"""


def test_an_assertion_on_the_device_ends_the_rank_and_not_the_next_one(one: Place) -> None:
    """After one, nothing can be read from the GPU in that process any more."""
    outcome = one.end_of(ASSERTS)
    assert outcome.state == "failed" and isinstance(outcome.error, (RuntimeError, IndexError)), outcome
    assert ("device-side assert" if one.on_gpu else "index 9 is out of bounds") in str(outcome.error)
    assert healthy(one)


TOO_MUCH = """
import torch
import jupyter_torchdist as td

kept = 1
too_much = torch.empty(1 << 50, dtype=torch.uint8, device=td.device)
"""


def test_memory_that_is_not_there_is_said(one: Place) -> None:
    """The exception is the cell's own, the line is named, and the device is free again."""
    outcome = one.end_of(TOO_MUCH)
    assert outcome.state == "failed" and isinstance(outcome.error, RuntimeError)
    words = str(outcome.error)
    if one.on_gpu:
        assert isinstance(outcome.error, torch.OutOfMemoryError)
        assert "CUDA out of memory. Tried to allocate" in words and "GPU 0" in words
    else:
        assert "allocate" in words and str(1 << 50) in words
    assert "too_much = torch.empty" in outcome.errors + "".join(getattr(outcome.error, "__notes__", []))
    assert healthy(one)


KILLED = """
import os, signal
import torch, torch.distributed as dist
import jupyter_torchdist as td

held = torch.ones(1000, device=td.device)
dist.all_reduce(held)
if td.rank == td.world_size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(held)  # for which the others wait
print(held.sum().item())
"""


def test_a_rank_that_is_killed_ends_the_job(most: Place) -> None:
    outcome = most.end_of(KILLED)
    assert outcome.state == "failed" and outcome.error is not None
    assert f"rank {most.ranks - 1}" in str(outcome.error) and "SIGKILL" in str(outcome.error), outcome.error
    assert healthy(most)


ENDLESS = """
import torch
import jupyter_torchdist as td

x = torch.ones(500, 500, device=td.device)
print("begun", flush=True)
while True:
    x = (x @ x).clamp(0, 1)
"""


def test_an_interrupt_ends_an_endless_loop(one: Place) -> None:
    job = submit(Request(ENDLESS, "Cell In[3]", 2, one.options, {}))
    assert wait_until(lambda: "begun" in job.logs(0, "out"), PATIENCE)
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled", job.state
    assert healthy(one)
