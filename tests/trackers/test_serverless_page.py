"""The example of Databricks' page on serverless GPUs, in its form: only its import, and GPUs for CPU ranks, differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.serverless_gpu import distributed
from tests.integration.test_gallery import execute
from tests.trackers.conftest import Runs


class Layers(nn.Module):
    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, wide), nn.ReLU(), nn.Dropout(0.2), nn.Linear(wide, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@distributed(ranks=2)
def run_train(num_epochs: int, batch_size: int) -> None:
    import mlflow
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    model = DistributedDataParallel(Layers())
    dataset = TensorDataset(torch.randn(64, 10), torch.randn(64, 1))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, batch_size=batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            mlflow.log_metric("loss", loss.item(), step=epoch * len(loader) + step)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        mlflow.log_metric("total_loss", total)
        print(f"epoch {epoch}: {total}")
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _close(home: Path) -> Iterator[None]:
    yield
    pool().close()


def test_the_page(runs: Runs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", runs.create("The page"))
    assert run_train.distributed(num_epochs=2, batch_size=8) == [None, None]
    shown = capfd.readouterr().out
    assert shown.count("epoch 0: ") == 2 and shown.count("epoch 1: ") == 2
    found = runs.named("The page")
    assert len(found) == 2  # each rank's own, as the function asks
    assert [step for step, _ in runs.curve(found[0], "loss")] == list(range(8))


def test_the_notebook(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", runs.create("The notebook"))
    texts = execute("serverless_gpu", tmp_path)
    assert texts["run"].count("Total loss for epoch 2: ") == 2
    assert "[None, None]" in texts["run"]
    assert "[(0, 12.0, True), (1, 16.0, True)]" in texts["data"]
    found = runs.named("The notebook")
    assert [step for step, _ in runs.curve(found[0], "loss")] == list(range(15))
