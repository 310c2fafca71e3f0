"""What NCCL and torch's flight recorder tell of collectives; on CPUs what C code prints, and Gloo's recorder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.places import Place

SPEAKS = """
import os
import torch, torch.distributed as dist
import jupyter_torchdist as td

x = torch.ones(8, device=td.device)
dist.all_reduce(x)
if td.device.type == "cpu":
    os.write(1, b"NCCL INFO: not NCCL, but past Python as it would be\\n")
"""


def test_the_log_of_nccl_reaches_the_ranks_output(most: Place, record_property: Callable[[str, object], None]) -> None:
    printed = most.run(SPEAKS, env=("NCCL_DEBUG=INFO",)).printed
    assert "NCCL INFO" in printed
    if version := re.search(r"NCCL version (\S+)", printed):
        record_property("NCCL", version[1])


def test_or_the_file_that_a_user_names(one: Place, tmp_path: Path) -> None:
    file = tmp_path / "nccl.log"
    source = SPEAKS.replace("os.write(1,", "open(os.environ['NCCL_DEBUG_FILE'], 'wb').write(")
    one.run(source, env=("NCCL_DEBUG=INFO", f"NCCL_DEBUG_FILE={file}"))
    assert "NCCL INFO" in file.read_text()


RECORDED = """
import time
import torch, torch.distributed as dist
import jupyter_torchdist as td
from jupyter_torchdist.ranks.streams import flight

x = torch.ones(1000, device=td.device)
for _ in range(5):
    dist.all_reduce(x)
waiting, gpu = [], td.device.type == "cuda"
if gpu:
    torch.cuda._sleep(4_000_000_000)  # cycles: seconds, behind which a collective waits
    work = dist.all_reduce(x, async_op=True)
    time.sleep(0.5)
    waiting = [flight.oldest(group) for group, count in flight.counts().items() if count.under_way]
    work.wait()
    torch.cuda.synchronize()
until = time.monotonic() + 10
while any(count.under_way for count in flight.counts().values()) and time.monotonic() < until:
    time.sleep(0.1)
counts = [tuple(count) for count in flight.counts().values()]
waiting = [(one.operation, one.group, one.size) for one in waiting if one]
recorders = sorted({group.recorder for group in flight.counts()})
"""


def test_the_flight_recorder_knows_collectives(most: Place, record_property: Callable[[str, object], None]) -> None:
    names = most.run(RECORDED).names
    record_property("recorders", names["recorders"])
    assert names["counts"] and all(entered == ended for entered, ended in names["counts"]), names["counts"]
    assert max(entered for entered, _ in names["counts"]) >= (6 if most.on_gpu else 5)
    if most.on_gpu:
        assert [one for one in names["waiting"] if one[0] == "all_reduce" and one[1].startswith("nccl")], names
