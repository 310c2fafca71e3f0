"""Refused cells, each with a remedy that its refusal names: an option, another strategy, or an edit of the cell."""

# ruff: noqa: E501

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .running import CELLS
from .traces import TOLERANCE

PAGES = Path(__file__).parents[2] / "docs" / "refusals"


@dataclass(frozen=True)
class Advice:
    """``words`` are in the message, ``told`` in what it says to do. ``edits``: (old, new) text of the cell."""

    name: str
    text: str
    strategy: str
    words: str
    told: str
    then: str = ""
    """Another strategy; empty for the same one."""
    option: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()
    given: dict[str, Any] = field(default_factory=dict)
    """Options with which the cell is refused."""
    instead: dict[str, Any] = field(default_factory=dict)
    """Options that the remedy replaces."""
    tolerance: float = TOLERANCE
    ranks: int = 2

    @property
    def remedied(self) -> str:
        """The cell as the remedy wants it."""
        text = self.text
        for old, new in self.edits:
            assert old in text, f"{self.name}: {old!r} is not in the cell"
            text = text.replace(old, new)
        return text


def cell(name: str) -> str:
    return (CELLS / f"{name}.py").read_text()


def training(
    model: str, loss: str = "F.mse_loss(model(x), y)", *, before: str = "", then: str = "", x: str = ""
) -> str:
    """A cell of four steps: the expression of the model, and lines before the loop and after each step."""
    inputs = x or "torch.randn(8, 6)"
    return f"""
import torch
from torch import nn
import torch.nn.functional as F
{before}
torch.manual_seed(0)
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(4):
    x, y = {inputs}, torch.randn(8, 2)
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
{then}
"""


MLP = "nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2))"

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 2)
        self.scale = nn.Parameter(torch.ones(12))
        self.seen = []
    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.scale
        {line}
        return self.last(h)
"""


def net(line: str) -> str:
    return MODEL.replace("{line}", line)


BLOCKS = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.num_heads = 2
    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(11, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)
    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)
"""
MIXED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 2).double()
    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).double()).float()
"""
TOKENS = "torch.randint(11, (8, 6))"
ODD = "torch.randint(11, (8, 5))"

OWN_NORM = """
class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x)
"""
ENCODER = "nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)"
REENTRANT = """
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 2)
    def forward(self, x):
        return self.last(checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=True))
"""
PREPARED = """
import torch
import jupyter_torchdist as td
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
td.prepare(GIVEN)
for step in range(4):
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""

