"""A cell's rehearsal without a job, a small transformer to rehearse, and what its ranks allocate."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from jupyter_torchdist.capture import capture_cell
from jupyter_torchdist.client.rehearse import Rehearsing, rehearsing
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.spec import JobSpec, Options

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + self.down(F.gelu(self.up(x)))

class GPT(nn.Module):
    def __init__(self, width=128, layers=4, words=500):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""

LOOP = """
model = GPT(WIDTH, LAYERS)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randint(0, 500, (64, LENGTH)))
for step, (words,) in zip(range(3), DataLoader(data, 16, shuffle=True)):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    print(loss.item())
    optimizer.step()
"""


def gpt(width: int = 128, layers: int = 4, length: int = 65) -> str:
    """A cell that trains it."""
    return MODEL + LOOP.replace("WIDTH", str(width)).replace("LAYERS", str(layers)).replace("LENGTH", str(length))


MEASURED = """
import os, sys, time

Work = sys.modules["torch.distributed"].Work
functional = sys.modules["torch.distributed._functional_collectives"]

def gloo_runs():
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{{thread}}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(") ")
        except OSError:  # it has ended
            continue
        if name.startswith("pt_gloo_run") and rest.startswith("R"):
            return True
    return False

def then_gloo_rests(wait):
    def waiting(*arguments):
        found = wait(*arguments)
        while gloo_runs():
            time.sleep(0)
        return found
    return waiting

Work.wait, functional.wait_tensor = then_gloo_rests(Work.wait), then_gloo_rests(functional.wait_tensor)
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
stepped = []
sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(lambda *_: stepped.append(time.time_ns()))
profiler.start()
{loop}
profiler.stop()
found, events = [], list(profiler.profiler.kineto_results.experimental_event_tree())
while events:
    event = events.pop()
    events += event.children
    if event.tag == torch._C._profiler._EventType.Allocation:
        found.append((event.start_time_ns, event.extra_fields.alloc_size))
now = 0
peak = {{"first": 0, "later": 0}}
for when, size in sorted(found):
    now += size
    step = "later" if when > stepped[0] else "first"
    peak[step] = max(peak[step], now)
peaks = [None] * int(os.environ["WORLD_SIZE"])
sys.modules["torch.distributed"].all_gather_object(peaks, peak)
del profiler, events, event, found
"""
"""The allocator's own account: torch's profiler is told by it of every block, workspaces of kernels too.

It is not told of what Gloo's threads let go of, as they do where they are slower than the thread that waited for them:
here that one holds what was sent until they rest.
"""


class Cell:
    """``with Cell(source, root) as rehearse: rehearse(strategy)``."""

    def __init__(self, source: str, root: Path, names: dict[str, Any] | None = None, *, gpus: bool = False) -> None:
        self._spec = JobSpec("job-1", "cell", source, "Cell In[1]", 1, Options(), 0.0)
        self._capture = capture_cell(source, "Cell In[1]", 1, names or {}, cwd=root)
        self._root, self._gpus = root, gpus
        self._stack = ExitStack()

    def __enter__(self) -> Rehearsing:
        home = Home(self._root / "home")
        return self._stack.enter_context(rehearsing(self._spec, self._capture, self._root, home, gpus=self._gpus))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
