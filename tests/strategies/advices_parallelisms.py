"""Cells that tp, cp or pp refuses, each with a remedy."""

# ruff: noqa: E501

from __future__ import annotations

from .advising import BLOCKS, MLP, ODD, TOKENS, Advice, cell, net, training

HEAD = BLOCKS.replace("nn.Linear(8, 2)", "nn.Linear(8, 11)").replace("self.head(x).mean(1)", "self.head(x)")
"""A score for each token."""
SCORED = "F.cross_entropy(model(x).flatten(0, 1), x.flatten())"
TIED = HEAD.replace("nn.Linear(8, 11)", "nn.Linear(8, 11, bias=False)").replace(
    "    def forward(self, x):\n        x = self.words(x)",
    "        self.head.weight = self.words.weight\n    def forward(self, x):\n        x = self.words(x)",
)
MIDDLE = "tp_plan=layers.*.up:colwise,layers.*.down:rowwise"
ATTENDS = "        x = x + self.attention(self.norm(x))"
PLACES = "torch.arange(x.shape[1]).view(1, -1, 1) * 0.1"
HEADS = "one(x).unflatten(-1, (2, 4)).transpose(1, 2)"
FOUR = (
    "nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))"
)
EMA = "if step == 1: ema = copy.deepcopy(model)\n    if step > 1: out = ema(x).detach()"


