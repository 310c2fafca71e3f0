"""Tab after ``%%distribute`` and ``%dist``: options, their values, verbs, jobs. Shift-Tab is in ``inspector``."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from ..protocol.errors import TorchDistError
from ..protocol.options.launcher import launcher_of
from ..protocol.options.launcher import options_of as launcher_options
from ..protocol.options.strategy import BY_NAME, explained, options_of, strategy_of
from ..protocol.spec import BY_FLAG, OPTIONS, Option
from ..verbs import hosts, parse
from ..verbs.command_line import split

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

ON_ONE_LINE = str.maketrans({" ": "\N{NO-BREAK SPACE}", "-": "\N{NON-BREAKING HYPHEN}"})
"""JupyterLab makes the text beside a choice as wide as its longest word, and the rest overlaps: so it gets one word."""

Names = Callable[[], Iterable[str]]
"""Returns the notebook's own names."""

EXCLUDING = {"--gpus": ("--ranks",), "--ranks": ("--gpus",)}
EXAMPLES = {
    "timeout": ("30s", "10m", "2h", "1d"),
    "grace": ("5s", "30s", "2m"),
    "grad_accumulation": ("2", "4", "8"),
    "verify": ("5", "20"),
}
"""Example values for options without a complete list."""
STREAMS = ("out", "err")
ABOUT = 72
"""The largest number of characters of the text beside a choice."""


def options(words: list[str], names: Names = tuple) -> list[str]:
    """Choices for the last of ``words`` in the option line, which is being typed."""
    if option := being_valued(words):
        return _settings(words) if option.field == "option" else _values(option, words[-1], names)
    given = [word.partition("=")[0] for word in words[:-1]]
    left = [option.flag for option in OPTIONS if option.repeatable or option.flag not in given]
    barred = {other for flag in given for other in EXCLUDING.get(flag, ())}
    return [*(flag for flag in left if flag not in barred), "--help"]


def being_valued(words: list[str]) -> Option | None:
    """The option whose value is the last word, as in ``--watch text`` or ``--watch=text``; None if it is a flag."""
    before = BY_FLAG.get(words[-2]) if len(words) > 1 else None
    if before is not None and before.convert is not None:
        return before
    flag, given, _ = words[-1].partition("=") if words else ("", "", "")
    return BY_FLAG.get(flag) if given else None


def setting(words: list[str]) -> tuple[str, bool]:
    """The key after ``-O``, and whether its value is being typed."""
    text = words[-1]
    if text.startswith(("-O=", "--option=")):
        text = text.partition("=")[2]
    key, given, _ = text.partition("=")
    return key.replace("-", "_"), bool(given)


def _settings(words: list[str]) -> list[str]:
    """The options of the line's strategy, or the values of the option that is being typed."""
    key, valued = setting(words)
    if not valued:
        of_launcher = launcher_options(launcher_of(words)).values()
        return [*(row.begin for row in of_launcher), *(f"{row.name}=" for row in options_of(strategy_of(words)))]
    row = BY_NAME.get(key)
    return list(row.choices) if row else []


def _values(option: Option, word: str, names: Names) -> list[str]:
    if option.choices:
        return list(option.choices)
    if option.field == "hosts":
        return _hosts(word.removeprefix("--hosts="))
    if option.field == "out":
        return ["auto", "none", *names()]
    if option.field in ("include", "exclude"):
        return list(names())
    if option.field == "env":
        return sorted(os.environ)
    if option.field == "config":
        return sorted(name for name in os.listdir() if name.endswith((".toml", ".yaml", ".yml", ".json")))
    return list(EXAMPLES.get(option.field, ()))


def _hosts(text: str) -> list[str]:
    """For the last of the names in ``text``. IPython's token begins after the ``@`` of a group or of a user."""
    *given, last = text.split(",")
    user, at, _ = last.partition("@")
    found = [name for name in hosts.known(Path.cwd()) if name not in given and ":" not in last]
    if at:
        return [name.removeprefix("@") for name in found if name.startswith("@") != bool(user)]
    return found


