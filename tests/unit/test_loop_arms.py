"""What of a loop has not run in two steps, and may use the batch: whole batches are kept for each, and for no other."""

from __future__ import annotations

import linecache
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from jupyter_torchdist.strategies.loop.line_tracer import LinesRun
from jupyter_torchdist.strategies.loop.unexecuted import unseen_use

WATCH = """
import sys

class Loader:
    def __init__(self):
        self.found = []

    def __iter__(self):
        return self._batches(sys._getframe(1))

    def _batches(self, frame):
        run = LinesRun(frame)
        for step in range(2):
            batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
            assert run.start()
            try:
                yield batch
            finally:
                run.stop()
        self.found.append(unseen_use(run, frame))
"""
"""A loader, in a file that is none of the user's: each loop over it is two steps long."""

START = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

m, loader_of = nn.Linear(3, 2), None
o = torch.optim.SGD(m.parameters(), 0.1)
h, cache, last, accum, clip, max_steps, aux, total = [], {}, [], 4, None, 100, None, 0.0
device, scheduler = torch.device("cpu"), torch.optim.lr_scheduler.StepLR(o, 5)
"""
HEAD = "for k, (x, y) in enumerate(loader, 1):\n"
STEP = "    out = m(x); l = cross_entropy(out, y); o.zero_grad(); l.backward(); o.step()\n"


@pytest.fixture(autouse=True)
def _no_tracing() -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)


def verdict(text: str) -> str | None:
    loader: dict[str, Any] = {"LinesRun": LinesRun, "unseen_use": unseen_use, "torch": torch}
    exec(compile(WATCH, "<frozen watch>", "exec"), loader)
    names: dict[str, Any] = {"loader": (watched := loader["Loader"]()), "nn": nn}
    source = START + textwrap.dedent(text)
    linecache.cache["Cell In[9]"] = (len(source), None, source.splitlines(keepends=True), "Cell In[9]")
    exec(compile(source, "Cell In[9]", "exec"), names)
    assert len(watched.found) == 1
    found: str | None = watched.found[0]
    return found


READ = "h.append((out.argmax(1) == y).sum().item())"

LOOPS = {
    "two lines": f"    if k % 3 == 0:\n        {READ}\n",
    "one line": f"    if k % 3 == 0: {READ}\n",
    "test of two lines": f"    if (k > 0 and\n            k % 3 == 0): {READ}\n",
    "elif": f"    if k < 3:\n        pass\n    elif k % 3 == 0: {READ}\n",
    "else": f"    if k < 3: pass\n    else: {READ}\n",
    "print": "    if k % 3 == 0: print(k, len(x))\n",
    "while": f"    while k % 3 == 0 and not h: {READ}\n",
    "for": f"    for _ in range(k // 3): {READ}\n",
    "except": f"    try: 1 / (k % 3)\n    except ZeroDivisionError: {READ}\n",
    "arm": "    h.append((out.argmax(1) == y).sum() if k % 3 == 0 else 0)\n",
    "arm that keeps": "    h.append(y if k % 3 == 0 else None)\n",
    "and": f"    k % 3 == 0 and {READ}\n",
    "or": f"    k % 3 or {READ}\n",
    "test": "    if k % 3 == 0 and out.sum() > 0: pass\n",
    "comparison": "    h.append(2 < k < out.sum())\n",
    "comprehension": "    h.extend([len(y) for _ in range(1) if k % 3 == 0])\n",
    "generator": "    h.extend(y.sum().item() for _ in range(1) if k % 3 == 0)\n",
    "generator over none": "    h.extend(y.sum().item() for _ in range(k % 3 == 0))\n",
    "lambda": "    f = lambda: h.append(len(x))\n    if k % 3 == 0: f()\n",
    "match": f"    match k % 3:\n        case 0:\n            {READ}\n        case _: pass\n",
    "match in a line": f"    match k % 3:\n        case 0: {READ}\n",
    "guard": "    match k:\n        case 7: pass\n        case 3 if len(x) > 2: pass\n",
    "kept by update": "    cache.update(y=y)\n    if k % 3 == 0: h.append(cache['y'].sum())\n",
    "kept by append": "    last.append(y)\n    if k % 3 == 0: h.append(last[-1].sum())\n    last.clear()\n",
    "kept by an index": "    cache['y'] = y\n    if k % 3 == 0: h.append(cache['y'].sum())\n",
    "kept at a place of the batch": "    t = torch.zeros(3); t[y] += 1\n    if k % 3 == 0: h.append(t)\n",
    "kept by a tensor's method": "    t = torch.zeros(3); t.index_fill_(0, y, 1)\n    if k % 3 == 0: h.append(t)\n",
    "an error that it catches": "    try: h.append(x[3].sum())\n    except IndexError: total += 1\n    h.clear()\n",
    "kept by setattr": "    setattr(m, 'y', y)\n    if k % 3 == 0: h.append(m.y.sum())\n",
    "bound in a with": "    with torch.no_grad(): z = out\n    if k > 3: h.append(z)\n",
    "another loss": "    z = out.square().mean()\n    if k % 3 == 0:\n        z.backward()\n",
    "the loss bound again": "    l = out.sum()\n    if k % 3 == 0: h.append(l.item())\n",
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_seen_in_the_loop(name: str) -> None:
    assert (verdict(HEAD + STEP + LOOPS[name]) or "").startswith("line "), LOOPS[name]


PLAIN = {
    "nothing more": "",
    "the loss, of two lines": "    if k % 100 == 0:\n        print(k, l.item())\n",
    "the loss, of one": "    if k % 100 == 0: print(k, l.item())\n",
    "the loss, as an arm": "    h.append(l.item() if k % 3 == 0 else 0)\n",
    "a running sum": "    total += l.item()\n    if k % 100 == 0: print(total / k)\n",
    "accumulation": "    if (k + 1) % 4 == 0:\n        o.step()\n        o.zero_grad()\n",
    "accumulation in a line": "    if (k + 1) % 4 == 0: o.step(); o.zero_grad()\n",
    "a scheduler": "    if scheduler is not None:\n        scheduler.step()\n",
    "a scheduler as an arm": "    scheduler.step() if k > 5 else None\n",
    "clipping": "    if clip is not None: nn.utils.clip_grad_norm_(m.parameters(), clip)\n",
    "max_steps": "    if k >= max_steps: break\n",
    "a refusal": "    if k > 5: raise ValueError(x.shape)\n",
    "an interrupt that it catches": "    try: y = y.to(device)\n    except KeyboardInterrupt: break\n",
    "a function that writes to its argument": "    torch.relu_(x)\n    if k > 5: torch.cuda.is_available()\n",
    "deletion": "    if k > 5: del x, y\n",
    "saving": "    if k % 50 == 0: torch.save(m.state_dict(), 'there')\n",
}


def test_one_of_two_backwards_speaks_for_both() -> None:
    scaled = "    if k > 1000:\n        scheduler.scale(l).backward()\n    else:\n        l.backward()\n"
    begin = "    out = m(x); l = cross_entropy(out, y); o.zero_grad()\n"
    assert verdict(HEAD + begin + scaled + "    o.step()\n") is None


@pytest.mark.parametrize("name", PLAIN)
def test_plain_loops_stay_divided(name: str) -> None:
    assert verdict(HEAD + "    x, y = x.to(device), y.to(device)\n" + STEP + PLAIN[name]) is None


@pytest.mark.parametrize(
    "line",
    [
        "x = x.cuda() if k > 5 else x",
        "y = y.long() if k > 5 else y.to(device)",
        "b = {n: v.to(device) for n, v in {'x': x, 'y': y}.items() if n != 'z'}",
    ],
)
def test_moves_of_all_samples_are_no_use(line: str) -> None:
    assert verdict(HEAD + f"    {line}\n" + STEP) is None


def test_before_backward_a_loss_is_a_part() -> None:
    early = "    out = m(x)\n    l = cross_entropy(out, y)\n    {}\n    o.zero_grad(); l.backward(); o.step()\n"
    assert verdict(HEAD + early.format("if k > 5: h.append(l.item())"))
    assert verdict(HEAD + early.format("if k > 5: l = l + (out * 2).sum()"))
    assert verdict(HEAD + early.format("if k > 5: l = l / accum")) is None
    assert verdict(HEAD + early.format("if aux: l = l + 0.1 * sum(p.norm() for p in m.parameters())")) is None


BELOW = {
    "a function": (f"def log(k, out, y):\n    if k % 3 == 0: {READ}\n", "log(k, out, y)"),
    "one that keeps": ("def log(k, out, y):\n    if k % 3 == 0: h.append(out)\n", "log(k, out, y)"),
    "one that returns": ("def log(k, out):\n    if k % 3 == 0: return out\n", "h.append(log(k, out))"),
    "nested": (f"def keep(out, y): {READ}\ndef log(k, a, b):\n    if k % 3 == 0: keep(a, b)\n", "log(k, out, y)"),
    "of globals": ("def log():\n    h.append(out.sum())\n", "log() if k > 5 else None"),
    "a lambda": (f"log = lambda k, out, y: {READ} if k % 3 == 0 else None\n", "log(k, out, y)"),
    "a table": (f"t = [lambda out, y: None, lambda out, y: None, lambda out, y: {READ}]\n", "t[k - 1](out, y)"),
    "a table of functions": (
        f"def f(out, y): pass\ndef g(out, y): {READ}\nt = {{1: f, 2: f, 3: g}}\n", "t[k](out, y)",
    ),
    "a variable": (
        f"def f(out, y): pass\ndef g(out, y): {READ}\nt = {{1: f, 2: f, 3: g}}\n", "run = t[k]; run(out, y)",
    ),
    "a method": (
        """
