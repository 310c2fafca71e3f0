"""What is taken for code that is distributed by itself, and what only looks like it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from jupyter_torchdist.strategies.already import distributed_by

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.strategies


def found(source: str, **names: Any) -> str | None:
    return distributed_by(compile(source, "Cell In[3]", "exec"), names)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from transformers import Trainer, TrainingArguments\nTrainer(model).train()", "Trainer"),
        ("import transformers\ntransformers.Seq2SeqTrainer(model).train()", "Seq2SeqTrainer"),
        ("def run():\n    from transformers.trainer import Trainer\nrun()", "transformers.trainer"),
        ("from trl import SFTTrainer", "trl"),
        ("import lightning.pytorch as pl", "lightning.pytorch"),
        ("from accelerate import Accelerator", "accelerate"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", "torch.nn.parallel"),
    ],
)
def test_what_a_cell_imports(source: str, name: str) -> None:
    assert found(source) == name


def test_what_an_earlier_cell_has_imported() -> None:
    class Ours(transformers.Trainer):  # type: ignore[misc]
        """As many write one, for a loss of their own."""

    assert found("Trainer(model).train()", Trainer=transformers.Trainer) == "Trainer"
    assert found("Ours(model).train()", Ours=Ours) == "Ours"
    assert found("S(model).train()", S=transformers.Seq2SeqTrainer) == "S"


def test_what_only_looks_like_it() -> None:
    """A class of the user's may be called ``Trainer``; most of transformers trains nothing."""
    trainer = type("Trainer", (), {"__module__": "__main__"})
    assert found("Trainer(model).fit()", Trainer=trainer) is None
    names = {name: getattr(transformers, name) for name in ("set_seed", "get_scheduler", "BertModel")}
    assert found("set_seed(1)\nget_scheduler('linear', o, 1, 2)\nBertModel(c)(x)", **names) is None
    assert found("import torch\nlightning_rate = 1\ntorch.manual_seed(1)", model=nn.Linear(2, 1)) is None
    assert found("from transformers import BertModel\nclass Trainer: pass\nTrainer().fit()") is None
    assert found("trl = DataLoader(data)\nself.accelerate = lightning") is None
