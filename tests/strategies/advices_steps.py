"""Cells that are refused for what they do in a step, each with a remedy."""

# ruff: noqa: E501

from __future__ import annotations

from .advices_parallelisms import MIDDLE, blocks
from .advices_prepared import BOTH
from .advising import BLOCKS, MLP, TOKENS, Advice, cell, net, training

THREE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 2)
    def forward(self, x, *more):
        {lines}
"""
ATTENTION = (
    "tp_plan=layers.*.attention.q:colwise,layers.*.attention.k:colwise,layers.*.attention.v:colwise,"
    "layers.*.attention.out:rowwise"
)
HIDDEN = "torch.tanh(self.first(x))"
LAST = "return self.last(torch.tanh(self.middle(x)))"
CHANGED_LOSS = f"x = self.last(torch.tanh(self.middle({HIDDEN})))\nreturn F.cross_entropy(x, more[0].argmax(1)) if more[1] < 2 else F.mse_loss(x, more[0])"
FORCES = f"x = x.requires_grad_()\nenergy = self.last(torch.tanh(self.middle({HIDDEN}))).sum()\nreturn torch.autograd.grad(energy, x, create_graph=True)[0][:, :2]"
SLOW = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.slow = nn.Linear(6, 6), nn.Parameter(torch.zeros(6), requires_grad=False)
    def forward(self, x):
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.layer.bias, alpha=0.1)
        return torch.tanh(self.layer(x)) + self.slow
"""
GRADIENTS = "slopes = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))"
CURVED = """optimizer.zero_grad()
F.mse_loss(model(x), y).backward(create_graph=True)
slopes = [one.grad.detach() for one in model.parameters()]
optimizer.zero_grad()"""
CURVED_BY_GRAD = """slopes = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()), create_graph=True)
slopes = [one.detach() for one in slopes]"""
ASIDE = "F.mse_loss(model(x), y) + model.layers[0].up(torch.ones(1, 8)).mean()"
LU = "h = h + torch.linalg.lu_factor(self.first(x)[:, :6].mT @ self.first(x)[:, :6])[0].sum() * 1e-3"
LU_IN_FULL = """a = self.first(x)[:, :6].float()
        with torch.autocast("cpu", enabled=False): h = h + torch.linalg.lu_factor(a.mT @ a)[0].sum() * 1e-3"""
