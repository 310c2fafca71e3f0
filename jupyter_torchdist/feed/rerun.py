"""The shell command that runs a job again."""

from __future__ import annotations

import shlex

from ..protocol.spec import OPTIONS, PROGRAMS, JobSpec, Option, Options

_SHELL = "torchdist"
_NOT_AGAIN = ("plan", "watch", "background", "config")
"""Options left out of the command. ``config``, too: the other options contain the values that the file set."""


def command(spec: JobSpec) -> str:
    """``torchdist run`` for a program; ``torchdist rerun``, with the stored bundle, for code from a notebook."""
    if spec.kind not in PROGRAMS:
        return shlex.join([_SHELL, "rerun", spec.job])
    words = [word for option in OPTIONS for word in _words(option, spec.options)]
    program = ["-m", spec.source] if spec.kind == "module" else [spec.label]
    arguments = ["--", *spec.argv[1:]] if spec.argv[1:] else []
    return shlex.join([_SHELL, "run", *words, *program, *arguments])


def _words(option: Option, options: Options) -> list[str]:
    value = getattr(options, option.field)
    unsaid = value == getattr(Options(), option.field)
    if unsaid or option.field in _NOT_AGAIN or (option.field == "out" and value == ("none",)):
        return []
    if option.convert is None:
        return [option.flag]
    if option.repeatable:
        return [word for item in value for word in (option.flag, item)]
    return [option.flag, _text(value)]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)
