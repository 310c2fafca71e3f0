"""Refused cells that call ``td.prepare``, each with a remedy."""

from __future__ import annotations

from .advising import Advice

PREPARED = """
import torch
import jupyter_torchdist as td
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
td.prepare(GIVEN)
for step in range(4):
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""

BOTH = PREPARED.replace("GIVEN", "model, optimizer")
UNUSED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)
    def forward(self, x):
        return self.first(x)
"""
LOADED = """
import torch
import jupyter_torchdist as td
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(25, 6), torch.randn(25, 2))
losses = []
loader, other = DataLoader(data, batch_size=8), DataLoader(data, batch_size=7)
model, optimizer, loader, other = td.prepare(model, optimizer, loader, other)
for (x, y), (v, w) in zip(loader, other):
    loss = nn.functional.mse_loss(model(x), y) + nn.functional.mse_loss(model(v), w)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
DIVIDED = "batch_size=8, sampler=DistributedSampler(data, td.world_size, td.rank))"


PREPARING = [
    # td.prepare
    *[
        Advice(
            name,
            PREPARED.replace("GIVEN", given),
            "ddp",
            words,
            told,
            edits=((f"prepare({given})", f"prepare({right})"),),
        )
        for name, given, right, words, told in (
            ("prepared_twice", "model, model, optimizer", "model, optimizer", "is prepared already", "once"),
            ("prepared_list", "[model], optimizer", "model, optimizer", "and was given", "leave it out"),
            (
                "prepared_loss",
                "model, nn.MSELoss(), optimizer",
                "model, optimizer",
                "has no parameters",
                "needs no preparing",
            ),
            ("prepared_optimizer", "optimizer", "model, optimizer", "in no prepared model", "prepare the model"),
            (
                "prepared_part",
                "model, model[0], optimizer",
                "model, optimizer",
                "shares parameters with",
                "the outer one",
            ),
        )
    ],
    Advice(
        *("prepared_part_called", BOTH.replace("model(x)", "model[2](torch.tanh(model[0](x)))"), "ddp"),
        *("is called by itself", "call the Sequential"),
        edits=(("model[2](torch.tanh(model[0](x)))", "model(x)"),),
    ),
    Advice(
        "prepared_unused",
        BOTH.replace("nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))", "Net()").replace(
            "torch.manual_seed", f"{UNUSED}torch.manual_seed"
        ),
        *("ddp", "took no part in the loss", "-O find_unused_parameters=1"),
        option=("find_unused_parameters=1",),
    ),
    Advice(
        *("prepared_otherwise", PREPARED.replace("GIVEN", "model, *[optimizer][:1 - td.rank]"), "ddp"),
        *("the ranks prepare different things", "with the same arguments"),
        edits=(("*[optimizer][:1 - td.rank]", "optimizer"),),
    ),
    *[
        Advice(name, BOTH, "ddp", words, told, given=given)
        for name, words, told, given in (
            (
                *("prepared_uneven", "-O uneven_inputs and td.prepare", "leave -O uneven_inputs out"),
                {"option": ("uneven_inputs=1",)},
            ),
            (
                *("prepared_accumulation", "only for cells that do not call td.prepare", "leave out one of the two"),
                {"grad_accumulation": 2},
            ),
            ("prepared_verify", "--verify compares what the strategy does, but", "leave --verify out", {"verify": 2}),
        )
    ],
    Advice(
        *("prepared_comm_hook", BOTH, "ddp", "comm_hook=bf16: DDP's own reducer", "use -O comm_hook=fp16"),
        given={"option": ("comm_hook=bf16",)},
        option=("comm_hook=fp16",),
        tolerance=1e-2,
    ),
    Advice(
        *("prepared_stages", BOTH, "pp", "td.prepare cannot cut a model into the stages", "leave td.prepare out"),
        edits=(("td.prepare(model, optimizer)\n", ""),),
    ),
    Advice(
        *("prepared_sampler", LOADED.replace("batch_size=8)", DIVIDED), "ddp"),
        *("this DataLoader has a DistributedSampler", "leave the sampler out"),
        edits=((DIVIDED, "batch_size=8)"), ("batch_size=7", "batch_size=8")),
    ),
    Advice(
        *("prepared_sizes", LOADED, "ddp", "samples are used in one step, and", "batch sizes that the ranks divide"),
        edits=(("batch_size=7", "batch_size=8"),),
    ),
    Advice(
        *(
            "prepared_last_batch",
            LOADED.replace("batch_size=7", "batch_size=4"),
            "ddp",
            "samples are used in one step, and",
        ),
        told="and drop_last=True",
        edits=(("batch_size=8", "batch_size=8, drop_last=True"), ("batch_size=4", "batch_size=4, drop_last=True")),
    ),
]
