"""Cells that train on hosts: a strategy over two of them trains as one device; over a bad line nothing is lost."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch

from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.protocol.errors import CheckpointError
from tests.cluster.cells import MEET, start
from tests.cluster.cluster import Cluster

TRAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=16, shuffle=True)
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        pytest.param("ddp", marks=pytest.mark.soak),
        pytest.param("hsdp -O dp_shard=2", marks=pytest.mark.soak),
        pytest.param("pp -O pp=4", marks=pytest.mark.soak),
        pytest.param("fsdp+tp -O tp=2 -O tp_plan=0:colwise,2:rowwise", marks=pytest.mark.soak),
    ],
)
def test_a_strategy_over_two_hosts_trains_as_one_device(
    pool: DriverPool, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    alone = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", alone)
    exec(TRAIN, vars(alone))
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    job = start(pool, TRAIN, f"--hosts node1,node2 --ranks 4 --strategy {strategy}", names=vars(notebook))
    state = job.wait(200)
    assert state.state == "succeeded", (state.reason, job.logs())
    job.bring(vars(notebook))
    torch.testing.assert_close(notebook.losses, alone.losses, rtol=1e-5, atol=1e-6)
    assert type(notebook.model) is torch.nn.Sequential
    for name, found in notebook.model.state_dict().items():
        torch.testing.assert_close(found, alone.model.state_dict()[name], rtol=1e-4, atol=1e-5)


SAVE = "import jupyter_torchdist as td\nmodel = torch.nn.Linear(2, 2)\ntd.save('/srv/own', model, step=1)\n"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("options", "source"),
    [
        ("--strategy fsdp --checkpoint /srv/own", TRAIN),
        pytest.param("", f"import torch\n{SAVE}", marks=pytest.mark.soak),
    ],
    ids=["strategy", "by hand"],
)
def test_checkpoints_on_disks_that_hosts_do_not_share_are_refused(
    pool: DriverPool, cluster: Cluster, options: str, source: str
) -> None:
    """Each host would have a part of each checkpoint, and no checkpoint could be loaded."""
    try:
        job = start(pool, source, f"--hosts node1,node2 --ranks 2 {options}")
        assert job.wait(200).state == "failed", job.logs()
        error = job.exception()
        assert isinstance(error, CheckpointError)
        assert "node2 does not see in /srv/own what the first host writes there" in error.message
        assert "a directory that all hosts share" in str(error)
        assert not cluster.run("node1", "ls", "-A", "/srv/own").stdout
    finally:
        for node in ("node1", "node2"):
            cluster.run(node, "rm", "-rf", "/srv/own")


@pytest.mark.timeout(240)
def test_the_start_says_what_it_waits_for(pool: DriverPool, cluster: Cluster) -> None:
    cluster.limit("node2", 40)
    data = torch.randn(500_000)
    job = start(pool, MEET + "print(len(data))", names={"data": data})
    assert job.wait(200).state == "succeeded", job.logs()
    stages = "; ".join(stage.text for stage in job.state.stages)  # which hosts are not that far yet, by chance
    expected = "asking node1, node2; (reaching .*; )?sending .* MB to .*; starting Python on .*; the ranks meet"
    assert re.fullmatch(expected, stages), stages
    assert all(stage.seconds > 0 for stage in job.state.stages)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_line_that_is_slow_and_loses(pool: DriverPool, cluster: Cluster) -> None:
    """100 ms each way and 1 % of the frames lost, towards one of two hosts."""
    cluster.delay("node2", 100)
    cluster.loss("node2", 1)
    source = MEET + "for i in range(500):\n    print('line', i)\n"
    job = start(pool, source)
    assert job.wait(200).state == "succeeded", job.logs()
    for rank in range(4):
        numbers = [line.split()[-1] for line in job.logs(rank, stream="out").splitlines() if " line " in f" {line}"]
        assert numbers == [str(i) for i in range(500)]
