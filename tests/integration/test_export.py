"""``%dist export``: the files run under torchrun where this package cannot be imported, and do what the job did."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import cli
from jupyter_torchdist.client import Request, submit
from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.functions.decorated import call_of
from jupyter_torchdist.functions.keywords import options_of
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.verbs import programs

PATIENCE = 100.0
NOTEBOOK = {
    "Cell In[1]": (
        "import torch\nfrom torch import nn\nfrom collections import Counter as Counts\nimport exported_here\n"
    ),
    "Cell In[2]": "SIZE = 3\ndata = torch.arange(6.0).reshape(2, 3)\nhistory = [1]\n",
    "Cell In[3]": (
        "class Base(nn.Module):\n    pass\n\n\nclass Net(Base):\n    def __init__(self):\n        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.ones(SIZE))\n"
        "    def forward(self, x):\n        return x * self.weight\n\n\n"
        "def total(x):\n    return scaled(x).sum()\n\nscaled = lambda x: exported_here.FACTOR * x\nnet = Net()\n"
    ),
}
CELL = (
    "import torch.distributed as dist\nx = total(net(data)).detach() + dist.get_rank()\ndist.all_reduce(x)\n"
    "history.append(float(x))\n"
    "print(f\"{history} {Counts('aab')['a']}\\n\", end='', flush=True)\n"  # in one piece: the ranks share a pipe
)


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "exported_here.py").write_text("FACTOR = 10\n")
    yield
    sys.modules.pop("exported_here", None)
    pool().close()


def with_names(notebook: dict[str, Any]) -> dict[str, str]:
    """Run the cells as a notebook does. Returns the labels of their files."""
    import linecache

    for label, text in NOTEBOOK.items():
        linecache.cache[label] = (len(text), None, text.splitlines(keepends=True), label)
        exec(compile(text, label, "exec"), notebook)
    return {label: label for label in NOTEBOOK}


def run_elsewhere(directory: Path, tmp_path: Path) -> list[str]:
    """The lines of ``run.sh`` where this package cannot be imported."""
    (tmp_path / "without").mkdir(exist_ok=True)
    (tmp_path / "without" / "sitecustomize.py").write_text("import sys\nsys.modules['jupyter_torchdist'] = None\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "without"), "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(directory / "run.sh")], env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def exported(job: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["export", job, str(directory)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_cell(notebook: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = with_names(notebook)
    job = submit(Request(CELL, "Cell In[4]", 2, Options(ranks=2), notebook, labels=labels))
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    (said,) = {line.partition("] ")[2] for line in job.logs(stream="out").splitlines()}
    text = exported(job.id, tmp_path / "out", capsys)
    assert "README.md there says how to run it" in text
    train = (tmp_path / "out" / "train.py").read_text()
    for line in ("from collections import Counter as Counts", "class Net(Base):", "scaled = lambda x:", "import torch"):
        assert line in train
    assert train.index("class Base") < train.index("class Net") < train.index("dist.all_reduce")
    assert run_elsewhere(tmp_path / "out", tmp_path) == [said, said] == ["[1, 301.0] 2"] * 2
    lock = (tmp_path / "out" / "requirements.txt").read_text()
    assert "torch==" in lock and "jupyter_torchdist" not in lock
    batch = (tmp_path / "out" / "job.sbatch").read_text()
    assert "#SBATCH --nodes=1" in batch and "--nproc-per-node 2" in batch
    assert subprocess.run(["bash", "-n", str(tmp_path / "out" / "job.sbatch")], check=False).returncode == 0


def test_a_function(notebook: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_names(notebook)
    job = submit(call_of(notebook["total"], (notebook["data"],), {}, options_of(ranks=1)))
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    exported(job.id, tmp_path / "out", capsys)
    assert run_elsewhere(tmp_path / "out", tmp_path) == ["tensor(150.)"]


def test_a_script_and_a_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.py").write_text("import sys\nprint('with', sys.argv[1:])\n")
    options = options_of(ranks=1, strategy="ddp")
    job = submit(programs.request(options, ["s.py", "--lr", "1 2"]))
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    text = exported(job.id, tmp_path / "out", capsys)
    assert "--strategy ddp changed this training" in text
    assert "torchdist run --ranks 1 --strategy ddp train.py --lr '1 2'" in (tmp_path / "out" / "README.md").read_text()
    assert run_elsewhere(tmp_path / "out", tmp_path) == ["with ['--lr', '1 2']"]


def test_what_cannot_be_exported(notebook: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = "import asyncio\nawait asyncio.sleep(0)\n"
    job = submit(Request(waits, "Cell In[4]", 2, Options(ranks=1), notebook))
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert cli.main(["export", job.id, str(tmp_path / "out")]) == 1
    assert "the cell cannot be written as a plain script" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.main(["export", job.id, str(tmp_path)]) == 1
    assert "is not an empty directory" in capsys.readouterr().err
    assert cli.main(["export", "nothing", str(tmp_path / "out")]) == 1
