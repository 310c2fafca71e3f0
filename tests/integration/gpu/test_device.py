"""One GPU under one rank, as a notebook's cell finds it."""

from __future__ import annotations

from typing import Any

import torch

from tests.places import GPUS, Place

PLACE = """
import os
import torch, torch.distributed as dist
import jupyter_torchdist as td

device, backend, visible = td.device, dist.get_backend(), os.environ.get("CUDA_VISIBLE_DEVICES")
total = torch.full((1000,), 2.0, device=td.device)
dist.all_reduce(total)
everyone = [None] * td.world_size
dist.all_gather_object(everyone, str(total.device))
current = torch.cuda.current_device() if td.device.type == "cuda" else None
product = (torch.ones(300, 300, device=td.device) @ torch.ones(300, 300, device=td.device)).sum().item()
"""


def test_a_rank_has_its_device_and_a_group_on_it(one: Place) -> None:
    """Twice: the second rank is forked from a process that has served one with a device."""
    for _ in range(2):
        names = one.run(PLACE).names
        assert names["total"].tolist() == [2.0] * 1000 and names["total"].device.type == "cpu"
        assert names["product"] == 300.0**3
        if one.on_gpu:
            assert (names["device"], names["backend"], names["current"]) == (torch.device("cuda", 0), "nccl", 0)
            assert names["visible"] in [gpu.uuid for gpu in GPUS]
            assert names["everyone"] == ["cuda:0"]
        else:
            assert (names["device"], names["backend"], names["everyone"]) == (torch.device("cpu"), "gloo", ["cpu"])


def test_several_ranks_have_a_device_each(several: Place) -> None:
    names = several.run(PLACE).names
    assert names["total"].tolist() == [2.0 * several.ranks] * 1000
    if several.on_gpu:
        assert names["everyone"] == [f"cuda:{number}" for number in range(several.ranks)]


TRAINED = """
import torch
from torch import nn
import jupyter_torchdist as td

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).to(td.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(32, 4, device=td.device)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
half, view = x.bfloat16(), x[:2]
where = {value.device.type for value in (x, half, loss, *model.state_dict().values())}
"""


def plain(model: Any) -> bool:
    """A model as it is in a notebook that has no device: of torch's own classes, its values on the CPU and whole."""
    values = [*model.parameters(), *model.buffers()]
    return (
        type(model) is torch.nn.Sequential
        and all(type(value) in (torch.nn.Parameter, torch.Tensor) for value in values)
        and all(value.device.type == "cpu" and not value.is_meta for value in values)
        and not [part for part in model.modules() if part._forward_hooks or part._forward_pre_hooks]
    )


def test_what_was_made_on_a_device_comes_back_on_the_cpu(one: Place) -> None:
    names = one.run(TRAINED).names
    assert names["where"] == {one.kind}
    assert plain(names["model"]) and names["losses"][-1] < names["losses"][0]
    assert names["half"].dtype == torch.bfloat16 and names["half"].device.type == names["x"].device.type == "cpu"
    assert names["view"].untyped_storage().data_ptr() == names["x"].untyped_storage().data_ptr()
    states = [value for state in names["optimizer"].state.values() for value in state.values()]
    assert len(states) == 3 * 6 and all(value.device.type == "cpu" for value in states)
    again = names["model"](names["x"])  # it goes on in the notebook
    assert torch.isfinite(again).all()


FORKS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import jupyter_torchdist as td

on_device = torch.ones(8, device=td.device)  # the device is in use before the loader's workers are forked
data = TensorDataset(torch.arange(64.0).reshape(64, 1))
loader = DataLoader(data, batch_size=8, num_workers=2, pin_memory=td.device.type == "cuda")
total = sum((x.to(td.device, non_blocking=True).squeeze(1) * on_device).sum().item() for x, in loader)
"""


def test_workers_of_a_loader_beside_a_device(one: Place) -> None:
    assert one.run(FORKS).names["total"] == 2016.0
