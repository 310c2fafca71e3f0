"""Models in which a sample's result depends on the other samples, on its place among them, or on how many they are.

Divided among ranks without care, each of them trains something else than one device does, and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jupyter_torchdist.protocol.errors import StrategyError

SAMPLES, BATCH, WIDTH = 32, 8, 6
Function = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """Two layers with ``between`` in their midst, and what such a model may carry along."""

    def __init__(self, between: Function) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("table", torch.randn(SAMPLES, WIDTH))
        self.register_buffer("running", torch.zeros(WIDTH))
        self.table: Tensor
        self.running: Tensor
        self.between, self.seen, self.memory = between, 0, torch.zeros(WIDTH)
        self.activations: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.between(self, self.first(x))))


def _running_mean(net: Net, h: Tensor) -> Tensor:
    net.running.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h - net.running


def _running_mean_in_an_attribute(net: Net, h: Tensor) -> Tensor:
    net.memory = 0.9 * net.memory + 0.1 * h.detach().mean(0)
    return h - net.memory


def _count(net: Net, h: Tensor) -> Tensor:
    net.seen += len(h)
    return h * (1 + 10 / net.seen)


def _branch(net: Net, h: Tensor) -> Tensor:
    return 2 * h if h.mean() > 0 else h


def _clipped_on_its_way(net: Net, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return h


def _batch_of_one(net: Net, h: Tensor) -> Tensor:
    return torch.cat([h[:1], h[1:] - h[:-1].detach()])


def _sorted_and_back(net: Net, h: Tensor) -> Tensor:
    order = h[:, 0].argsort()
    return (2 * h[order])[order.argsort()]


def _in_place(net: Net, h: Tensor) -> Tensor:
    h = h.clone()
    h[0] = 0.0
    return h


def _attention_over_the_batch(net: Net, h: Tensor) -> Tensor:
    return h + F.scaled_dot_product_attention(h[None], h[None], h[None])[0]


def _kept(net: Net, h: Tensor) -> Tensor:
    net.activations.append(h)
    return h


def _counted(rows: int) -> Tensor:
    return torch.arange(rows)[:, None]


BETWEEN: dict[str, Function] = {
    "place_by_arange": lambda net, h: h + net.table[torch.arange(len(h))],
    "place_by_slice": lambda net, h: h + net.table[: len(h)],
    "place_by_narrow": lambda net, h: h + net.table.narrow(0, 0, h.size(0)),
    "place_by_linspace": lambda net, h: h * torch.linspace(0, 1, len(h))[:, None],
    "place_by_enumerate": lambda net, h: torch.stack([row * i for i, row in enumerate(h)]),
    "first_of_the_batch": _in_place,
    "mean": lambda net, h: h - h.mean(0),
    "standard_deviation": lambda net, h: h / (h.std(dim=0) + 1e-3),
    "softmax": lambda net, h: h.softmax(0),
    "normalise": lambda net, h: F.normalize(h, dim=0),
    "largest": lambda net, h: h / h.abs().max(),
    "norm_of_all": lambda net, h: h / h.norm(),
    "divided_by_size": lambda net, h: 10 * h / len(h),
    "divided_by_shape": lambda net, h: h * (h.shape[0] ** -0.5),
    "divided_by_numel": lambda net, h: 20 * h / h.numel(),
    "cumulative": lambda net, h: h.cumsum(0),
    "flipped": lambda net, h: h + h.flip(0),
    "rolled": lambda net, h: h + h.roll(1, 0),
    "neighbour": _batch_of_one,
    "ranked": lambda net, h: h + h.argsort(0).float(),
    "sorted": lambda net, h: h.sort(dim=0).values,
    "fine_sorted_and_back": _sorted_and_back,
    "similarity": lambda net, h: h + (h @ h.T) @ h,
    "distances": lambda net, h: h * torch.cdist(h, h).mean(1, keepdim=True),
    "attention_over_the_batch": _attention_over_the_batch,
    "layer_norm_of_all": lambda net, h: F.layer_norm(h, h.shape),
    "group_norm_of_all": lambda net, h: F.group_norm(h.T[None], 2)[0].T,
    "instance_norm": lambda net, h: F.instance_norm(h.T[None])[0].T,
    "batch_norm_function": lambda net, h: F.batch_norm(h, None, None, training=True),
    "convolution_over_the_batch": lambda net, h: F.conv1d(h.T[:, None], torch.ones(1, 1, 3), padding=1)[:, 0].T,
    "pooling_over_the_batch": lambda net, h: h + F.avg_pool1d(h.T, 3, 1, 1).T,
    "recurrent_over_the_batch": lambda net, h: h + torch.stack([h[: i + 1].sum(0) for i in range(len(h))]),
    "reshaped": lambda net, h: h.reshape(WIDTH, -1).T,
    "viewed": lambda net, h: h.T.reshape(len(h), WIDTH),
    "running_mean": _running_mean,
    "running_mean_in_an_attribute": _running_mean_in_an_attribute,
    "count_of_samples": _count,
    "branch_on_values": _branch,
    "branch_on_any": lambda net, h: 2 * h if (h > 2).any() else h,
    "clipped_on_its_way": _clipped_on_its_way,
    "cut_to_the_longest": lambda net, h: net.table[0] + h[:, : int((h > 0.3).sum(1).max()) + 2].mean(1, keepdim=True),
    "fine_kept_in_a_list": _kept,
    "number_read": lambda net, h: h * h.abs().mean().item(),
    "numpy": lambda net, h: h * float(h.detach().numpy().std()),
    "list_of_numbers": lambda net, h: h * max(h[:, 0].tolist()),
    "half_of_the_batch": lambda net, h: torch.cat([h[: len(h) // 2], 2 * h[len(h) // 2 :]]),
    "every_second": lambda net, h: torch.stack([h[0::2], 2 * h[1::2]], 1).flatten(0, 1),
    "index_add": lambda net, h: h + torch.zeros(3, WIDTH).index_add(0, torch.arange(len(h)) % 3, h).sum(0),
    "scatter": lambda net, h: h + torch.zeros_like(h).scatter(0, h.argmax(0, keepdim=True), 1.0),
    "unique": lambda net, h: h * len(torch.unique((h[:, 0] > 0).int())),
    "quantile": lambda net, h: h - h.quantile(0.5, dim=0),
    "einsum": lambda net, h: h + torch.einsum("ij,kj->ij", h, h),
    "outer": lambda net, h: h + torch.einsum("i,j->ij", h[:, 0], h.mean(0)),
    "branch_on_more_than_a_rank_has": lambda net, h: h - 0.5 if len(h) > BATCH // 2 + 1 else h,
    "at_most_so_many": lambda net, h: h / min(len(h), BATCH - 1),
    "fine": lambda net, h: h * 2,
    "fine_with_chunks": lambda net, h: torch.cat([2 * part for part in h.split(1)]),
    "fine_distribution": lambda net, h: torch.distributions.Normal(h, h.exp()).log_prob(torch.zeros_like(h)),
    "fine_positions_of_an_argument": lambda net, h: h[_counted(len(h)), torch.arange(WIDTH)],
    "fine_loop": lambda net, h: torch.stack([row / row.norm() for row in h]),
}
"""What stands between the layers; the ``fine`` ones treat each sample alone."""


def attempt(name: str) -> list[float] | str:
    """Train four steps; the losses and the sum of the weights, or the words of the refusal."""
    torch.manual_seed(0)
    net = Net(BETWEEN[name])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, targets = torch.randn(SAMPLES, 4), torch.randint(0, 3, (SAMPLES,))
    found = []
    try:
        for start in range(0, SAMPLES, BATCH):
            loss = F.cross_entropy(net(inputs[start : start + BATCH]), targets[start : start + BATCH])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    except StrategyError as error:
        return str(error)
    return [*found, sum(float(value.abs().sum()) for value in net.state_dict().values())]
