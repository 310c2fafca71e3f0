"""What a checkpoint costs the loop, and how fast it is written and read, beside ``torch.save`` of the same."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.report import Row, median
from tests.benchmarks.stage import Stage

RUNS = 9
SETUP = """
import pathlib, shutil, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import jupyter_torchdist as td

def training(sharded):
    model = nn.Sequential(*[nn.Linear(1600, 1600) for _ in range(10)])  # 25.6 M parameters: 307 MB with Adam's state
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1600)).sum().backward()
    optimizer.step()
    return model, optimizer

def seconds(act):
    dist.barrier()
    begun = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begun

def clean():
    dist.barrier()
    if td.is_main:
        shutil.rmtree(place, ignore_errors=True)
    dist.barrier()
"""
CELL = """%%distribute --ranks 2
model, optimizer = training({sharded})
spent = dict(blocked=[], whole=[], load=[])
step = 0
for run in range({runs} + 1):  # the first makes the group and the memory for the copies
    step += 1
    saving = []
    blocked = seconds(lambda: saving.append(td.save(place, model, optimizer, step=step, keep=1)))
    saving[0].wait()
    step += 1
    whole = seconds(lambda: td.save(place, model, optimizer, step=step, keep=1, asynchronous=False))
    load = seconds(lambda: td.load(place, model, optimizer))
    if run:
        for name, value in dict(blocked=blocked, whole=whole, load=load).items():
            spent[name].append(value)
clean()
"""
PLAIN = """%%distribute --ranks 2
import os
model, optimizer = training(False)
state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
file = place + ".pt"

def write():
    if td.is_main:
        with open(file, "wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())

def read():
    saved = torch.load(file)  # every rank reads all of it, as one does without sharded files
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])

plain = dict(save=[seconds(write) for _ in range({runs})], load=[seconds(read) for _ in range({runs})])
dist.barrier()
if td.is_main:
    os.unlink(file)
"""


def rows() -> Iterator[Row]:
    with Stage.open() as stage, stage.notebook() as notebook:
        notebook.run(SETUP, timeout=120)
        notebook.run(f"place = {str(stage.root / 'checkpoints')!r}")
        notebook.run(PLAIN.format(runs=RUNS), timeout=300)
        plain = {name: tuple(values) for name, values in notebook.value("plain").items()}
        for name, sharded in (("fsdp", True), ("ddp", False)):
            notebook.run(CELL.format(sharded=sharded, runs=RUNS), timeout=300)
            spent = {name: tuple(values) for name, values in notebook.value("spent").items()}
            whole = spent["whole"]
            yield Row(
                "checkpoints", f"{name}: an asynchronous `td.save` of 307 MB blocks the loop", median(spent["blocked"]),
                "s", 0.15, median(whole), "a synchronous one", samples=spent["blocked"], yardsticks=whole,
            )  # fmt: skip
            yield Row(
                "checkpoints", f"{name}: 307 MB saved, on disk", median(whole), "s", 1.1, median(plain["save"]),
                "`torch.save` and fsync on rank 0", samples=whole, yardsticks=plain["save"],
            )  # fmt: skip
            yield Row(
                "checkpoints", f"{name}: 307 MB loaded on 2 ranks", median(spent["load"]), "s", 3,
                median(plain["load"]), "`torch.load` and `load_state_dict`", samples=spent["load"],
                yardsticks=plain["load"],
                note="PyTorch's DCP reads each tensor and copies it into the one there is, the optimizer's, too; "
                "`load_state_dict` of an optimizer takes the tensors as they were read.",
            )  # fmt: skip
