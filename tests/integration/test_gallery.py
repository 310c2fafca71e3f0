"""The gallery of notebooks is what it says: one a strategy, and one cell under five of them that draws one curve."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from jupyter_torchdist.protocol.strategy import NAMES
from tests.notebook import plain

GALLERY = Path(__file__).parents[2] / "notebooks"
DEEPSPEED = find_spec("deepspeed") is not None

SHOWN: dict[str, dict[str, str]] = {
    "accelerate": {"run": "2 processes", "back": "the same weights: True"},
    "auto": {
        "plan": "auto chose ddp: the ranks are on CPUs, whose memory is not checked",
        "option": "auto chose pp: -O pp is given",
        "sharded": "auto chose fsdp: -O sharding_strategy is one of its options",
    },
    "checkpoints": {
        "files": "step-000010\nstep-000020",
        "whole": "each rank loads its part of every batch",
        "rest": "goes on after step 20",
        "curves": "10 steps, ",
        "refused": "1.weight has the shape (128, 64) in the checkpoint and (99, 64) in the model",
    },
    "cp": {"run": "16 tokens of 32", "product": "trained by fsdp+cp on 4 ranks"},
    "ddp": {
        "ddp": "batch normalisation uses the samples of all ranks",
        "zero1": "rank 1 keeps",
        "refused-shown": "sub combines each sample with a mean over the batch (Cell In[9]:4)",
    },
    "deepspeed": {
        "plan": "strategy: deepspeed",
        "run": "rank 1 holds 508,544 of them",
        "back": "GPT Parameter (128, 48) (128, 48)",
        "run-three": "rank 1 holds 127,136 bytes of parameters",
        "refused-shown": "LBFGS may look at a parameter as a whole",
    },
    "fsdp": {
        "run": "each rank loads its part of every batch",
        "plan": "reshard_after_forward=0",
        "refused-shown": "the classes there are: Attention, Block",
    },
    "hsdp": {"run": "mesh (2, 2), (Replicate(), Shard(dim=0))", "refused": "does not divide the 4 ranks"},
    "hf_trainer": {
        "run": "2 processes",
        "back": "the same weights: True",
        "fsdp": "DTensor of DistributedType.FSDP",
        "whole": "Parameter (3, 64)",
        "yaml-run": "DistributedType.FSDP bf16",
        "yaml-back": "the saved weights are the model's: True",
    },
    "huggingface": {
        "plan": "strategy: fsdp, dp_shard=2, bf16",
        "run": "BertForSequenceClassification",
        "refused": "TPUs (PyTorch/XLA) are not supported",
    },
    "lightning": {
        "run": "2 processes",
        "back": "the same weights: True",
        "fabric": "2 processes",
        "loaded": "True",
    },
    "memory_plan": {
        "eight": "parameters       1.34 GB",
        "thousand": "parameters       10.5 MB",
        "layers": "parameters       168 MB",
        "stages": "optimizer state  5.88 GB",
    },
    "one_cell_five_strategies": {},
    "pp": {"run": "GPT in 2 stages", "staged": "StagedGPT in 2 stages"},
    "sagemaker": {"auto": "GroupedNet in 2 stages", "manual": "StagedNet in 2 stages"},
    "tp": {"run": "blocks.0.attention.query.weight", "refused-shown": "layers.*.up"},
}
"""What is to be read below cells, by notebook and cell."""

QUICK = ("checkpoints", "ddp", "deepspeed", "sagemaker", "tp")
"""The others are soaked: ``test_one_cell_five_strategies`` and ``test_trainers`` run much of what they show."""

WITHIN = 1e-5
"""How far curves in fp32 may be from each other."""

pytestmark = pytest.mark.timeout(400)


def execute(name: str, tmp_path: Path, **changed: str) -> dict[str, str]:
    """What can be read below each cell. ``changed``: words of the notebook, and what takes their place."""
    notebook = nbformat.read(GALLERY / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        for old, new in changed.items():
            cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    return {cell["id"]: _texts(cell) for cell in notebook.cells if cell.cell_type == "code"}


def _texts(cell: Any) -> str:
    pieces = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    return plain("\n".join(pieces))


def check_curves(texts: dict[str, str]) -> int:
    """Every difference that a notebook prints is one of rounding; how many it prints."""
    text = "\n".join(texts.values())
    found = re.findall(r"difference:? ([\d.e-]+)|(\S+) apart at most|(\S+) from one pipeline at most", text)
    for one in found:
        assert float("".join(one).rstrip(",")) < WITHIN, one
    return len(found)


@pytest.fixture(autouse=True)
def _one_thread_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the notebook's own training beside those of other tests


def test_one_cell_five_strategies(home: Path, tmp_path: Path) -> None:
    texts = execute("one_cell_five_strategies", tmp_path, **{"batch_size=32": "batch_size=160"})
    assert check_curves(texts) == 1
    assert texts["five"].count("5 steps, loss ") == 5
    for words in (
        "GPT (127 k parameters) is trained by ddp on 2 ranks",
        "GPT (127 k parameters) is trained by fsdp on 2 ranks",
        "tp: 26 layers",
        "cp: 4 blocks (Block) compute 1/2 of every sequence a rank",
        "GPT in 2 stages",
    ):
        assert words in texts["five"]
    assert texts["five"].count("each rank loads its part of every batch") == 2
    assert "GPT with 127,136 parameters, cpu" in texts["back"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in SHOWN]
)
def test_gallery(home: Path, tmp_path: Path, name: str) -> None:
    if name == "deepspeed" and not DEEPSPEED:
        with pytest.raises(CellExecutionError, match=r"DeepSpeed is not installed[^$]*jupyter_torchdist\[deepspeed\]"):
            execute(name, tmp_path)
        return
    if name == "lightning" and find_spec("lightning") is None:
        pytest.skip("Lightning is not installed")
    texts = execute(name, tmp_path)
    for cell, words in SHOWN[name].items():
        assert words in texts[cell], texts[cell]
    if name not in (
        "auto",
        "fsdp",
        "huggingface",
        "hsdp",
        "memory_plan",
        "cp",
        "accelerate",
        "hf_trainer",
        "lightning",
    ):
        assert check_curves(texts)


def test_there_is_one_for_each_strategy() -> None:
    names = {path.stem for path in GALLERY.glob("*.ipynb")}
    assert set(NAMES) - {"none"} <= names
    assert set(SHOWN) <= names


def test_the_docs_show_each() -> None:
    page = (GALLERY.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert [path.name for path in GALLERY.glob("*.ipynb") if f"../notebooks/{path.stem}\n" not in page] == []