ADVICES = [
    Advice(
        *("checkpoint_around_models", cell("checkpoint_around_models"), "fsdp"),
        *("checkpoint is applied to the whole", "use checkpoint within its forward"),
        edits=(
            ("encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))", "encoder = Encoder()"),
            (
                "torch.manual_seed(0)",
                (
                    "class Encoder(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
                    "        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))\n"
                    "    def forward(self, x):\n        return checkpoint(self.layers, x, use_reentrant=False)\n"
                    "torch.manual_seed(0)"
                ),
            ),
            ("checkpoint(encoder, x, use_reentrant=False))", "encoder(x))"),
        ),
    ),
    Advice(
        *("reentrant", cell("checkpoint_around_models"), "fsdp", "checkpoint is applied to the whole"),
        told="use_reentrant=True",
        edits=(
            ("use_reentrant=False", "use_reentrant=True"),
            ("torch.randn(8, 6)", "torch.randn(8, 6).requires_grad_()"),
        ),
    ),
    Advice(
        *("vmap", training(MLP, "F.mse_loss(torch.func.vmap(lambda one: model(one))(x), y) + model(x).mean()"), "fsdp"),
        *("is called in a transform of torch.func", "--strategy ddp", "ddp"),
    ),
    Advice(
        *("functional_call", cell("per_sample_gradients"), "fsdp", "functional_call of", "--strategy ddp", "ddp"),
    ),
    Advice(
        *("scripted", cell("scripted"), "ddp", "is a torch.jit script", "train the nn.Module itself"),
        edits=(("torch.jit.script(", "("),),
    ),
    Advice(
        *("new_head", cell("new_head"), "fsdp", "after it had been divided among the ranks", "--strategy ddp", "ddp")
    ),
    Advice(*("backbone", cell("backbone_reused"), "fsdp", "is sharded already, as a part of another", "ddp", "ddp")),
    Advice(
        *("lbfgs", cell("lbfgs"), "fsdp", "cannot train parameters that fsdp or tp has sharded", "ddp", "ddp"),
        tolerance=1e-3,
    ),
    Advice(
        *("another_optimizer", cell("lbfgs"), "fsdp", "cannot train parameters that fsdp or tp has sharded"),
        told="another optimizer",
        edits=(
            (
                "torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)",
                "torch.optim.SGD(model.parameters(), lr=0.1)",
            ),
        ),
    ),
    Advice(
        *("slots", cell("returned_stranger"), "ddp", "which cannot be put together", "without __slots__"),
        edits=(('    __slots__ = ("y",)\n\n', ""),),
    ),
    Advice(
        *("no_class", training("Net()", before=BLOCKS, x=TOKENS), "fsdp", "no module of class", "Block"),
        given={"option": ("auto_wrap_policy=TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap=Layer")},
        option=("auto_wrap_policy=TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap=Block"),
    ),
    Advice(
        *(
            "tuple",
            training(MLP, before="", then="")
            .replace("losses = []", "losses, kept = [], tuple(model.parameters())")
            .replace("    losses.append", "    norm = sum(float(p.norm()) for p in kept)\n    losses.append"),
            "fsdp",
        ),
        *("a tuple of the cell holds parameters", "use a list"),
        edits=(("tuple(model.parameters())", "list(model.parameters())"),),
    ),
    Advice(
        "backward_hook",
        training(MLP).replace(
            "losses = []",
            "losses, seen = [], []\n"
            "model[0].register_full_backward_hook(lambda module, given, out: seen.append(out[0].abs().sum().item()))",
        ),
        *("ddp", "a backward hook of", "-O model=whole"),
        option=("model=whole",),
    ),
    Advice(
        *("hook_in_forward", training("Net()", before=net("h.register_hook(lambda g: g.clamp(-0.01, 0.01))")), "ddp"),
        *("a hook that is registered in the model's forward", "-O model=whole"),
        option=("model=whole",),
    ),
    Advice(
        *("penalty_before", cell("penalty_before"), "fsdp", "parameters as they were before the model's first call"),
        told="after model(x)",
        edits=(
            ("    penalty = sum(p.square().sum() for p in model.parameters())\n", ""),
            (
                "    loss = nn.functional.mse_loss(model(x), y) + 1e-2 * penalty\n",
                (
                    "    loss = nn.functional.mse_loss(model(x), y)\n"
                    "    loss = loss + 1e-2 * sum(p.square().sum() for p in model.parameters())\n"
                ),
            ),
        ),
    ),
    Advice(*("penalty_ddp", cell("penalty_before"), "fsdp", "parameters as they were before", "--strategy ddp", "ddp")),
    Advice(*("outside", cell("parameter_outside"), "fsdp", "used outside of the forward", "--strategy ddp", "ddp")),
    Advice(
        *(
            "into_forward",
            cell("parameter_outside"),
            "fsdp",
            "used outside of the forward",
            "move their code into forward",
        ),
        edits=(
            (
                "        return self.head(x @ self.basis)",
                "        return self.head(x @ self.basis), x[:, :4] @ self.basis",
            ),
            (
                "loss = model(x).square().mean() + (x[:, :4] @ model.basis).square().mean()",
                "out, code = model(x)\n    loss = out.square().mean() + code.square().mean()",
            ),
            ("    loss = model.head[0](x @ model.basis).mean()\n", ""),
        ),
    ),
    Advice(
        *("copied", cell("batch_norm_copies"), "fsdp", "copy.deepcopy of", "ddp", "ddp"),
    ),
    Advice(*("mixes", cell("batch_centering"), "fsdp", "cannot be divided", "-O model=whole"), option=("model=whole",)),
    Advice(
        *("branches", cell("branch_in_forward"), "ddp", "cannot be divided", "pass it as an argument"),
        edits=(
            ("def forward(self, x, missing):", "def forward(self, x, missing, some):"),
            ("if missing.any():", "if some:"),
            ("model(x, missing)", "model(x, missing, bool(missing.any()))"),
        ),
    ),
    Advice(
        *(
            "returned_number",
            cell("returned_numbers"),
            "ddp",
            "cannot be divided",
            "compute it from the model's outputs",
        ),
        edits=(
            ("return y, len(y)", "return y"),
            ("y, count = model(torch.randn(8, 6))", "y = model(torch.randn(8, 6))\n    count = len(y)"),
        ),
    ),
    Advice(
        *("sorted_order", cell("packed_in_sorted_order"), "ddp", "cannot be divided", "order of the samples"),
        edits=(("self.out(hidden[-1])", "self.out(hidden[-1])[order.argsort()]"),),
    ),
    Advice(
        *("new_parameter", cell("vq_vae_ema"), "fsdp", "puts a new nn.Parameter in place of", "write into it instead"),
        given={"option": ("model=whole",)},
        option=("model=whole",),
        edits=(
            (
                (
                    "            self.ema_w = nn.Parameter("
                    "self.ema_w * self.decay + (1 - self.decay) * one.t() @ flat)\n"
                    "            self.embedding.weight = nn.Parameter(self.ema_w / self.size.unsqueeze(1))\n"
                ),
                (
                    "            with torch.no_grad():\n"
                    "                self.ema_w.copy_(self.ema_w * self.decay + (1 - self.decay) * one.t() @ flat)\n"
                    "                self.embedding.weight.copy_(self.ema_w / self.size.unsqueeze(1))\n"
                ),
            ),
        ),
    ),
    Advice(
        *("accumulation_trusted", training(MLP), "ddp", "does not check that this is correct", "leave one of them out"),
        given={"grad_accumulation": 2, "option": ("model=whole",)},
        instead={"grad_accumulation": 2, "option": ()},
    ),
    Advice(
        "accumulation_norm",
        training("nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 2))"),
        *("ddp", "normalises over the batch", "GroupNorm, LayerNorm"),
        given={"grad_accumulation": 2},
        instead={"grad_accumulation": 2},
        edits=(("nn.BatchNorm1d(12)", "nn.LayerNorm(12)"),),
    ),
    Advice(
        *("accumulation_left_out", training("Net()", before=net("self.count = getattr(self, 'count', 0) + 1")), "ddp"),
        *("--grad-accumulation: the forward of", "leave --grad-accumulation out"),
        given={"grad_accumulation": 2},
    ),
    Advice(
        "post_accumulate_hook",
        training(MLP).replace(
            "losses = []",
            "losses = []\nfor p in model.parameters():\n    "
            "p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))",
        ),
        *("ddp", "register_post_accumulate_grad_hook", "do after backward()"),
        edits=(
            (
                "\nfor p in model.parameters():\n    p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))",
                "",
            ),
            ("loss.backward()", "loss.backward()\n    for p in model.parameters():\n        p.grad.mul_(0.5)"),
        ),
    ),
    Advice(
        "static_graph",
        training(
            "Net()",
            "F.mse_loss(model(x, step > 1), y)",
            before=net("h = h if more else h.detach()").replace("def forward(self, x)", "def forward(self, x, more)"),
        ),
        *("ddp", "-O static_graph=1", "leave static_graph out"),
        given={"option": ("static_graph=1",)},
    ),
    Advice(
        *(
            "unseeded",
            cell("unseeded_samples"),
            "ddp",
            "have different",
            "seed every generator (numpy.random.default_rng(0)",
        ),
        edits=(
            ("np.random.default_rng()", "np.random.default_rng(0)"),
            ("import torch.nn as nn\n", "import torch.nn as nn\ntorch.manual_seed(0)\n"),
        ),
    ),
    Advice(
        *("second_loop", cell("second_loop_late"), "ddp", "a step uses batches of two loops", "-O batch=whole"),
        option=("batch=whole",),
    ),
    Advice(
        *("stored", training("Net()", before=net("self.seen.append(h.std().item())")), "ddp"),
        *("cannot be divided", "-O model=whole"),
        option=("model=whole",),
    ),
    Advice(
        *(
            "verify_no_step",
            "model, losses = None, [1.0]\n",
            "ddp",
            "the cell made no optimizer step",
            "leave --verify out",
        ),
        given={"verify": 2},
    ),
    Advice(
        *(
            "verify_noise",
            cell("dropout"),
            "ddp",
            "--verify: the model draws random numbers",
            "set the probability to 0",
        ),
        given={"verify": 2},
        instead={"verify": 2},
        edits=(("Dropout(0.3)", "Dropout(0)"),),
    ),
    Advice(
        *("zero1", cell("lbfgs"), "ddp", "zero1 cannot divide the state of LBFGS", "leave -O zero1 out"),
        given={"option": ("zero1=1",)},
        tolerance=1e-3,
    ),
    Advice(
        *("one_dtype", training("Net()", before=MIXED), "fsdp", "are trained in one unit of fsdp", "or use ddp", "ddp"),
    ),
    Advice(
        *(
            "frozen",
            training("Net()", before=MIXED),
            "fsdp",
            "are trained in one unit of fsdp",
            "or freeze one of them",
        ),
        edits=(("nn.Linear(12, 2).double()", "nn.Linear(12, 2).double().requires_grad_(False)"),),
    ),
    # tp
    Advice(
        *("tp_heads", training("Net()", before=BLOCKS.replace("num_heads = 2", "num_heads = 3"), x=TOKENS), "tp"),
        *("a head is computed on one rank", "leave the attention whole"),
        option=("tp_plan=layers.*.up:colwise,layers.*.down:rowwise",),
    ),
    Advice(
        *("tp_nothing", training(MLP), "tp", "tp finds nothing to split", "-O tp_plan="),
        option=("tp_plan=0:colwise,2:rowwise",),
    ),
    Advice(
        *("tp_pattern", training("Net()", before=BLOCKS, x=TOKENS), "tp", "matches no module of", "layers.*.up"),
        given={"option": ("tp_plan=layers.*.upp:colwise",)},
        option=("tp_plan=layers.*.up:colwise,layers.*.down:rowwise",),
    ),
    Advice(
        *("sequence_parallel", training("Net()", before=BLOCKS, x=TOKENS), "tp", "are in the block itself"),
        told="leave sequence_parallel out",
        given={"option": ("sequence_parallel=1",)},
    ),
    # cp
    Advice(*("cp_blocks", training(MLP), "cp", "divides the sequence within repeated blocks", "fsdp", "fsdp")),
    Advice(
        *("cp_length", training("Net()", before=BLOCKS, x=ODD), "cp", "tokens over 2 ranks do not divide", "pad the"),
        edits=((ODD, "F.pad(torch.randint(11, (8, 5)), (0, 1))"),),
    ),
    Advice(
        "cp_no_attention",
        training(
            "Net()",
            before=BLOCKS.replace("F.scaled_dot_product_attention(q, k, v)", "(torch.softmax(q @ k.mT, -1) @ v)"),
            x=TOKENS,
        ),
        *("cp", "computes no F.scaled_dot_product_attention", "use F.scaled_dot_product_attention in the blocks"),
        edits=(("(torch.softmax(q @ k.mT, -1) @ v)", "F.scaled_dot_product_attention(q, k, v, scale=1.0)"),),
    ),
    # pp
    Advice(
        *(
            "pp_norm",
            training("nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 2))"),
            "pp",
        ),
        *("a microbatch is only a part of the batch", "-O microbatches=1"),
        option=("microbatches=1",),
    ),
    Advice(
        *("pp_lbfgs", cell("lbfgs"), "pp", "needs all gradients in one place", "--strategy ddp", "ddp"), tolerance=1e-3
    ),
    Advice(
        *("pp_stored", training("Net()", before=net("self.seen.append(h.detach())")), "pp", "stores something in"),
        *("--strategy ddp or fsdp", "ddp"),
    ),
    Advice(
        *(
            "pp_reads",
            training(MLP).replace("losses.append(loss.item())", "losses.append(model[0].weight.sum().item())"),
            "pp",
        ),
        *("reads numbers from parameters", "--strategy ddp or fsdp", "fsdp"),
    ),
    Advice(
        *(
            "pp_gradient",
            training(MLP).replace(
                "    optimizer.step()", "    slope = model[0].weight.grad.norm().item()\n    optimizer.step()"
            ),
            "pp",
        ),
        *("the cell reads the gradient of a parameter of another pipeline stage", "--strategy ddp or fsdp", "fsdp"),
    ),
    Advice(
        *(
            "pp_penalty",
            cell("penalty_before"),
            "pp",
            "this backward needs parameters as they were",
            "ddp or fsdp",
            "ddp",
        ),
    ),
    Advice(
        *("pp_branch", training("Net()", before=net("h = h * 2 if h.sum() > 0 else h")), "pp"),
        *("branches on the values of its tensors", "another strategy", "ddp"),
        option=("model=whole",),
    ),
    Advice(
        *("pp_schedule", training(MLP, "(model(x) @ model(x).T).softmax(-1).diagonal().log().mean()"), "pp"),
        *("-O schedule=1f1b starts backwards before all forwards", "-O schedule=gpipe"),
        given={"option": ("schedule=1f1b", "microbatches=4")},
        option=("schedule=gpipe",),
    ),
    Advice(
        *("pp_balance", training(MLP), "pp", "balance=", "which add up to the blocks"),
        given={"option": ("balance=1,1",)},
        option=("balance=1,2",),
    ),
    Advice(
        *("checkpointing_blocks", training("Net()", before=net("pass")), "ddp", "has no repeated block"),
        told="leave --activation-checkpointing out",
        given={"activation_checkpointing": True},
    ),
    # options that contradict the strategy
    *[
        Advice(name, training(MLP), "pp", words, told, given=given)
        for name, words, told, given in (
            (
                "pp_activations",
                "--activation-checkpointing and a pipeline do not go together",
                "leave it out",
                {"activation_checkpointing": True},
            ),
            ("pp_compile", "--compile and a pipeline do not go together", "leave one of them out", {"compile": True}),
        )
    ],
    Advice(
        *("pp_accumulation", training(MLP), "pp", "--grad-accumulation and a pipeline", "use -O microbatches"),
        given={"grad_accumulation": 2},
        option=("microbatches=2",),
    ),
    Advice(
        *("accumulation_grad", cell("gradients_by_autograd"), "ddp", "computes gradients in backward() alone"),
        told="leave --grad-accumulation out",
        given={"grad_accumulation": 2},
    ),
    Advice(
        "pp_group",
        training(MLP)
        .replace(
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
            "optimizer = torch.optim.SGD(model[:2].parameters(), lr=0.1)",
        )
        .replace(
            "    losses.append",
            "    if step == 1:\n        optimizer.add_param_group({'params': model[2:].parameters()})\n    losses.append",
        ),
        *("pp", "is already cut into stages, and an optimizer or a parameter group was added after that"),
        *("--strategy ddp or fsdp", "ddp"),
    ),
    Advice(
        "different_models",
        training(
            "nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))",
            before="import os\nwidth = 4 + os.getpid() % 1000",
        ).replace("losses = []", "losses = []\ntorch.manual_seed(1)"),
        *("ddp", "the ranks built different models", "must not depend on the rank"),
        edits=(("4 + os.getpid() % 1000", "12"),),
    ),
    Advice(
        *(
            "own_norm",
            training("nn.Sequential(nn.Linear(6, 12), OwnNorm(12), nn.Linear(12, 2))", before=OWN_NORM),
            "ddp",
        ),
        *("is batch normalisation with its own forward", "use a class of torch.nn"),
        edits=(("OwnNorm(12)", "nn.BatchNorm1d(12)"),),
    ),
    Advice(
        *(
            "zero1_state",
            training(MLP, then="state = optimizer.state_dict()").replace("lr=0.1", "lr=0.1, momentum=0.9"),
            "ddp",
        ),
        *("whose state zero1 divides among the ranks would be a part of it", "leave -O zero1 out"),
        given={"option": ("zero1=1",)},
    ),
    Advice(
        *("save_whole", training(MLP, before="import io", then="torch.save(model, io.BytesIO())"), "fsdp"),
        *("which is divided among ranks", "save model.state_dict()"),
        edits=(("torch.save(model, ", "torch.save(model.state_dict(), "),),
    ),
    Advice(
        *(
            "save_stages",
            training(MLP, before="import io", then="torch.save(list(model.parameters()), io.BytesIO())"),
            "pp",
        ),
        *("torch.save of parameters of other pipeline stages", "save model.state_dict()"),
        edits=(("torch.save(list(model.parameters()), ", "torch.save(model.state_dict(), "),),
    ),
    Advice(
        *("tp_attention", training(ENCODER, "F.mse_loss(model(x).mean(1)[:, :2], y)", x="torch.randn(8, 6, 8)"), "tp"),
        *("whose projections are one parameter that tp cannot split", "or fsdp", "fsdp"),
    ),
    Advice(
        *("cp_attention", training(ENCODER, "F.mse_loss(model(x).mean(1)[:, :2], y)", x="torch.randn(8, 6, 8)"), "cp"),
        *("checks its masks against the tokens that it is given", "--strategy fsdp", "fsdp"),
    ),
    Advice(
        *("tp_style", training("Net()", before=BLOCKS, x=TOKENS), "tp", "colwise splits a", "name the linear layers"),
        given={"option": ("tp_plan=layers.*.norm:colwise",)},
        option=("tp_plan=layers.*.up:colwise,layers.*.down:rowwise",),
    ),
    Advice(
        *(
            "sequence_without_blocks",
            training(MLP),
            "tp",
            "sequence_parallel divides what is between the layers of repeated",
        ),
        told="leave sequence_parallel out",
        given={"option": ("sequence_parallel=1", "tp_plan=0:colwise,2:rowwise")},
        option=("tp_plan=0:colwise,2:rowwise",),
    ),
    Advice(
        "pp_reentrant",
        training("Net()", before=REENTRANT),
        *("pp", "with use_reentrant=True, which keeps no graph", "use_reentrant=False"),
        edits=(("use_reentrant=True", "use_reentrant=False"),),
    ),
    Advice(
        "pp_state",
        training(MLP)
        .replace("lr=0.1", "lr=0.1, momentum=0.9")
        .replace(
            "    losses.append",
            "    norm = sum(float(one['momentum_buffer'].norm()) for one in optimizer.state.values())\n    losses.append",
        ),
        *("pp", "the cell reads an optimizer's state", "--strategy ddp or fsdp", "fsdp"),
    ),
    Advice(
        *(
            "pp_few_layers",
            training("nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))"),
            "pp",
            "stages are more than the",
        ),
        told="a model of more blocks",
        given={"option": ("schedule=zbv", "microbatches=4")},
        instead={"option": ("schedule=zbv", "microbatches=4")},
        edits=(("nn.Linear(6, 6), ", "nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), "),),
    ),
    Advice(
        *(
            "pp_one_stage",
            training("nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))"),
            "pp",
            "stages are more than the",
        ),
        told="a schedule with one stage a rank",
        given={"option": ("schedule=zbv", "microbatches=4")},
        option=("schedule=gpipe",),
    ),
    Advice(
        *(
            "pp_one_layer",
            cell("checkpoint_within_forward"),
            "pp",
            "stages are more than the",
            "--strategy ddp or fsdp",
            "ddp",
        ),
    ),
    Advice(
        *(
            "pp_changed",
            training(MLP).replace(
                "    loss.backward()",
                "    with torch.no_grad():\n        model[0].weight.mul_(0.9)\n    loss.backward()",
            ),
            "pp",
        ),
        *("changed between its forward and backward()", "-O schedule=gpipe"),
        given={"option": ("schedule=1f1b", "microbatches=4")},
        option=("schedule=gpipe",),
    ),
    # td.prepare
    *[
        Advice(
            name,
            PREPARED.replace("GIVEN", given),
            "ddp",
            words,
            told,
            edits=((f"prepare({given})", f"prepare({right})"),),
        )
        for name, given, right, words, told in (
            ("prepared_twice", "model, model, optimizer", "model, optimizer", "is prepared already", "once"),
            ("prepared_list", "[model], optimizer", "model, optimizer", "and was given", "leave it out"),
            (
                "prepared_loss",
                "model, nn.MSELoss(), optimizer",
                "model, optimizer",
                "has no parameters",
                "needs no preparing",
            ),
            ("prepared_optimizer", "optimizer", "model, optimizer", "in no prepared model", "prepare the model"),
            (
                "prepared_part",
                "model, model[0], optimizer",
                "model, optimizer",
                "shares parameters with",
                "the outer one",
            ),
        )
    ],
]

ALWAYS = ("new_head", "sorted_order", "tp_nothing")
"""Those that run in ``make test``, and not only in ``make soak``."""


SHOWN_OTHERWISE = frozenset({"cp_length", "pp_schedule", "tp_style"})
"""Their words are in the message, and are placeholders in the docs."""


def rows() -> list[tuple[str, str]]:
    """(message, what to do) of the pages of strategies and parallelisms."""
    found = []
    for page in ("strategies", "parallelisms"):
        for line in (PAGES / f"{page}.md").read_text().splitlines():
            if match := re.fullmatch(r"\| (.+) \| (.+) \|", line):
                found.append((match[1], match[2]))
    return [row for row in found if row[0] not in ("message", "---")]
