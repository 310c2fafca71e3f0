"""The options of strategies, ``-O key=value``: one row for each, used by the parser, the help, Tab and the ranks."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..columns import Layout, beside
from ..errors import OptionError
from ..strategy import DIMENSIONS, NAMES, StrategyPlan

SHARDED = ("fsdp", "hsdp")
TRAINED = ("ddp", "fsdp", "hsdp", "tp", "cp", "pp", "auto")
"""Strategies that this package implements itself."""

DIVIDED = (*TRAINED, "deepspeed")
"""Strategies under which the ranks compute parts of a batch."""

SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""In the order of accelerate's numbers 1 to 5 (``torch.distributed.fsdp.ShardingStrategy``)."""

Convert = Callable[[str], Any]
"""Converts a text to a value. Raises ``ValueError`` with what was expected."""


@dataclass(frozen=True)
class StrategyOption:
    """One row of the table."""

    name: str
    strategies: tuple[str, ...]
    """The option is valid if one of these is part of the chosen strategy."""
    metavar: str
    help: str
    convert: Convert
    default: Any = None
    choices: tuple[str, ...] = ()


def _truth(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("1 or 0")


def _count(text: str) -> int:
    if not re.fullmatch(r"\+?\d+", text) or int(text) < 1:
        raise ValueError("a whole number, at least 1")
    return int(text)


def _number(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) or float(text) <= 0:
        raise ValueError("a number above 0")
    return float(text)


def _large(text: str) -> int:
    """A large number as in Python, or with a unit: ``100_000_000``, ``1e8``, ``100M``."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d{1,2})?)([kMG]?)", text)
    value = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]] if match else 0.0
    if value < 1:
        raise ValueError("a whole number such as 100000000, 1e8 or 100M")
    return int(value)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or not all(re.fullmatch(r"[\w.]+", name) for name in names):
        raise ValueError("names of classes, separated by commas")
    return names


def _one_of(*choices: str) -> Convert:
    """Converts a text in upper or lower case to the choice as written in the table."""
    by_case = {choice.lower(): choice for choice in choices}

    def convert(text: str) -> str:
        found = by_case.get(text.lower())
        if found is None:
            near = difflib.get_close_matches(text.lower(), list(by_case), 1)
            raise ValueError(f"one of {', '.join(choices)}" + (f"; did you mean {by_case[near[0]]}?" if near else ""))
        return found

    return convert


def _sharding(text: str) -> str:
    by_number = {str(number): name for number, name in enumerate(SHARDINGS, 1)}
    return by_number.get(text) or str(_one_of(*SHARDINGS)(text))


def _reshard(text: str) -> bool | int:
    if text.isdecimal() and int(text) > 1:
        return int(text)
    try:
        return _truth(text)
    except ValueError:
        raise ValueError("1, 0, or a number of ranks from 2 on") from None


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError("numbers of blocks, one a stage, such as 3,4,4,3")
    return tuple(int(part) for part in parts)


def _balance(text: str) -> str | tuple[int, ...]:
    choices = ("cost", "parameters", "manual")
    if text[:1].isdecimal():
        return _numbers(text)
    try:
        return str(_one_of(*choices)(text))
    except ValueError as error:
        raise ValueError(f"{error}, or blocks a stage such as 3,4,4,3") from None


def _plan(text: str) -> str | dict[str, str]:
    """``auto``, or ``pattern:style`` pairs: ``layers.*.q_proj:colwise,layers.*.o_proj:rowwise``."""
    if text == "auto":
        return text
    pairs = [part.partition(":") for part in text.split(",")]
    styles = ("colwise", "rowwise", "sequence", "replicate")
    for pattern, colon, style in pairs:
        if not pattern.strip() or not colon or style.strip() not in styles:
            raise ValueError(f"auto, or MODULE:STYLE,… where STYLE is one of {', '.join(styles)}")
    return {pattern.strip(): style.strip() for pattern, _, style in pairs}


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("a JSON object")
    return value


def _flag(name: str, strategies: tuple[str, ...], text: str, default: bool = False) -> StrategyOption:
    return StrategyOption(name, strategies, "1|0", text, _truth, default, ("1", "0"))


def _choice(
    name: str, strategies: tuple[str, ...], choices: tuple[str, ...], text: str, default: str | None = None
) -> StrategyOption:
    return StrategyOption(name, strategies, "|".join(choices), text, _one_of(*choices), default or choices[0], choices)


def _degree(name: str, strategies: tuple[str, ...], text: str) -> StrategyOption:
    return StrategyOption(name, strategies, "N", text, _count)


STRATEGY_OPTIONS: tuple[StrategyOption, ...] = (
    # degrees
    _degree("dp_replicate", ("ddp", "fsdp", "hsdp"), "ranks that hold a copy each (default: what the others leave)"),
    _degree("dp_shard", SHARDED, "ranks that share one copy (default: what the others leave; hsdp: those of a node)"),
    _degree("cp", ("cp",), "ranks that share a sequence"),
    _degree("tp", ("tp",), "ranks that share a layer"),
    _degree("pp", ("pp",), "stages of the pipeline"),
    # the automatic way
    _choice("batch", DIVIDED, ("auto", "whole", "slices"), "what a rank's loop sees of a batch (slices: proved first)"),
    _choice("model", DIVIDED, ("divided", "whole"), "whether each rank computes its part of a batch, or all of it"),
    _choice("loss", DIVIDED, ("auto", "mean", "sum"), "how the loss joins the samples of a batch"),
    _flag("trust_loss", DIVIDED, "the loss is a mean over samples: do not check it"),
    _flag("trust_model", DIVIDED, "no sample of a batch influences another in the model: do not check it"),
    _choice(
        "nonfinite",
        TRAINED,
        ("go-on", "stop", "skip"),
        "what a step does whose gradients hold NaN or infinity: go on and say so once, end the job, or be left out",
    ),
    # ddp
    _flag("static_graph", ("ddp",), "the same parameters take part in every step"),
    _flag("find_unused_parameters", ("ddp",), "look in each step for parameters that took no part"),
    StrategyOption("bucket_cap_mb", ("ddp",), "MB", "gradients are summed in buckets of this size", _number, 25.0),
    _flag("gradient_as_bucket_view", ("ddp",), "gradients that stay are views of the buckets, too"),
    _choice("comm_hook", ("ddp",), ("none", "fp16", "bf16", "powersgd"), "compress gradients"),
    _flag("uneven_inputs", ("ddp",), "batches need not divide among the ranks: always so here"),
    _flag("zero1", ("ddp",), "shard the optimizer's state (ZeroRedundancyOptimizer)"),
    # fsdp, hsdp
    StrategyOption(
        "sharding_strategy", SHARDED, "|".join(SHARDINGS) + "|1-5", "what is sharded", _sharding, None, SHARDINGS
    ),
    StrategyOption(
        "reshard_after_forward",
        SHARDED,
        "1|0|N",
        "free parameters between forward and backward, or keep them in groups of N ranks",
        _reshard,
        True,
        ("1", "0"),
    ),
    _flag("cpu_offload", SHARDED, "parameters, gradients and optimizer state wait in host memory"),
    _choice(
        "auto_wrap_policy",
        SHARDED,
        ("AUTO", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        "what a unit of sharding is (AUTO: the repeated block)",
    ),
    StrategyOption(
        "transformer_layer_cls_to_wrap",
        SHARDED,
        "CLASS,…",
        "with TRANSFORMER_BASED_WRAP: classes of which each module is a unit",
        _names,
    ),
    StrategyOption(
        "min_num_params", SHARDED, "N", "with SIZE_BASED_WRAP: parameters of a unit at the least", _large, 10**8
    ),
    _flag("forward_prefetch", SHARDED, "gather the next unit during forward"),
    _choice(
        "backward_prefetch",
        SHARDED,
        ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        "gather the next unit during backward",
    ),
    _flag("cpu_ram_efficient_loading", SHARDED, "rank 0 alone holds the weights before they are sharded"),
    _flag("sync_module_states", SHARDED, "all ranks begin with rank 0's weights and buffers", True),
    _flag("use_orig_params", SHARDED, "parameters keep their names: always so here", True),
    _choice(
        "state_dict_type", SHARDED, ("FULL_STATE_DICT", "SHARDED_STATE_DICT"), "what state_dict() gives in the cell"
    ),
    StrategyOption("version", SHARDED, "1|2", "of FSDP; 1 is run as 2 where both mean the same", _count, 2, ("1", "2")),
    # tp
    StrategyOption(
        "tp_plan",
        ("tp",),
        "auto|MODULE:STYLE,…",
        "which modules are split how: colwise, rowwise, sequence, replicate",
        _plan,
        "auto",
        ("auto",),
    ),
    _flag("sequence_parallel", ("tp",), "activations between the split layers are split along the sequence"),
    _flag("loss_parallel", ("tp",), "the loss is computed on logits that stay split"),
    # pp
    StrategyOption(
        "microbatches", ("pp",), "N", "parts of a batch in the pipeline (default: as many as stages)", _count
    ),
    _choice(
        "schedule",
        ("pp",),
        ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"),
        "in which order stages work on microbatches; all but gpipe and 1f1b have several stages a rank",
    ),
    StrategyOption(
        "balance",
        ("pp",),
        "cost|parameters|manual|N,N,…",
        "how the model is cut: by measured time and memory, by parameters, by td.stage(i), or blocks a stage",
        _balance,
        "cost",
        ("cost", "parameters", "manual"),
    ),
    # checkpoints
    StrategyOption("checkpoint_steps", TRAINED, "N", "save every N optimizer steps", _count),
    StrategyOption(
        "checkpoint_minutes", TRAINED, "M", "save every M minutes (default: 10, where no steps are given)", _number
    ),
    StrategyOption("checkpoint_keep", TRAINED, "K", "keep the last K", _count, 2),
    # deepspeed
    StrategyOption("config", ("deepspeed",), "JSON", "DeepSpeed's configuration, or --config ds.json", _json),
)

REFUSED = {
    "drop_last": (
        "-O drop_last leaves out what the microbatches do not divide; here they need not, they may be uneven",
        "leave it out, or give drop_last=True to the DataLoader",
    ),
}
"""Options of other libraries that have no effect here: why, and what to do."""

BY_NAME = {option.name: option for option in STRATEGY_OPTIONS}


def chosen(plan: StrategyPlan, name: str) -> Any:
    """The value of an option: the given value, else its default."""
    return plan.options.get(name, BY_NAME[name].default)


def options_of(strategy: str) -> list[StrategyOption]:
    """The rows of one strategy or product. ``auto`` may choose any strategy but DeepSpeed, and has all their rows."""
    parts = strategy.split("+")
    return [row for row in STRATEGY_OPTIONS if set(parts) & set(row.strategies) or (parts == ["auto"] and _ours(row))]


def strategy_of(words: Sequence[str]) -> str:
    """The strategy in the words of an option line; ``auto`` if there is no valid one."""
    for before, word in zip(("", *words), (*words, ""), strict=True):
        text = word.partition("=")[2] if word.startswith("--strategy=") else word if before == "--strategy" else ""
        if text and all(part in NAMES for part in text.split("+")):
            return text
    return "auto"


def strategy_help(strategy: str, layout: Layout = beside) -> str:
    """The options of one strategy, grouped."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in options_of(strategy):
        groups.setdefault(_group(row), []).append((f"-O {row.name}={row.metavar}", explained(row)))
    lines = [f"--strategy {strategy} [-O KEY=VALUE …]", *([] if groups else ["", "takes no options"])]
    for group, rows in groups.items():
        lines += ["", f"{group}:", *layout(rows)]
    return "\n".join(lines)


def explained(row: StrategyOption) -> str:
    """The help of an option, with its default."""
    if row.default is None or "default" in row.help:
        return row.help
    default = int(row.default) if isinstance(row.default, bool) else row.default
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{row.help} (default: {shown})"


def _group(row: StrategyOption) -> str:
    if row.name in DIMENSIONS:
        return "ranks along each dimension of the mesh"
    if row.strategies == DIVIDED:
        return "what is taken for granted of the cell"
    if row.strategies == TRAINED:
        return "checkpoints"
    return " and ".join(row.strategies)


def _ours(row: StrategyOption) -> bool:
    return row.strategies != ("deepspeed",)


def convert(texts: Iterable[str], strategy: str) -> dict[str, Any]:
    """Convert ``key=value`` texts to values; the last text of a key counts.

    Raises ``OptionError`` for a key that is misspelt or belongs to another strategy, and for an invalid value.
    """
    own = {row.name for row in options_of(strategy)}
    values = {}
    for text in texts:
        name, _, value = text.partition("=")
        name = name.replace("-", "_")
        if name in REFUSED:
            raise OptionError(*REFUSED[name])
        row = BY_NAME.get(name)
        if row is None:
            raise _unknown(name, strategy, own)
        if name not in own:
            raise OptionError(
                f"-O {name} is an option of {_either(row.strategies)}, not of {strategy}", _instead(row, strategy)
            )
        try:
            values[name] = row.convert(value)
        except ValueError as error:
            raise OptionError(f"-O {name}={value}: expected {error}", f"write -O {name}={row.metavar}") from None
    return values


def _unknown(name: str, strategy: str, own: Iterable[str]) -> OptionError:
    near = difflib.get_close_matches(name, sorted(own), 1, 0.5) or difflib.get_close_matches(name, sorted(BY_NAME), 1)
    hint = f"did you mean -O {near[0]}=…?" if near else f"`%%distribute --strategy {strategy} --help` lists them"
    return OptionError(f"{strategy} has no option {name!r}", hint)


def _instead(row: StrategyOption, strategy: str) -> str:
    if strategy in ("none", "deepspeed"):
        return f"write --strategy {row.strategies[0]}, or leave it out"
    return f"leave it out, or write --strategy {row.strategies[0]}"


def _either(names: Iterable[str]) -> str:
    names = [name for name in names if name in NAMES and name != "auto"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
