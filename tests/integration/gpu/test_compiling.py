"""``torch.compile`` in a rank: by Triton on a GPU, without a compiler of C on a CPU."""

from __future__ import annotations

from tests.places import Place

COMPILED = """
import torch
import jupyter_torchdist as td

f = torch.compile(lambda x: (x @ x).relu() * 2 + 1, backend="BACKEND")
x = torch.full((32, 32), 0.5, device=td.device)
same, where = torch.allclose(f(x), (x @ x).relu() * 2 + 1), x.device.type
"""


def test_a_compiled_function(one: Place) -> None:
    names = one.run(COMPILED.replace("BACKEND", "inductor" if one.on_gpu else "aot_eager")).names
    assert names["same"] is True and names["where"] == one.kind