def dist(words: list[str], names: Names = tuple) -> list[str]:
    """Choices for the last of ``words`` after ``%dist``: a verb, a job's id or name, or the verb's options."""
    if len(words) <= 1:
        return list(parse.VERBS)
    if words[0] == "run":
        return _programs(words[1:], names)
    if words[0] == "plan":
        return options(words[1:], names)
    if words[0] in parse.OF_HOSTS and (option := being_valued(words[1:])):
        return _values(option, words[-1], names)
    if words[-2] == "--stream":
        return list(STREAMS)
    if words[-1].startswith("-"):
        return [*parse.flags(words[0]), "--help"]
    return _jobs() if words[0] in parse.OF_A_JOB else []


def _programs(words: list[str], names: Names) -> list[str]:
    """Options, then scripts and folders; nothing for a program's own arguments."""
    if split(words[:-1]).program:
        return []
    if being_valued(words) is not None or words[-1].startswith("-"):
        return options(words, names)
    found = sorted(Path().glob(f"{glob.escape(words[-1])}*")) if not words[-1].startswith("/") else []
    return [f"{path}/" if path.is_dir() else str(path) for path in found if path.is_dir() or path.suffix == ".py"]


def _jobs() -> list[str]:
    from ..store import catalog  # imported late, because it imports sqlite3

    try:
        jobs = catalog.jobs()
    except TorchDistError:
        return []
    return [name for job in jobs for name in (job.name, job.job) if name]


def install(ip: InteractiveShell) -> Callable[[], None]:
    """Complete the two magics. Returns a function that undoes this."""
    shell: Any = ip

    def names() -> Iterable[str]:
        return [name for name in shell.user_ns if not name.startswith("_") and name not in shell.user_ns_hidden]

    def match(context: CompletionContext) -> Any:
        offered = complete(context.text_until_cursor, context.token, names)
        if offered is None:
            return {"completions": []}
        line = context.text_until_cursor
        found = [SimpleCompletion(text=text, type=about(line, text).translate(ON_ONE_LINE)) for text in offered]
        # Python names make no sense here: suppress all other matchers.
        return {"completions": found, "suppress": True, "ordered": True}

    decorate: Any = context_matcher(identifier="jupyter_torchdist", priority=100)
    matcher = decorate(match)
    shell.Completer.custom_matchers.append(matcher)

    def uninstall() -> None:
        with contextlib.suppress(ValueError):
            shell.Completer.custom_matchers.remove(matcher)

    return uninstall


def complete(line: str, token: str, names: Names = tuple) -> list[str] | None:
    """Choices to replace ``token`` at the end of ``line``; IPython's token begins after the last ``=``, ``,`` etc.

    None if the line is not one of the two magics.
    """
    magic, *words = line.split() or [""]
    if line[-1:].isspace():
        words.append("")
    choices = {"%%distribute": options, "%dist": dist}.get(magic)
    if choices is None or not words:  # not words: the magic's name is still being typed
        return None
    return [choice for choice in choices(words, names) if choice.startswith(token)]


def about(line: str, choice: str) -> str:
    """A short description of ``choice``: front ends show it beside the choice, as the type of the completion.

    A matcher of IPython can give nothing but a type; Shift-Tab shows the complete help.
    """
    text = _about(line, choice)
    if len(text) > ABOUT:
        text = text.partition(" (default")[0]
    return text if len(text) <= ABOUT else f"{text[: ABOUT - 1]}…"


def _about(line: str, choice: str) -> str:
    magic, *words = line.split()
    if line[-1:].isspace():
        words.append("")
    if magic == "%dist" and words[:1] == ["run"] and choice.endswith((".py", "/")):
        return "folder" if choice.endswith("/") else "script"
    if magic == "%dist" and (len(words) == 1 or words[:1] not in (["plan"], ["run"])):
        if len(words) == 1:
            return f"verb: {parse.VERBS[choice]}"
        host = words[0] in parse.OF_HOSTS and being_valued(words[1:]) is not None
        return "option" if choice.startswith("-") else "host" if host else "job"
    option = being_valued(words)
    if option is None:
        named = BY_FLAG.get(choice)
        return f"option {named.metavar}".rstrip() + f": {named.help}" if named else "option: what all of them do"
    if option.field == "option" and choice.endswith("="):
        row = BY_NAME[choice.removesuffix("=")]
        return f"option {row.metavar}: {explained(row)}"
    return _VALUED.get(option.field, "value")


_VALUED = {
    "hosts": "host",
    "out": "name",
    "include": "name",
    "exclude": "name",
    "env": "variable",
    "config": "file",
    "timeout": "time",
    "grace": "time",
}
"""The kind of an option's values."""
