"""Private names of torch stand in one file, and are there in the release that is installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import jupyter_torchdist
from jupyter_torchdist.torch_private import collectives, places, tensors
from jupyter_torchdist.torch_private.places import _PLACES

PACKAGE = Path(jupyter_torchdist.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "torch_private"]


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def dotted(node: ast.expr) -> tuple[str, ...]:
    """``a.b.c`` as its names; empty for what is none."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return (*before, node.attr)
    return ()


def names_of_torch(tree: ast.Module) -> Iterator[str]:
    """What a file imports of torch, and asks of what it imported, by their whole names."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.partition(".")[0] == "torch":
                    known[one.asname or "torch"] = one.name if one.asname else "torch"
                    yield one.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch" and not node.level:
            for one in node.names:
                known[one.asname or one.name] = f"{node.module}.{one.name}"
                yield f"{node.module}.{one.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (parts := dotted(node)) and parts[0] in known:
            yield ".".join((known[parts[0]], *parts[1:]))
        elif isinstance(node, ast.Call):  # patches.around(torch.nn, "_name", …)
            for place, name in zip(node.args, node.args[1:], strict=False):
                if (
                    (parts := dotted(place))
                    and parts[0] in known
                    and isinstance(name, ast.Constant)
                    and isinstance(name.value, str)
                ):
                    yield ".".join((known[parts[0]], *parts[1:], name.value))


def exists(name: str) -> bool:
    """Whether torch has it: modules are imported, attributes looked up."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nobody_else_touches_a_private_name(path: Path) -> None:
    private = sorted({name for name in names_of_torch(ast.parse(path.read_text())) if is_private(name)})
    assert not private, f"through torch_private/ alone: {private}"


def test_the_rule_finds_what_it_forbids() -> None:
    found = set(
        names_of_torch(
            ast.parse(
                "import torch\nfrom torch.utils import _pytree as t\nt.tree_map\ntorch._C.x\nfrom torch import nn\n"
                "around(nn.Module, '_load', 1)"
            )
        )
    )
    assert {name for name in found if is_private(name)} == {
        "torch.utils._pytree", "torch.utils._pytree.tree_map", "torch._C.x", "torch._C", "torch.nn.Module._load",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(_PLACES))
def test_a_private_name_is_where_it_is_said_to_be(name: str) -> None:
    assert getattr(places, name) is not None


def test_another_name_is_none() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        places.nothing


ONLY_WHERE_ASKED = {"torch.numa.binding.AffinityMode", "torch.numa.binding.NumaOptions"}
"""Not in 2.8; ``releases.check_plan`` refuses what needs them."""
GIVEN = {"torch.nn.Module.__deepcopy__"}
"""In no release: a strategy gives it."""


def test_public_names_are_in_this_release() -> None:
    """Run with the oldest and the newest release, it shows what is missing there (``make test-torch``)."""
    asked = {name for path in FILES for name in names_of_torch(ast.parse(path.read_text())) if not is_private(name)}
    missing = sorted(name for name in asked - ONLY_WHERE_ASKED - GIVEN if not exists(name))
    assert not missing


def test_what_older_releases_lack() -> None:
    tensor = torch.ones(2, 3)
    assert tensors.is_dense(tensor.t()) and not tensors.is_dense(tensor[:, :2])
    assert all(
        tensors.is_pointwise(operation)
        for operation in (torch.ops.aten.leaky_relu.default, torch.ops.aten.elu_.default, torch.ops.aten.add_.Tensor)
    )
    assert not tensors.is_pointwise(torch.ops.aten.sum.default)
    module, name = collectives.gathering()
    assert callable(getattr(module, name))