class C:
    def show(self): h.append(self.y.sum())
    def after(self, k, y):
        self.y = y
        if k % 3 == 0: self.show()
c = C()
""",
        "c.after(k, y)",
    ),
    "a method by its name": (
        """
class C:
    def show(self): h.append(self.y.sum())
    def quiet(self): pass
    def __call__(self, name): getattr(self, name)()
c = C()
""",
        "c.y = y; c('show' if k % 3 == 0 else 'quiet')",
    ),
    "another class": (
        "class A:\n    def on(self, y): pass\nclass B:\n    def on(self, y): h.append(y.sum())\nc = [A(), A(), B()]\n",
        "c[k - 1].on(y)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BELOW)
def test_seen_in_what_the_loop_calls(name: str) -> None:
    defined, call = BELOW[name]
    assert (verdict(defined + HEAD + STEP + f"    {call}\n") or "").startswith("line ")


QUIET = {
    "a rate": ("def rate(k):\n    if k < 5: return 0.1\n    return 0.9 ** k\n", "o.param_groups[0]['lr'] = rate(k)"),
    "a log of the loss": ("def log(k, v):\n    if k > 5: h.append(v)\n", "log(k, l.item())"),
    "an evaluation": (
        """
def evaluate(m, d):
    right = 0
    for x, y in d:
        out = m(x)
        right += (out.argmax(1) == y).sum().item()
    return right / len(d)
