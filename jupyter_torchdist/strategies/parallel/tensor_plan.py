"""Which layers of a model are split over the ranks of ``tp``, and how: given by the user, or found by structure.

Styles (Megatron-LM, https://arxiv.org/abs/1909.08053): ``colwise`` splits a layer's outputs, ``rowwise`` its inputs;
a pair of them needs one all-reduce. ``gathered`` is ``colwise`` with gathered outputs, ``embedding`` splits a
vocabulary, ``sequence`` lets each rank compute its tokens, ``replicate`` keeps the layer whole. ``summed`` also keeps
it whole, but its input is only the rank's heads (norms of queries and keys in Transformers), so its gradients are
summed over the ranks.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ...protocol.errors import StrategyError
from ...protocol.options.strategy import chosen
from ..core import blocks
from ..core.context import ParallelContext

Styles = dict[str, str]
"""The style of each module, by its name."""

_QUERY = re.compile(r"(^|[._])(q|query|wq|to_q|q_lin|queries)(_proj|_linear|_layer)?$")
_FUSED = re.compile(r"(^|[._])(qkv|c_attn|in_proj|wqkv|query_key_value|qkv_proj|to_qkv|attn|attention)$", re.IGNORECASE)
_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "h")
_KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_kv_head")

_HUGGING_FACE = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "gathered",
    "colwise_gather_output": "gathered",
    "embedding_rowwise": "embedding",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "summed",
}


def styles_of(model: nn.Module, context: ParallelContext) -> Styles:
    """The style of every layer that is split. Raises ``StrategyError`` if there is no layer to split, or it cannot."""
    asked = chosen(context.plan, "tp_plan")
    if asked != "auto":
        found = matched(model, asked)
    else:
        own = _own_plan(model)
        found = matched(model, own) if own else found_by_structure(model)
    if not found:
        raise StrategyError(
            f"tp finds nothing to split in {type(model).__name__}: it has no plan of its own, and no attention or MLP "
            f"of linear layers is recognised in {_classes(model)}",
            _example(model, context.plan.degree("tp")),
        )
    _check_layers(model, found, context.plan.degree("tp"))
    return found


def matched(model: nn.Module, patterns: Mapping[str, str]) -> Styles:
    """The modules that each pattern matches; ``*`` matches within one part of a name. A later pattern overrides."""
    names = [name for name, _ in model.named_modules() if name]
    found: Styles = {}
    for pattern, style in patterns.items():
        expression = re.compile(".".join("[^.]*".join(map(re.escape, part.split("*"))) for part in pattern.split(".")))
        fitting = [name for name in names if expression.fullmatch(name)]
        if not fitting:
            near = _near(pattern, names)
            raise StrategyError(
                f"tp_plan: {pattern} matches no module of {type(model).__name__}",
                f"near it: {', '.join(near)}" if near else f"the modules are called {', '.join(names[:8])}, …",
            )
        found.update(dict.fromkeys(fitting, style))
    return found


def written_for_parts(model: nn.Module, context: ParallelContext) -> bool:
    """Whether the model's code works with a rank's heads only: models with their own plan (Transformers) do."""
    return chosen(context.plan, "tp_plan") == "auto" and bool(_own_plan(model))


def _near(pattern: str, names: Iterable[str]) -> list[str]:
    general = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)
    return difflib.get_close_matches(pattern, list(general), 3, 0.5)


def _own_plan(model: nn.Module) -> dict[str, str]:
    """A Transformers model's own plan, with our names of styles. Raises ``StrategyError`` for an unknown style."""
    plan: Any = getattr(model, "_tp_plan", None)
    names = [name for name, _ in model.named_modules()]
    styles: dict[str, str] = {}
    for pattern, style in (plan or {}).items():
        if not any(re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]*"), name) for name in names):
            continue  # plans name layers that some configurations leave out
        if style not in _HUGGING_FACE:
            raise StrategyError(
                f"the plan of {type(model).__name__} wants {pattern} to be {style!r}, which is not built here",
                f"give a plan of your own with -O tp_plan=…; styles here: {', '.join(dict.fromkeys(_HUGGING_FACE))}",
            )
        styles[pattern] = _HUGGING_FACE[style]
    return styles


