"""Refused cells of all strategies, each with a remedy."""

# ruff: noqa: E501

from __future__ import annotations

from .advising import BLOCKS, ENCODER, MIXED, MLP, OWN_NORM, REENTRANT, TOKENS, Advice, cell, net, training

AVERAGED = """
def averaged():
    mean = torch.zeros(12)
    while True:
        mean = 0.5 * mean + 0.5 * (yield)
        yield mean

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.means = nn.Linear(6, 12), nn.Linear(12, 2), averaged()
        next(self.means)
    def forward(self, x):
        h = torch.tanh(self.first(x))
        mean = self.means.send(h.detach().mean(0))
        next(self.means)
        return self.last(h - mean)
"""
STRATEGIES = [
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
    Advice(
        *(
            "pruned_late",
            training(
                MLP,
                before="import torch.nn.utils.prune",
                then="    if step == 1:\n        nn.utils.prune.l1_unstructured(model[0], 'weight', 0.3)",
            ),
            "fsdp",
        ),
        *("was replaced, tied, pruned or removed after it had been sharded", "--strategy ddp", "ddp"),
    ),
    Advice(
        *("bias_removed", training(MLP, then="    if step == 1:\n        model[4].bias = None"), "fsdp"),
        *("was replaced, tied, pruned or removed after it had been sharded", "before the first training step"),
        edits=(("        model[4].bias = None", "        pass"), ("optimizer =", "model[4].bias = None\noptimizer =")),
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
    Advice(
        "generator",
        training("Net()", before=AVERAGED, then="del model.means"),
        *("ddp", "its forward sends values to a generator", "-O model=whole"),
        option=("model=whole",),
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
    Advice(
        *(
            "sharded_file",
            training(MLP, before="import io", then="torch.save(model.state_dict(), io.BytesIO())"),
            "fsdp",
        ),
        *("torch.save of a sharded state dict", "leave state_dict_type out"),
        given={"option": ("state_dict_type=SHARDED_STATE_DICT",)},
    ),
    *[
        Advice(
            name,
            training(
                "Net()",
                "(lambda out: F.mse_loss(out if isinstance(out, torch.Tensor) else out[0], y))(model(x, step))",
                before=net("if step > 2: return self.last(h), h").replace(
                    "def forward(self, x)", "def forward(self, x, step)"
                ),
            ),
            *("ddp", words, told),
            given=given,
            option=("model=whole",),
        )
        for name, words, told, given in (
            ("other_outputs", "the model returns, or keeps in attributes, other tensors", "-O model=whole", {}),
            (
                "other_outputs_accumulated",
                "the model returns different outputs for a part of the batch",
                "leave --grad-accumulation out",
                {"grad_accumulation": 2},
            ),
        )
    ],
    Advice(
        "zero_grad",
        training(MLP, before="import os").replace(
            "    optimizer.zero_grad()", "    if step != 3 or os.environ.get('RANK') == '0': optimizer.zero_grad()"
        ),
        *(
            "ddp",
            "before this backward some ranks had gradients and others had none",
            "call zero_grad() in the same steps",
        ),
        edits=(("if step != 3 or os.environ.get('RANK') == '0': ", ""),),
    ),
    Advice(
        *(
            "no_values",
            training("Net()", before=net("pass")).replace("model = ", "with torch.device('meta'): model = "),
        ),
        *("fsdp", "have no values on rank 0", "load_state_dict("),
        edits=(("model = Net()", "model = Net()\nmodel.load_state_dict(Net().state_dict(), assign=True)"),),
    ),
]
