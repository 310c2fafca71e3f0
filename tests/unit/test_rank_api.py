"""``td.…`` in one plain process, without the magic."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jupyter_torchdist.ranks import api
from jupyter_torchdist.ranks.streams.metrics import Recorder

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_rank_0_of_1() -> None:
    assert (api.rank, api.local_rank, api.world_size, api.local_world_size, api.node_rank) == (0, 0, 1, 1, 0)
    assert api.is_main is True
    assert isinstance(api.device, torch.device)


def test_torchruns_environment_is_read_at_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(TORCHRUN, ("3", "1", "4", "2", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert (api.rank, api.local_rank, api.world_size, api.local_world_size, api.node_rank) == (3, 1, 4, 2, 1)
    assert api.is_main is False


def test_the_verbs_do_nothing_much() -> None:
    api.log(loss=1.0, step=3)
    assert list(api.progress([1, 2], desc="x")) == [1, 2]
    api.barrier()
    assert api.gather("mine") == ["mine"]


def test_print(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    api.print("a", "b", sep="-")
    monkeypatch.setenv("RANK", "2")
    api.print("not here")
    api.print("here", all=True)
    assert capsys.readouterr().out == "a-b\n[rank 2] here\n"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = api.no_such_name
    assert set(api.__all__) <= {*vars(api), *api._VALUES}


def test_log_goes_to_the_workers_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_recorder", api._recorder)
    api.use(Recorder(tmp_path / "m"))
    api.log(loss=0.5, step=1)
    assert b'"step":1,"v":{"loss":0.5}' in (tmp_path / "m").read_bytes()


def test_a_kernel_that_uses_it_imports_no_torch() -> None:
    program = (
        "import sys, jupyter_torchdist as td\n"
        "td.log(loss=1.0); list(td.progress([1])); td.print(td.rank, td.is_main); td.barrier(); td.gather(1)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr
