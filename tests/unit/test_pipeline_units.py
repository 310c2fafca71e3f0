"""What the calls of a model's units are found to cost."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from jupyter_torchdist.strategies.pipeline.units import Cost, Units, assigned, measured


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def test_blocks_that_are_alike_cost_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 8), *[Block() for _ in range(6)], nn.Linear(8, 3))
    units = Units(model, stages=2)
    costs = measured(units, time.perf_counter, lambda: model(torch.rand(5, 4)))
    assert len({cost.seconds for cost in costs[1:-1]}) == 1


def test_stages_share_time_and_memory_alike() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    units = Units(model, stages=2)
    for dear in ({"seconds": 5.0}, {"memory": 50}):
        costs = [Cost(number, 1.0, 10, 20) for number in range(6)]
        vars(costs[0]).update(dear)
        assert assigned(units, costs, 2, "cost") == [0, 0, 1, 1, 1, 1]
        assert assigned(units, costs, 2, "parameters") == [0, 0, 0, 1, 1, 1]