def found_by_structure(model: nn.Module) -> Styles:
    """Styles for attention and MLP of the repeated blocks, the token embedding and the head."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise StrategyError(
                f"{name or type(model).__name__} is a torch.nn.MultiheadAttention, whose projections are one parameter "
                "that tp cannot split",
                "use projections of their own (q, k, v, out) and F.scaled_dot_product_attention, or fsdp",
            )
    names = {module: name for name, module in model.named_modules()}
    styles: Styles = {}
    for block in blocks.repeated(model) or [model]:
        linears = [module for module in block.modules() if type(module) is nn.Linear]
        for module, style in (_attention(linears, names) | _mlp(linears, names)).items():
            styles[names[module]] = style
    if styles:
        styles |= _vocabulary(model, names, styles)
    return styles


def _attention(linears: list[nn.Linear], names: Mapping[nn.Module, str]) -> dict[nn.Linear, str]:
    """Separate or fused projections of query, key and value, and the output projection."""
    for place, first in enumerate(linears):
        if _QUERY.search(names[first]) and len(linears) > place + 2:
            inner = linears[place : place + 3]
            width = first.out_features
        elif _FUSED.search(names[first]) and first.out_features == 3 * first.in_features:
            inner, width = [first], first.in_features
        else:
            continue
        if len({layer.in_features for layer in inner}) > 1:
            continue  # key and value of another width: attention to something else
        after = next((layer for layer in linears[place + len(inner) :] if layer.in_features == width), None)
        if after is None or after.out_features != first.in_features or _is_up(after, linears):
            return dict.fromkeys(inner, "gathered")
        return {**dict.fromkeys(inner, "colwise"), after: "rowwise"}
    return {}


def _is_up(layer: nn.Linear, linears: list[nn.Linear]) -> bool:
    return layer.out_features > layer.in_features and layer in _mlp_pairs(linears)


def _mlp(linears: list[nn.Linear], names: Mapping[nn.Module, str]) -> dict[nn.Linear, str]:
    attention = _attention(linears, names)
    return _mlp_pairs([layer for layer in linears if layer not in attention])


def _mlp_pairs(linears: list[nn.Linear]) -> dict[nn.Linear, str]:
    """One or two up projections and the down projection after them, between a width and a larger one."""
    styles: dict[nn.Linear, str] = {}
    for up, down in itertools.pairwise(linears):
        if up.out_features == down.in_features and up.in_features == down.out_features < up.out_features:
            styles |= {up: "colwise", down: "rowwise"}
            before = linears[: linears.index(up)][-1:]
            after = linears[linears.index(down) + 1 :][:1]
            for gate in (*before, *after):  # gate, up, down, or w1, w2, w3
                if (gate.in_features, gate.out_features) == (up.in_features, up.out_features) and gate not in styles:
                    styles[gate] = "colwise"
                    break
    return styles


def _vocabulary(model: nn.Module, names: Mapping[nn.Module, str], taken: Styles) -> Styles:
    """The head that returns a logit for each token, and the token embedding, tied or not."""
    styles: Styles = {}
    tables = [module for module in model.modules() if type(module) is nn.Embedding]
    for head in [module for module in model.modules() if type(module) is nn.Linear and names[module] not in taken]:
        for table in tables:
            if head.out_features == table.num_embeddings and head.in_features == table.embedding_dim:
                styles |= {names[head]: "gathered", names[table]: "embedding"}
    return styles


def _check_layers(model: nn.Module, styles: Styles, ranks: int) -> None:
    kinds = {"colwise": nn.Linear, "gathered": nn.Linear, "rowwise": nn.Linear, "embedding": nn.Embedding}
    for name, style in styles.items():
        module, kind = model.get_submodule(name), kinds.get(style, nn.Module)
        if style in ("colwise", "rowwise") and isinstance(module, nn.Embedding):
            kind = nn.Embedding
        if not isinstance(module, kind):
            raise StrategyError(
                f"tp_plan: {name} is a {type(module).__name__}; {style} splits a {kind.__name__}",
                "name the linear layers within it",
            )
        if style in ("colwise", "rowwise") and isinstance(module, nn.Linear):
            side = "out_features" if style == "colwise" else "in_features"
            if getattr(module, side) % ranks:
                raise StrategyError(
                    f"{name} has {getattr(module, side)} {side}, which {ranks} ranks of tp do not divide",
                    "choose -O tp=N that divides them, or leave it out of -O tp_plan",
                )
        if style == "colwise" and (_QUERY.search(name) or _FUSED.search(name)):
            _check_heads(model, name, ranks)


def _check_heads(model: nn.Module, name: str, ranks: int) -> None:
    """Check the numbers of heads in the attributes of the attention or of its ``config``."""
    owner = model.get_submodule(name.rpartition(".")[0])
    for source in (owner, getattr(owner, "config", None)):
        for attribute in (*_HEADS, *_KEY_HEADS):
            heads = getattr(source, attribute, None)
            if type(heads) is int and heads % ranks:
                raise StrategyError(
                    f"{name.rpartition('.')[0] or type(model).__name__} has {attribute}={heads}, which {ranks} ranks "
                    "of tp do not divide: a head is computed on one rank",
                    f"choose -O tp=N that divides {heads}, or leave the attention whole with -O tp_plan=…",
                )


def _example(model: nn.Module, ranks: int) -> str:
    """What to do in place of a plan that was not found, with the names of the model's own layers."""
    linears = [(name, one) for name, one in model.named_modules() if name and type(one) is nn.Linear]
    for (first, up), (second, down) in itertools.pairwise(linears):
        if up.out_features == down.in_features and up.out_features % ranks == 0:
            return f"name the layers: -O tp_plan={first}:colwise,{second}:rowwise; or use --strategy ddp or fsdp"
    return "use --strategy ddp or fsdp"


def _classes(model: nn.Module) -> str:
    return ", ".join(sorted({type(module).__name__ for module in model.modules()} - {"ModuleList", "ModuleDict"}))
