"""Sequence parallelism with tensor parallelism: between the split layers each rank keeps only its tokens.

Norms, dropout and residual sums work on a rank's part of the sequence, so their activations take ``1/tp`` of the
memory (Korthikanti et al., https://arxiv.org/abs/2205.05198). The split layers get the whole sequence.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...protocol.errors import StrategyError
from ...protocol.options.strategy import chosen
from ..core import blocks
from ..core.context import ParallelContext
from .sequences import Tokens, around_forward, average_after_backward, hidden_in
from .tensor_plan import Styles


def check(model: nn.Module, styles: Styles, context: ParallelContext) -> None:
    """Raise ``StrategyError`` if the split layers are not in separate modules within repeated blocks."""
    found = blocks.repeated(model)
    if not found:
        raise StrategyError(
            f"sequence_parallel divides what is between the layers of repeated blocks; {type(model).__name__} has none",
            "leave sequence_parallel out",
        )
    names = {module: name for name, module in model.named_modules()}
    for block in found:
        inner = _split_parts(block, names, styles)
        if not inner or block in inner:
            raise StrategyError(
                f"sequence_parallel needs separate modules for attention and MLP; the split layers of "
                f"{names[block]} ({type(block).__name__}) are in the block itself, which reads the whole sequence",
                "move them into separate modules, or leave sequence_parallel out",
            )


def apply(model: nn.Module, styles: Styles, context: ParallelContext) -> None:
    """Divide the sequence between the split layers of ``model``, and within layers of style ``sequence``."""
    group = context.mesh["tp"].get_group()
    alone = [model.get_submodule(name) for name, style in styles.items() if style == "sequence"]
    if not alone and not chosen(context.plan, "sequence_parallel"):
        return
    for module in alone:
        divide_around([module], Tokens(group, "sequence"))
    if chosen(context.plan, "sequence_parallel"):
        names = {module: name for name, module in model.named_modules()}
        found = blocks.repeated(model)
        tokens = Tokens(group, "sequence_parallel")
        for block in found:
            for part in _split_parts(block, names, styles):
                _whole_within(part, tokens)
        divide_around(found, tokens)
    split = {f"{name}.{own}" for name, style in styles.items() if style not in ("sequence", "replicate")
             for own, _ in model.get_submodule(name).named_parameters()}  # fmt: skip
    average_after_backward(model, group, split)


def divide_around(parts: list[nn.Module], tokens: Tokens) -> None:
    """Cut the sequence where it enters the first module and join it where it leaves the last."""

    def enter(original: Any, *args: Any, **kwargs: Any) -> Any:
        tokens.begins(hidden_in(args, kwargs, parts[0]))
        args, kwargs = tokens.cut((args, kwargs))
        return original(*args, **kwargs)

    def leave(original: Any, *args: Any, **kwargs: Any) -> Any:
        return tokens.join(original(*args, **kwargs))

    around_forward(parts[-1], leave)
    around_forward(parts[0], enter)


def _whole_within(part: nn.Module, tokens: Tokens) -> None:
    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tokens.join((args, kwargs))
        return tokens.cut(original(*args, **kwargs))

    around_forward(part, forward)


def _split_parts(block: nn.Module, names: dict[nn.Module, str], styles: Styles) -> list[nn.Module]:
    """The innermost modules of a block that have a rowwise layer and a colwise layer."""
    prefix = f"{names[block]}."
    own = {name: style for name, style in styles.items() if name.startswith(prefix)}
    rows = [name for name, style in own.items() if style == "rowwise"]
    columns = [name for name, style in own.items() if style in ("colwise", "gathered")]
    by_name = {names[module]: module for module in block.modules()}
    found: dict[nn.Module, None] = {}
    for row in rows:
        above = [row.rsplit(".", number)[0] for number in range(1, row.count(".") + 1)]
        for one in above:
            if any(column.startswith(f"{one}.") for column in columns):
                found[by_name.get(one, block)] = None
                break
    return list(found)