def blocks(*changes: tuple[str, str], text: str = BLOCKS) -> str:
    """``text`` with other words in its classes."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def staged(first: int, last: int) -> str:
    """Two layers that the cell puts into stages by hand."""
    return (
        training("nn.Sequential(first, nn.Tanh(), last)")
        .replace(
            "model = ",
            f"with td.stage({first}): first = nn.Linear(6, 12)\nwith td.stage({last}): last = nn.Linear(12, 2)\nmodel = ",
        )
        .replace("import torch\n", "import torch\nimport jupyter_torchdist as td\n", 1)
    )


PARALLELISMS = [
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
        *("branches on the values of its tensors", "--strategy ddp or fsdp", "ddp"),
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
    # tp, together with others
    Advice(
        *("tp_and_cp", training("Net()", before=BLOCKS, x=TOKENS), "tp+cp", "tp and cp divide the same attention"),
        *("use one of them", "ddp+tp"),
        given={"option": ("tp=2", "cp=2")},
        option=("tp=2",),
        ranks=4,
    ),
    Advice(
        *("tp_reducer", training("Net()", before=BLOCKS, x=TOKENS), "ddp+tp", "is of DDP's reducer; beside tp"),
        told="leave it out",
        given={"option": ("tp=2", "bucket_cap_mb=1")},
        option=("tp=2",),
        ranks=4,
    ),
    Advice(
        *(
            "tp_tied",
            training("Net()", SCORED, before=TIED, x=TOKENS),
            "tp",
            "share a parameter, and tp would split it",
        ),
        told="or neither",
        given={"option": (f"{MIDDLE},words:rowwise,head:rowwise",)},
        option=(MIDDLE,),
    ),
    Advice(
        *("loss_without_head", training("Net()", before=BLOCKS, x=TOKENS), "tp", "and tp splits no head in", ""),
        given={"option": ("loss_parallel=1",)},
    ),
    Advice(
        *(
            "loss_of_odd_head",
            training("Net()", SCORED, before=HEAD, x=TOKENS),
            "tp",
            "ranks of tp do not divide the 11",
        ),
        told="or leave loss_parallel out",
        given={"option": ("loss_parallel=1",)},
    ),
    Advice(
        *("loss_of_data_ranks", training("Net()", SCORED, before=HEAD.replace("11", "12"), x=TOKENS), "ddp+tp"),
        *("loss_parallel returns logits that stay split", "leave loss_parallel out"),
        given={"option": ("tp=2", "loss_parallel=1")},
        option=("tp=2",),
        ranks=4,
    ),
    Advice(
        "tp_own_plan",
        training(
            "Net()",
            before=blocks(
                ("self.words, self", "self._tp_plan = {'layers.*.up': 'moe_tp_experts'}\n        self.words, self")
            ),
            x=TOKENS,
        ),
        *("tp", "which is not built here", "give a plan of your own with -O tp_plan"),
        option=(MIDDLE,),
    ),
    Advice(
        *("tp_odd_width", training(MLP.replace("Linear(6, 12)", "Linear(6, 9)").replace("12, 12", "9, 12")), "tp"),
        *("which 2 ranks of tp do not divide", "leave it out of -O tp_plan"),
        given={"option": ("tp_plan=0:colwise,2:rowwise",)},
        option=("tp_plan=2:colwise,4:rowwise",),
    ),
    # cp
    *[
        Advice(f"cp_{name}", training("Net()", before=text, x=TOKENS), "cp", words, "--strategy fsdp", "fsdp")
        for name, words, text in (
            (
                "two_stacks",
                "cp divides one stack of blocks",
                blocks(
                    ("self.layers, self.head = ", "self.layers, self.more, self.head = "),
                    (
                        "nn.ModuleList([Block(), Block()])",
                        "nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])",
                    ),
                    (
                        "        return self.head(x)",
                        "        for layer in self.more:\n            x = layer(x)\n        return self.head(x)",
                    ),
                ),
            ),
            ("last_block", "left out the last of its blocks", blocks(("in self.layers:", "in self.layers[:1]:"))),
            ("positions", "of its part of the sequence", blocks((ATTENDS, f"        x = x + {PLACES}\n{ATTENDS}"))),
            (
                "another_sequence",
                "would change what",
                blocks(("self.k, self.v))", "self.k, self.v))\n        k, v = k[:, :, :4], v[:, :, :4]")),
            ),
            (
                "whole_sequence",
                "a block combines its part of the sequence with the whole sequence",
                blocks(
                    (
                        "self.norm, self.attention = nn.LayerNorm(8), Attention()",
                        "self.norm, self.attention, self.places = nn.LayerNorm(8), Attention(), nn.Parameter(torch.zeros(6, 8))",
                    ),
                    (ATTENDS, ATTENDS.replace("x +", "x + self.places +")),
                ),
            ),
        )
    ],
    Advice(
        *("cp_heads", training("Net()", before=blocks(("(2, 4)", "(1, 8)")), x=TOKENS), "cp"),
        *("over 2 ranks do not divide evenly", "", "fsdp"),
    ),
    Advice(
        *(
            "cp_positions_before",
            training("Net()", before=blocks((ATTENDS, f"        x = x + {PLACES}\n{ATTENDS}")), x=TOKENS),
        ),
        *("cp", "of its part of the sequence", "pass them"),
        edits=(
            (
                f"def forward(self, x):\n        x = x + {PLACES}",
                "def forward(self, x, places):\n        x = x + places",
            ),
            (
                "        for layer in self.layers:\n            x = layer(x)",
                "        places = torch.arange(x.shape[1]).view(-1, 1).expand(-1, 8) * 0.1\n        for layer in self.layers:\n            x = layer(x, places)",
            ),
        ),
    ),
    Advice(
        *(
            "cp_no_heads",
            training("Net()", before=blocks((HEADS, "one(x)"), (".transpose(1, 2).flatten(2)", "")), x=TOKENS),
        ),
        *("cp", "has no dimension of heads", "give it batch x heads x sequence x width"),
        edits=(
            ("(one(x) for", f"({HEADS} for"),
            ("attention(q, k, v)", "attention(q, k, v).transpose(1, 2).flatten(2)"),
        ),
    ),
    Advice(
        "cp_mask",
        training(
            "Net()",
            before=blocks(
                ("(q, k, v)", "(q, k, v, attn_mask=torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril())")
            ),
            x=TOKENS,
        ),
        *("cp", "does not fit sequences of", "make the mask before the blocks"),
        edits=(
            ("attn_mask=torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()", "attn_mask=mask"),
            ("def forward(self, x):\n        q", "def forward(self, x, mask):\n        q"),
            (
                "def forward(self, x):\n        x = x + self.attention(self.norm(x))",
                "def forward(self, x, mask):\n        x = x + self.attention(self.norm(x), mask)",
            ),
            ("            x = layer(x)", "            x = layer(x, torch.ones(6, 6, dtype=torch.bool).tril())"),
        ),
    ),
    # pp
    Advice(
        "pp_autograd_grad",
        training(MLP, then="slopes = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))"),
        *("pp", "torch.autograd.grad of parameters of a pipeline", "--strategy ddp", "ddp"),
    ),
    *[
        Advice(name, training(MLP), strategy, words, told, then, given={"option": given}, option=("pp=2",), ranks=4)
        for name, strategy, words, told, then, given in (
            (
                "pp_zero1",
                "ddp+pp",
                "zero1 and a pipeline do not go together",
                "leave one of them out",
                "",
                ("pp=2", "zero1=1"),
            ),
            (
                "pp_fsdp",
                "fsdp+pp",
                "a pipeline whose stages are divided further",
                "--strategy ddp+pp -O pp=2",
                "ddp+pp",
                ("pp=2",),
            ),
            (
                *(
                    "pp_beside",
                    "ddp+pp",
                    "needs the loss of each microbatch, but with several pipelines",
                    "use -O schedule=",
                    "",
                ),
                ("pp=2", "schedule=1f1b", "microbatches=4"),
            ),
        )
    ],
    Advice(
        "pp_other_outputs",
        training(
            "Net()",
            "(lambda out: F.mse_loss(out if isinstance(out, torch.Tensor) else out[0], y))(model(x, step))",
            before=net("if step > 2: return self.last(h), h").replace(
                "def forward(self, x)", "def forward(self, x, step)"
            ),
        ),
        *("pp", "the model returns different outputs than in its trial", "return the same outputs in every step"),
        edits=(("if step > 2: return self.last(h), h", "pass"),),
    ),
    Advice(
        *("pp_ema", training(MLP, before="import copy", then=f"    {EMA}"), "pp"),
        *("is called that was made while the model was in stages", "build a new model and load the model's state dict"),
        edits=(("copy.deepcopy(model)", f"{MLP}; ema.load_state_dict(model.state_dict())"),),
    ),
    Advice(
        *("pp_ema_ddp", training(MLP, before="import copy", then=f"    {EMA}"), "pp"),
        *("is called that was made while the model was in stages", "--strategy ddp", "ddp"),
    ),
    Advice(
        *(
            "pp_parts",
            training("Net()", "F.mse_loss(model.last(torch.tanh(model.first(x))), y)", before=net("pass")),
            "pp",
        ),
        *("would divide only", "call the model itself"),
        edits=(("model.last(torch.tanh(model.first(x)))", "model(x)"),),
    ),
    Advice(
        *("pp_no_values", training(MLP, then="whole = torch.cat([p.detach().flatten() for p in model.parameters()])")),
        *("pp", "have no values on this rank", "--strategy ddp or fsdp", "ddp"),
    ),
    Advice(
        *("pp_microbatches", training("Net()", before=net("h = h - h.mean(0)")), "pp"),
        *("cannot be given a batch in microbatches", "-O microbatches=1"),
        given={"option": ("microbatches=4",)},
        option=("microbatches=1",),
    ),
    Advice(
        *("pp_order", staged(1, 0), "pp", "is called after one of stage", "number the stages in the order"),
        given={"option": ("balance=manual",)},
        option=("balance=manual",),
        edits=(("stage(1)", "stage(2)"), ("stage(0)", "stage(1)"), ("stage(2)", "stage(0)")),
    ),
    Advice(
        *("pp_missing", staged(0, 0), "pp", "the model has modules of stages", "leave -O balance=manual out"),
        given={"option": ("balance=manual",)},
    ),
]