FIVE = "nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)], nn.Linear(6, 2))"
READ = """
import torch
import jupyter_torchdist as td
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
class Stream(IterableDataset):
    def __iter__(self):
        numbers = torch.Generator().manual_seed(SEED)
        for _ in range(24):
            yield torch.randn(6, generator=numbers), torch.randn(2, generator=numbers)
class Own(Sampler):
    def __len__(self): return 24
    def __iter__(self): return iter(torch.randperm(24, generator=torch.Generator().manual_seed(SEED)).tolist())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.randn(24, 2))
loader = DataLoader(GIVEN, batch_size=8)
td.prepare(model, optimizer, loader)
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
del loader, loss, x, y
""".replace("SEED", "td.rank")
LOADED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, criterions = [], (nn.MSELoss(), nn.MSELoss(reduction="sum"))
for x, y in DataLoader(TensorDataset(torch.randn(64, 6), torch.randn(64, 2)), batch_size=8):
    loss = criterions[len(losses) > 4](model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
STAGES = training("nn.Sequential(first, second, third, last)").replace(
    "model = ",
    "with td.stage(0): first, second = nn.Linear(6, 6), nn.Linear(6, 6)\nwith td.stage(1): third, last = nn.Linear(6, 6), nn.Linear(6, 2)\nmodel = ",
)
META = (
    training(MLP, before="import jupyter_torchdist as td")
    .replace("model = ", "with torch.device('meta'): model = ")
    .replace("losses = []", "torch.manual_seed(1)\nlosses = []")
)
GIVEN_BEFORE = "with torch.device('meta'): weight = torch.randn(2, 12)\n"


def three(lines: str) -> str:
    return THREE.replace("{lines}", lines.replace("\n", "\n        "))


def forward(lines: str, loss: str = "F.mse_loss(model(x), y)") -> str:
    return training("Net()", loss, before=three(lines))


STEPS = [
    # td.prepare
    Advice(
        "prepared_late",
        training(MLP, before="import jupyter_torchdist as td").replace(
            "    x, y", "    if step == 1: getattr(td, 'prepare')(model, optimizer)\n    x, y"
        ),
        *("ddp", "but the strategy has distributed", "call td.prepare before the first training step"),
        edits=(
            ("    if step == 1: getattr(td, 'prepare')(model, optimizer)\n", ""),
            ("losses = []", "losses = []\ntd.prepare(model, optimizer)"),
        ),
    ),
    Advice(
        "prepared_wrapped",
        BOTH.replace("losses = []", "model = nn.parallel.DistributedDataParallel(model)\nlosses = []"),
        *("ddp", "is distributed already", "leave it to --strategy"),
        edits=(("model = nn.parallel.DistributedDataParallel(model)\n", ""),),
    ),
    Advice(
        "prepared_dtensors",
        BOTH.replace(
            "losses = []",
            "from torch.distributed.tensor import DeviceMesh, distribute_tensor\nmodel[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, DeviceMesh('cpu', [0, 1])))\nlosses = []",
        ),
        *("tp", "some of its parameters are DTensors", "leave it to --strategy"),
        option=("tp_plan=0:colwise,2:rowwise",),
        given={"option": ("tp_plan=0:colwise,2:rowwise",)},
        edits=(
            ("from torch.distributed.tensor import DeviceMesh, distribute_tensor\n", ""),
            (
                "model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, DeviceMesh('cpu', [0, 1])))\n",
                "",
            ),
        ),
    ),
    *[
        Advice(
            *(name, READ.replace("GIVEN", given), "ddp", words, told),
            edits=(("manual_seed(td.rank)", "manual_seed(0)"),),
        )
        for name, given, words, told in (
            ("prepared_streams", "Stream()", "the ranks read different streams", "give every rank the same samples"),
            (
                "prepared_samplers",
                "data, sampler=Own()",
                "samplers drew different batches",
                "the same seed on all ranks",
            ),
        )
    ],
    # values that are missing
    Advice(
        *("no_values_anywhere", META, "ddp", "have no values (", "build the model within `with td.meta():`"),
        edits=(("with torch.device('meta'): ", "with td.meta(): "),),
    ),
    Advice(
        "meta_before",
        META.replace("with torch.device('meta'): ", "with td.meta(): ").replace(
            "torch.manual_seed(1)",
            f"{GIVEN_BEFORE}torch.manual_seed(2)\nwith td.meta(): model[4].weight = nn.Parameter(weight * 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ntorch.manual_seed(1)",
        ),
        *("fsdp", "was on the meta device before `with td.meta():` began", "build all of the model within it"),
        edits=((GIVEN_BEFORE, ""), ("nn.Parameter(weight * 1)", "nn.Parameter(torch.randn(2, 12) * 1)")),
    ),
    # loops and losses
    Advice(
        *("other_form", LOADED, "ddp", "the loss of this loop is computed in another way", "-O batch=whole"),
        option=("batch=whole",),
    ),
    Advice(
        *("other_loss", forward(CHANGED_LOSS, "model(x, y, step)"), "ddp", "the loss was a cross entropy"),
        told="-O model=whole",
        option=("model=whole",),
    ),
    Advice(
        *("pp_other_loss", forward(CHANGED_LOSS, "model(x, y, step)"), "pp", "the loss was a cross entropy"),
        told="compute the same loss in all steps",
        edits=(("if more[1] < 2", "if True"),),
    ),
    Advice(
        *("kept_late", cell("features_on_request"), "ddp", "and did not in its first steps", "-O model=whole"),
        option=("model=whole",),
    ),
    Advice(
        *("nonfinite", training(MLP, "(model(x).square().mean() * (1 - 2 * (step == 2))).sqrt()"), "ddp"),
        *("as -O nonfinite=stop asks", "look at those samples"),
        given={"option": ("nonfinite=stop",)},
        option=("nonfinite=stop",),
        edits=((" * (1 - 2 * (step == 2))", ""),),
    ),
    Advice(
        *("verified_otherwise", cell("batch_centering"), "ddp", "is not the step of one device", "-O trust_model"),
        given={"verify": 2, "option": ("trust_model=1",)},
        instead={"verify": 2, "option": ("model=whole",)},
    ),
    # forwards that change parameters
    *[
        Advice(
            *(
                f"rewritten_{name}",
                training("nn.Sequential(*[Block() for _ in range(3)], nn.Linear(6, 2))", before=SLOW),
            ),
            *(strategy, "changes its parameter", told, then),
            given=given,
        )
        for name, strategy, told, then, given in (
            ("in_stages", "pp", "--strategy ddp or fsdp", "ddp", {}),
            ("accumulated", "ddp", "leave --grad-accumulation out", "", {"grad_accumulation": 2}),
            ("again", "ddp", "leave --activation-checkpointing out", "", {"activation_checkpointing": True}),
        )
    ],
    Advice(
        "late_shape",
        training(
            "Net()",
            before=three(
                f"if self.first.weight.shape[1] == 1: self.first.weight.data = torch.ones(12, 6) / 8\nx = {HIDDEN}\n{LAST}"
            ).replace("nn.Linear(6, 12)", "nn.Linear(1, 12)"),
        ),
        *("fsdp", "gives a sharded parameter of shape", "--strategy ddp", "ddp"),
    ),
    *[
        Advice(
            name, training(MLP, then=CURVED), "fsdp", "the gradients in .grad have no graph", told, then, edits=edits
        )
        for name, told, then, edits in (
            ("create_graph", "take them by torch.autograd.grad(loss", "", ((CURVED, CURVED_BY_GRAD),)),
            ("create_graph_ddp", "--strategy ddp", "ddp", ()),
        )
    ],
    # tp
    *[
        Advice(
            *(name, training("Net()", before=BLOCKS, x=TOKENS, then=GRADIENTS), "tp"),
            *("torch.autograd.grad of parameters that the strategy has sharded", told, then),
            edits=edits,
        )
        for name, told, then, edits in (
            ("autograd_grad", "--strategy ddp", "ddp", ()),
            (
                *("autograd_grad_backward", "or backward()", ""),
                (
                    (
                        GRADIENTS,
                        "optimizer.zero_grad()\nF.mse_loss(model(x), y).backward()\nslopes = [one.grad for one in model.parameters()]",
                    ),
                ),
            ),
        )
    ],
    Advice(
        "tp_way",
        training(
            "Net()",
            before=blocks(("torch.relu(self.up(x))", "torch.relu(self.up(x)).unfold(-1, 4, 4).flatten(-2)")),
            x=TOKENS,
        ),
        *("tp", "that cannot be computed on its parts", "leave that layer whole"),
        option=(ATTENTION,),
    ),
    Advice(
        *("tp_aside", training("Net()", ASIDE, before=BLOCKS, x=TOKENS), "fsdp+tp", "that tp split and fsdp sharded"),
        *("--strategy ddp", "ddp"),
        given={"option": ("tp=2", MIDDLE)},
        ranks=4,
    ),
    # cp
    Advice(
        "cp_kept",
        training(
            "Net()",
            before=BLOCKS,
            x=TOKENS,
            then="kept = []\nmodel.layers[0].register_forward_hook(lambda m, a, out: kept.append(out))\nwith torch.no_grad(): model(x)",
        ),
        *("cp", "keeps something in", "--strategy fsdp", "fsdp"),
    ),
    Advice(
        "cp_other_keys",
        training(
            *("Net()", "F.mse_loss(model(x, step > 1), y)"),
            before=blocks(
                ("self.k, self.v))", "self.k, self.v))\n        if more: k, v = k[:, :, :2], v[:, :, :2]"),
                ("def forward(self, x):", "def forward(self, x, more):"),
                ("self.norm(x))", "self.norm(x), more)"),
                ("layer(x)", "layer(x, more)"),
            ),
            x=TOKENS,
        ),
        *("cp", "cannot divide attention to another sequence", "--strategy fsdp", "fsdp"),
    ),
    Advice(
        "cp_no_tensor",
        training(
            "Net()",
            before=blocks(
                ("x = layer(x)", "layer.given = x\n            x = layer()"),
                (
                    "def forward(self, x):\n        x = x + self",
                    "def forward(self):\n        x = self.given\n        x = x + self",
                ),
            ),
            x=TOKENS,
        ),
        *("cp", "is called without a tensor", "pass the hidden states first"),
        edits=(
            ("layer.given = x\n            x = layer()", "x = layer(x)"),
            ("def forward(self):\n        x = self.given\n", "def forward(self, x):\n"),
        ),
    ),
    Advice(
        "cp_whole_only",
        training("Net()", before=blocks(("self.up(x)", "self.up(x.unflatten(1, (2, 3)).flatten(1, 2))")), x=TOKENS),
        *("cp", "cannot be computed once", "--strategy fsdp", "fsdp"),
    ),
    # pp
    Advice(
        "pp_other_operations",
        forward(f"x = {HIDDEN}\nif LATE: x = x * 2 + 1\n{LAST}")
        .replace("losses = []", "losses, LATE = [], False")
        .replace("    x, y", "    LATE = step > 1\n    x, y"),
        *("pp", "other operations than in its trial", "--strategy ddp or fsdp", "ddp"),
    ),
    *[
        Advice(
            *(f"{strategy}_input", forward(f"x.mul_(2)\nx = {HIDDEN}\n{LAST}", "F.mse_loss(model(x), y) * x.mean()")),
            *(strategy, "the model's forward writes into one of its inputs", "write into a copy"),
            edits=(("x.mul_(2)", "x = x.mul(2)"),),
        )
        for strategy in ("ddp", "pp")
    ],
    Advice(
        "pp_of_all_stages",
        forward(f"n = torch.zeros(12)\nx = self.first(x)\nn.add_(x.detach().abs().mean())\n{LAST} * n[:2]"),
        *("pp", "writes into a tensor that all stages have", "x = x * 2 instead of x *= 2"),
        edits=(("n.add_(x.detach().abs().mean())", "n = n + x.detach().abs().mean()"),),
        given={"option": ("microbatches=1",)},
        option=("microbatches=1",),
    ),
    Advice(
        *("pp_in_place", forward("x = self.first(x)\nF.relu_(x)\nx = self.middle(x)\nF.relu_(x)\nreturn self.last(x)")),
        *("pp", "that was not sent to it", "write x = x + y"),
        edits=(("        F.relu_(x)", "        x = F.relu(x)"),),
    ),
    Advice(
        "pp_view_changed",
        forward(
            f"n = (self.first(x) > 0).float()\nv = n[:, :2]\nx = {HIDDEN}\nx = self.middle(x)\nn.mul_(x.detach())\nreturn self.last(x) + v"
        ),
        *("pp", "a pipeline cannot follow changes in place", "--strategy ddp or fsdp", "ddp"),
    ),
    Advice(
        "pp_block_in_place",
        training(
            "nn.Sequential(*[Block() for _ in range(4)], nn.Linear(6, 2))",
            before="class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(6, 6)\n    def forward(self, x):\n        x += torch.tanh(self.layer(x))\n        return x",
        ).replace("model(x)", "model(x + 0)"),
        *("pp", "a pipeline cannot follow changes in place", "write x = x + y"),
        edits=(("x += torch", "x = x + torch"),),
    ),
    Advice(
        *("pp_forces", forward(FORCES), "pp", "where its layers are run one by one", "--strategy ddp or fsdp", "ddp")
    ),
    Advice(
        "pp_total",
        training(MLP, then="total = sum(one.sum() for one in model.parameters())\nread = getattr(total, 'item')()"),
        *("pp", "the cell reads a number from parameters of other", "--strategy ddp or fsdp", "ddp"),
    ),
    *[
        Advice(
            *(
                f"pp_{name}",
                STAGES.replace("import torch\n", "import torch\nimport jupyter_torchdist as td\n", 1),
                "pp",
            ),
            *("stages, there are", told),
            given={"option": ("schedule=zbv", "microbatches=4", "balance=manual")},
            option=("schedule=zbv", "microbatches=4", *option),
            edits=edits,
        )
        for name, told, option, edits in (
            ("marks", "leave -O balance out", (), ()),
            (
                *("marks_for_all", "give as many stages by", ("balance=manual",)),
                (
                    (
                        "with td.stage(0): first, second = nn.Linear(6, 6), nn.Linear(6, 6)\nwith td.stage(1): third, last = nn.Linear(6, 6), nn.Linear(6, 2)",
                        "with td.stage(0): first = nn.Linear(6, 6)\nwith td.stage(1): second = nn.Linear(6, 6)\nwith td.stage(2): third = nn.Linear(6, 6)\nwith td.stage(3): last = nn.Linear(6, 2)",
                    ),
                ),
            ),
        )
    ],
    *[
        Advice(
            *(f"pp_{name}", training(FIVE).replace("randn(8,", "randn(2,"), "pp", "microbatches on", told),
            given={"option": ("schedule=dualpipev", "microbatches=4")},
            option=option,
            edits=edits,
        )
        for name, told, option, edits in (
            ("few_samples", "or -O schedule=gpipe", ("schedule=gpipe",), ()),
            (
                *("more_samples", "batches of at least as many samples", ("schedule=dualpipev", "microbatches=4")),
                (("randn(2,", "randn(8,"),),
            ),
        )
    ],
    # precision
    *[
        Advice(
            *(name, training("Net()", before=net(LU)), "ddp", "an operation of the model has no", told),
            given={"precision": "bf16", "option": ("model=whole",)},
            instead=instead,
            edits=edits,
            tolerance=3e-2,
        )
        for name, told, instead, edits in (
            (
                *("bf16_operation", "compute it on .float()", {"precision": "bf16", "option": ("model=whole",)}),
                ((LU, LU_IN_FULL),),
            ),
            ("bf16_left_out", "leave --precision out", {"option": ("model=whole",)}, ()),
        )
    ],
]