""",
        "h.append(evaluate(m, [])) if k > 5 else None",
    ),
    "saving": ("def save(m, k):\n    print('saved', k)\n", "if k > 5: save(m, k)"),
    "a schedule elsewhere": ("s = torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.9 ** k)\n", "if k > 5: s.step()"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_quiet_functions_leave_a_loop_divided(name: str) -> None:
    defined, call = QUIET[name]
    assert verdict(defined + HEAD + STEP + f"    {call}\n") is None


def test_training_steps_leave_a_loop_divided() -> None:
    step = (
        "def train(m, x, y):\n    l = cross_entropy(m(x), y)\n    o.zero_grad(); l.backward(); o.step()\n    return l\n"
    )
    assert verdict(step + HEAD + "    l = train(m, x, y)\n    if k > 5: print(k, l.item())\n") is None
    given = "def train(m, x, y):\n    out = m(x); cross_entropy(out, y).backward()\n    return out\n"
    assert verdict(given + HEAD + "    l = train(m, x, y)\n    if k > 5: print(k, l.sum())\n")


def test_what_a_loop_gives_to_another_is_not_followed() -> None:
    fit = (
        "def fit():\n    for k, (x, y) in enumerate(loader):\n" + textwrap.indent(STEP, "    ") + "        yield k, y\n"
    )
    assert verdict(fit + "for k, y in fit(): pass\n") == "line 13 gives the batch to another loop"


def within(line: str) -> str:
    return "def run():\n    for b in loader:\n        " + line + "; cross_entropy(m(b[0]), b[1]).backward()\n"


def test_what_is_left_by_a_function() -> None:
    assert "outside of the loop" in str(verdict(within("last[:] = [b]") + "run()\nh.append(last[0])\n"))
    assert "keeps the batch in last" in str(
        verdict(within("last[:] = [b]").replace("run()", "run(last)") + "run(last)\n")
    )
    assert verdict(within("z = b") + "run()\nh.append(len(last))\n") is None


def test_after_the_loop_and_in_the_next_round_of_one_around() -> None:
    around = "for e in range(1):\n    {}\n" + textwrap.indent(HEAD + STEP, "    ")
    assert "after the loop, uses" in str(verdict(around.format("if e: h.append(len(x))")))
    assert verdict(around.format("m.train()")) is None
    assert "after the loop, uses out" in str(verdict("def f(): h.append(out)\n" + HEAD + STEP + "f()\n"))
    assert verdict(around.format("x = None") + "h.append(l.item())\n") is None
