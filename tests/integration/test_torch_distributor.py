"""``TorchDistributor`` with PySpark's signature: functions, scripts and commands, and what goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import TorchDistributor
from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.functions import torch_distributor
from jupyter_torchdist.protocol.errors import CellSyntaxError, OptionError
from jupyter_torchdist.protocol.plan import Gpu, Inventory
from jupyter_torchdist.store import catalog


@pytest.fixture(autouse=True)
def closing(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    pool().close()


def on_cpus(processes: int = 2, local_mode: bool = True) -> TorchDistributor:
    return TorchDistributor(num_processes=processes, local_mode=local_mode, use_gpu=False)


def train(learning_rate: float, use_gpu: bool = False) -> dict[str, Any]:
    """As users of Spark write it: imports inside, its own process group, DDP, a sampler."""
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("nccl" if use_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1).to(device))
    data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    steps = 0
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    rank = dist.get_rank()
    dist.destroy_process_group()
    return {"rank": rank, "steps": steps, "weight": model.module.weight.detach()}


def test_a_function_gives_rank_0s_value() -> None:
    value = on_cpus().run(train, 1e-3, use_gpu=False)
    assert (value["rank"], value["steps"], value["weight"].shape) == (0, 2, (1, 3))
    (job,) = catalog.jobs()
    assert job.world_size == 2


def test_an_exception_comes_with_the_last_lines() -> None:
    def fails() -> None:
        print("the last line")
        raise KeyError("column")

    with pytest.raises(KeyError) as caught:
        on_cpus().run(fails)
    assert any("the last line" in note for note in getattr(caught.value, "__notes__", ()))
    with pytest.raises(TypeError, match="fails"):
        on_cpus().run(fails, 1)


def test_a_script_gets_its_arguments(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n")
    assert on_cpus().run("train.py", "--learning_rate=0.001", "--batch_size=16") is None
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[rank {rank}] {rank} ['--learning_rate=0.001', '--batch_size=16']" for rank in (0, 1)]
    (tmp_path / "bad.py").write_text("print('about to fail', flush=True)\nraise ValueError('lr')\n")
    with pytest.raises(RuntimeError, match="ValueError: lr") as caught:
        on_cpus(1).run("bad.py")
    assert "about to fail" in str(caught.value)


def test_any_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert on_cpus().run("sh", "-c", "echo $RANK of $WORLD_SIZE") is None
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        on_cpus(1).run("sh", "-c", "exit 3")


def test_programs_that_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nif x\n    pass\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.py").write_text("")
    with pytest.raises(OptionError, match="does not exist"):
        on_cpus().run("nothing.py")
    with pytest.raises(OptionError, match=r"is a directory without __main__\.py"):
        on_cpus().run("folder")
    with pytest.raises(CellSyntaxError, match=r"broken.py, line 2: expected ':'"):
        on_cpus().run("broken.py")
    with pytest.raises(ValueError, match="takes no keyword arguments: lr"):
        on_cpus().run("broken.py", lr=1)
    assert catalog.jobs() == []


def test_gpus_that_are_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="positive integer, not 0"):
        TorchDistributor(0)
    monkeypatch.setattr(torch_distributor, "local_inventory", lambda environ: Inventory("here", 2, 0))
    with pytest.raises(RuntimeError, match="no GPU that this process can use"):
        TorchDistributor(2)
    gpus = tuple(Gpu(str(index), index, "H100", 2**36, 0) for index in range(2))
    monkeypatch.setattr(torch_distributor, "local_inventory", lambda environ: Inventory("here", 2, 0, gpus))
    with caplog.at_level(logging.WARNING):
        assert TorchDistributor(4).num_processes == 2
    assert "this machine has 2 GPUs, so 2 processes run" in caplog.text


def test_a_cluster_without_spark_and_without_hosts_is_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert on_cpus(1, local_mode=False).run(lambda: 5) == 5
    assert "no host is known, so the job runs here" in capfd.readouterr().err
