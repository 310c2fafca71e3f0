"""The words after ``%%distribute`` as options."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import OptionError
from ..hosts import LOCAL, SSH
from ..spec import BY_FLAG, OPTIONS, Option, Options


def parse_options(line: str | Sequence[str], defaults: Options | None = None, *, whole: bool = True) -> Options:
    """The words after ``%%distribute`` as ``Options``. Raises ``OptionError`` that names a similar option.

    If they are not the ``whole``, because a file may add to them, options that contradict each other are left alone.
    """
    try:
        words = shlex.split(line) if isinstance(line, str) else list(line)
    except ValueError as error:
        raise OptionError(f"the option line cannot be read: {error}", "close the quotation mark") from error
    chosen: dict[str, Any] = {}
    while words:
        flag, given, value = words.pop(0).partition("=")
        option = BY_FLAG.get(flag)
        if option is None:
            raise _unknown(flag)
        if option.convert is None:
            if given:
                raise OptionError(f"{flag} takes no value", f"write {flag} alone")
            chosen[option.field] = True
            continue
        if not given:
            if not words or words[0] in BY_FLAG:
                raise OptionError(f"{flag} needs a value", f"write {flag} {option.metavar}")
            value = words.pop(0)
        _store(chosen, option, value)
    defaults = defaults or Options()
    for option in (option for option in OPTIONS if option.adds and option.field in chosen):
        chosen[option.field] = (*getattr(defaults, option.field), *chosen[option.field])
    if "nodes" in chosen:
        chosen["least_nodes"], chosen["nodes"] = chosen["nodes"]
    options = replace(defaults, **chosen)
    if options.hosts and "launcher" not in chosen:
        options = replace(options, launcher=SSH)
    if whole:
        _check(options)
    return options


def _store(chosen: dict[str, Any], option: Option, text: str) -> None:
    assert option.convert is not None
    try:
        value = option.convert(text)
    except ValueError as why:
        raise OptionError(f"{option.flag} {text!r}: expected {why}", f"write {option.flag} {option.metavar}") from None
    if option.repeatable:
        value = (*chosen.get(option.field, ()), *(value if isinstance(value, tuple) else (value,)))
    chosen[option.field] = value


def _unknown(flag: str) -> OptionError:
    if not flag.startswith("-"):
        return OptionError(f"{flag!r} is not an option", "options begin with --; `%%distribute --help` lists them")
    names = [known[2:] for known in BY_FLAG if known.startswith("--")]
    near = difflib.get_close_matches(flag.lstrip("-"), names, 1, 0.5)
    hint = f"did you mean --{near[0]}?" if near else "`%%distribute --help` lists the options"
    return OptionError(f"there is no option {flag}", hint)


def _check(options: Options) -> None:
    """That no two options contradict each other. Raises ``OptionError``."""
    if options.gpus is not None and options.ranks is not None:
        raise OptionError("--gpus and --ranks cannot be used together", "--gpus N for GPU ranks, --ranks N for CPUs")
    if options.hosts and options.launcher == LOCAL:
        raise OptionError("--launcher local runs on this machine only", "leave --launcher out, or --hosts")
    _check_nodes(options)
    if options.gpu_type is not None and options.ranks is not None:
        raise OptionError("--gpu-type is for GPU ranks, --ranks for CPU ranks", "use --gpus N, or leave one out")
    if options.stall_kill and not options.stall:
        raise OptionError("--stall-kill needs to know when a job stalls", "leave --stall off out")
    if options.backend == "nccl" and options.ranks is not None:
        raise OptionError("--backend nccl needs GPUs", "use --gpus N, or leave --backend out")


def _check_nodes(options: Options) -> None:
    least, most = options.least_nodes, options.nodes
    if most is None:
        return
    if options.launcher == LOCAL or (options.launcher == SSH and least is None):
        raise OptionError(
            f"--nodes {most} asks an engine (slurm, ray, spark, kubernetes) for nodes, and none is named",
            f"add --launcher slurm, or write --hosts, with which --nodes 1:{most} goes on when hosts are lost",
        )
    if least is not None and options.launcher != SSH:
        raise OptionError(f"--nodes {least}:{most} is for --hosts", f"write --nodes {most}; an engine gives all")
    if least is not None and not options.restarts:
        raise OptionError(f"--nodes {least}:{most} starts the ranks again, but --restarts is 0", "add --restarts 3")
