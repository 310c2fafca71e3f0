"""Trainers of other libraries in a cell, as their own quickstarts use them: on two CPU ranks, without an option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.paths import NodePaths, home
from jupyter_torchdist.store import catalog
from tests.notebook import Notebook

PATIENCE = 280.0
"""Seconds for a cell that imports these libraries, on a busy machine."""

needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

DATA = """
import torch
from torch import nn
import jupyter_torchdist as td
x = torch.randn(32, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
"""

BERT = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
import jupyter_torchdist as td
config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
model = BertForSequenceClassification(config)
before = model.classifier.weight.clone()
dataset = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor(i % 2)} for i in range(16)]
few = dict(max_steps=3, per_device_train_batch_size=2, logging_steps=1, save_steps=3)
"""

LIT = """
import lightning as L
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)
loader = torch.utils.data.DataLoader(data, batch_size=4)
lit = Lit()
"""

FSDP = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""The file of the FSDP guide of Transformers."""


@pytest.fixture
def kernel(one_kernel: Notebook, tmp_path: Path) -> Iterator[Notebook]:
    one_kernel.run(f"%cd -q {tmp_path}")
    yield one_kernel
    one_kernel.run("%dist stop", PATIENCE)


def curves(rank: int = 0) -> dict[str, list[tuple[int, float]]]:
    """The curves of the newest job's rank: (step, value) by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in _files().metrics(rank).read_text().splitlines():
        written = json.loads(line)
        for name, value in written.get("v", {}).items():
            found.setdefault(name, []).append((written["step"], value))
    return found


def bars(rank: int) -> int:
    """How many of tqdm's lines the newest job's rank wrote."""
    return sum(file.read_text().count("it/s") for file in (_files().out(rank), _files().err(rank)))


def _files() -> NodePaths:
    return home().job(max(summary.job for summary in catalog.jobs())).node("node0")


def test_hugging_face(kernel: Notebook) -> None:
    kernel.run(BERT)
    kernel.run(
        "%%distribute --ranks 2\n"
        "arguments = TrainingArguments('out', eval_strategy='steps', eval_steps=3, **few)\n"
        "trainer = Trainer(model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset)\n"
        "result = trainer.train()\n"
        "saw = trainer.args.world_size, trainer.accelerator.num_processes",
        PATIENCE,
    )
    drawn = curves()
    assert {"loss", "train/loss", "train/learning_rate", "eval/loss"} <= set(drawn)
    assert [step for step, _ in drawn["train/loss"]] == [1, 2, 3]
    assert "train/loss" not in curves(1), "they are of all ranks together"
    assert bars(0) > 0 and bars(1) == 0
    assert kernel.value("saw") == (2, 2)
    assert kernel.value("result.global_step, bool((model.classifier.weight != before).any())") == (3, True)
    assert kernel.value("arguments.world_size, trainer.accelerator.num_processes") == (1, 1)
    assert kernel.value("'eval_loss' in trainer.evaluate()") is True
    kernel.run("again = BertForSequenceClassification(config)\nfound = td.load('out', again)")
    assert kernel.value("found['step'], bool(torch.equal(again.classifier.weight, model.classifier.weight))") == (
        3,
        True,
    )


def test_a_trainer_of_an_earlier_cell(kernel: Notebook) -> None:
    kernel.run(BERT)
    kernel.run("trainer = Trainer(model=model, args=TrainingArguments('out', **few), train_dataset=dataset)")
    cell = kernel.run(
        "%%distribute --ranks 2\ntrainer.train()\nsaw = trainer.args.world_size, trainer.accelerator.num_processes",
        PATIENCE,
    )
    assert "the Trainer was made in an earlier cell, for one process; it was set up again for the 2 ranks" in cell.text
    assert kernel.value("saw") == (2, 2)
    assert kernel.value("trainer.state.global_step, trainer.args.world_size") == (3, 1)
    assert kernel.value("bool((model.classifier.weight != before).any())") is True
    assert len(curves()["train/loss"]) == 3 and bars(1) == 0


@pytest.mark.soak
def test_the_fsdp_guide_with_its_trainer(kernel: Notebook, tmp_path: Path) -> None:
    """The guide's file and its lines that save; the model comes back whole."""
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    kernel.run(BERT)
    cell = kernel.run(
        "%%distribute --config fsdp.yaml --ranks 2\n"
        "trainer = Trainer(model=model, args=TrainingArguments('out', **few), train_dataset=dataset)\n"
        "trainer.train()\n"
        "sharded = type(model.bert.encoder.layer[0].output.dense.weight).__name__, type(model).__name__\n"
        "kind = str(trainer.accelerator.distributed_type), trainer.accelerator.mixed_precision\n"
        "if trainer.is_fsdp_enabled:\n"
        "    trainer.accelerator.state.fsdp_plugin.set_state_dict_type('FULL_STATE_DICT')\n"
        "trainer.save_model('final')",
        PATIENCE,
    )
    assert "accelerate trains by itself; --strategy fsdp was handed to it: FSDP2, bf16" in cell.text
    assert kernel.value("kind") == ("DistributedType.FSDP", "bf16")
    assert kernel.value("sharded") == ("DTensor", "FSDPBertForSequenceClassification")
    assert kernel.value("type(model).__name__, type(model.classifier.weight).__name__") == (
        "BertForSequenceClassification",
        "Parameter",
    )
    kernel.run("groups = trainer.optimizer.param_groups")
    assert kernel.value("{id(p) for g in groups for p in g['params']} == {id(p) for p in model.parameters()}") is True
    kernel.run("saved = BertForSequenceClassification.from_pretrained('final').state_dict()")
    assert kernel.value("all(torch.equal(saved[n], p) for n, p in model.state_dict().items())") is True
    assert kernel.value("bool((model.classifier.weight != before).any())") is True
    kernel.run("again = BertForSequenceClassification(config)\nfound = td.load('out', again)")
    assert kernel.value("all(torch.equal(saved[n], p) for n, p in again.state_dict().items())") is True


@pytest.mark.soak
def test_the_fsdp_file_with_a_trainer_of_an_earlier_cell(kernel: Notebook, tmp_path: Path) -> None:
    """The file asks for bf16, and the trainer was made without; after it, the trainer trains without again."""
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    kernel.run(BERT)
    kernel.run("trainer = Trainer(model=model, args=TrainingArguments('out', **few), train_dataset=dataset)")
    saw = "trainer.train()\nsaw = str(trainer.accelerator.distributed_type), trainer.accelerator.mixed_precision"
    kernel.run(f"%%distribute --config fsdp.yaml --ranks 2\n{saw}", PATIENCE)
    assert kernel.value("saw") == ("DistributedType.FSDP", "bf16")
    kernel.run(f"%%distribute --ranks 2\n{saw}", PATIENCE)
    assert kernel.value("saw") == ("DistributedType.MULTI_CPU", "no")
    assert kernel.value("trainer.args.mixed_precision, 'eval_loss' in trainer.evaluate(dataset)") == ("no", True)


ACCELERATED = """%%distribute --ranks 2
{made}model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=4)
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (a, b) in enumerate(loader):
    with accelerator.accumulate(net):
        loss = ((net(a) - b) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.log({{"train_loss": loss, "note": "a text"}}, step=step)
accelerator.save_state("state")
saw = accelerator.num_processes, accelerator.gradient_accumulation_steps, accelerator.sync_gradients, step
weights = td.gather(model.weight.detach())
"""


def test_accelerate(kernel: Notebook) -> None:
    kernel.run(DATA + "from accelerate import Accelerator")
    kernel.run(ACCELERATED.format(made="accelerator = Accelerator(gradient_accumulation_steps=2)\n"), PATIENCE)
    assert kernel.value("saw") == (2, 2, True, 3)
    assert kernel.value("bool(torch.equal(weights[0], weights[1]))") is True
    assert [step for step, _ in curves()["train_loss"]] == [0, 1, 2, 3] and "note" not in curves()
    kernel.run("net, saved = nn.Linear(4, 1), td.load('state', again := nn.Linear(4, 1))")
    assert kernel.value("bool(torch.equal(again.weight, model.weight))") is True
    assert kernel.value("accelerator.num_processes, str(accelerator.device)") == (1, "cpu")


@pytest.mark.soak
def test_an_accelerator_of_an_earlier_cell(kernel: Notebook) -> None:
    """One that has prepared nothing yet takes the ranks; what it has prepared is refused."""
    kernel.run(
        "from accelerate.state import AcceleratorState\nAcceleratorState._reset_state(True)"
    )  # other tests' bf16
    kernel.run(DATA + "from accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps=2)")
    kernel.run(ACCELERATED.format(made=""), PATIENCE)
    assert kernel.value("saw") == (2, 2, True, 3)
    assert kernel.value("bool(torch.equal(weights[0], weights[1]))") is True
    kernel.run("other = Accelerator()\nnet = other.prepare(nn.Linear(4, 1))")
    cell = kernel.try_run("%%distribute --ranks 2\nother.backward(net(x).mean())", PATIENCE)
    assert "what the Accelerator prepared was made in an earlier cell, for one process" in cell.text
    assert "make it in this cell" in cell.text


@needs_lightning
def test_lightning(kernel: Notebook) -> None:
    kernel.run(DATA + LIT)
    kernel.run(
        "%%distribute --ranks 2\n"
        "trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)\n"
        "trainer.fit(lit, loader, loader)\n"
        "saw = trainer.world_size, trainer.global_step\n"
        "weights = td.gather(lit.net.weight.detach())",
        PATIENCE,
    )
    assert kernel.value("saw") == (2, 8)
    assert kernel.value("bool(torch.equal(weights[0], weights[1]) and torch.equal(weights[0], lit.net.weight))") is True
    drawn = curves()
    assert [step for step, _ in drawn["train_loss"]] == [2, 4, 6, 8] and len(drawn["val_loss"]) == 2
    assert bars(0) > 0 and bars(1) == 0
    assert kernel.value("set(trainer.callback_metrics)") == {"train_loss", "val_loss"}
    cell = kernel.try_run("trainer.validate(lit, loader)", PATIENCE)
    assert "this Trainer was made on ranks, which have ended" in cell.text
    kernel.run("from pathlib import Path\nagain = Lit()\nfound = td.load(next(Path().rglob('*.ckpt')), again)")
    assert kernel.value("found['step'], bool(torch.equal(again.net.weight, lit.net.weight))") == (8, True)


@needs_lightning
@pytest.mark.soak
def test_fabric(kernel: Notebook) -> None:
    kernel.run(DATA + "from lightning.fabric import Fabric")
    kernel.run(
        "%%distribute --ranks 2\n"
        "fabric = Fabric()\n"
        "fabric.launch()\n"
        "model = nn.Linear(4, 1)\n"
        "net, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=4))\n"
        "for step, (a, b) in enumerate(loader):\n"
        "    loss = nn.functional.mse_loss(net(a), b)\n"
        "    fabric.backward(loss)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    fabric.log('train_loss', loss, step=step)\n"
        "fabric.save('fabric.ckpt', {'model': net, 'optimizer': optimizer, 'step': step})\n"
        "saw = fabric.world_size, step\n"
        "weights = td.gather(model.weight.detach())",
        PATIENCE,
    )
    assert kernel.value("saw") == (2, 3)
    assert kernel.value("bool(torch.equal(weights[0], weights[1]))") is True
    assert [step for step, _ in curves()["train_loss"]] == [0, 1, 2, 3]
    kernel.run("again = nn.Linear(4, 1)\nfound = td.load('fabric.ckpt', again)")
    assert kernel.value("found['step'], bool(torch.equal(again.weight, model.weight))") == (3, True)


@needs_lightning
@pytest.mark.soak
def test_lightning_that_cannot_run_on_ranks(kernel: Notebook) -> None:
    kernel.run(DATA + LIT + "trainer = L.Trainer(max_epochs=1)\nquiet = dict(enable_progress_bar=False, logger=False)")
    cell = kernel.try_run("%%distribute --ranks 2\ntrainer.fit(lit, loader)", PATIENCE)
    assert "the Trainer was made in an earlier cell, for one process" in cell.text
    cell = kernel.try_run(
        "%%distribute --ranks 2\nL.Trainer(max_epochs=1, devices=2, strategy='ddp_notebook').fit(lit, loader)", PATIENCE
    )
    assert "this strategy of Lightning starts ranks of its own" in cell.text and "leave strategy= out" in cell.text
    cell = kernel.run("%%distribute --ranks 2\nL.Trainer(max_epochs=1, devices=1, **quiet).fit(lit, loader)", PATIENCE)
    assert "each of the 2 ranks trains a model of its own" in cell.text and "leave devices= out" in cell.text


@pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
def test_metrics_are_added_up_over_ranks_without_a_strategy(kernel: Notebook) -> None:
    count = (
        "from torchmetrics import SumMetric\ntotal = SumMetric()\ntotal.update(3.0)\ncounted = total.compute().item()"
    )
    kernel.run(f"%%distribute --ranks 2\n{count}", PATIENCE)
    assert kernel.value("counted") == 6.0
