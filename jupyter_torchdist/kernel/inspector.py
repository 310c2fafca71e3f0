"""Shift-Tab on ``%%distribute``, ``%dist`` and their options: shows their help.

IPython can only explain Python names. Therefore ``do_inspect`` of the kernel is replaced, for these two magics only.
This works in every front end, VS Code included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..protocol.columns import below
from ..protocol.options.strategy import BY_NAME, explained, strategy_help, strategy_of
from ..protocol.spec import BY_FLAG, Option, Options, options_help
from ..verbs import parse
from .completer import being_valued, setting

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def explain(code: str, position: int) -> str | None:
    """The help for ``position`` (characters) in a cell; None if IPython should answer."""
    start = code.rfind("\n", 0, position) + 1
    end = code.find("\n", position)
    line = code[start : end if end >= 0 else len(code)]
    words = _until(line, position - start)
    if not words:
        return None
    if words[0] == "%%distribute":
        return _of_options(words[1:])
    return _of_verbs(words[1:]) if words[0] == "%dist" else None


def _until(line: str, column: int) -> list[str]:
    """The words of the line up to the word at ``column``, which is the last and complete."""
    rest = line[column:]
    # Blanks after a word still belong to the word, or to the value that follows.
    return (line[:column] + (rest.split(maxsplit=1)[0] if rest and not rest[0].isspace() else "")).split()


def _of_options(words: list[str]) -> str:
    word = words[-1].partition("=")[0] if words else ""
    option = BY_FLAG.get(word) or being_valued(words)
    if option is not None and option.field == "option":
        row = BY_NAME.get(setting(words)[0])
        return f"-O {row.name}={row.metavar}\n\n{explained(row)}" if row else _settings(option, words)
    return _of_option(option) if option else options_help(below)


def _settings(option: Option, words: list[str]) -> str:
    """The help for ``-O`` and for the keys that may follow it."""
    return f"{_of_option(option)}\n\n{strategy_help(strategy_of(words), below)}"


def _of_option(option: Option) -> str:
    lines = [f"{option.written} {option.metavar}".strip(), "", option.help]
    default = getattr(Options(), option.field, None)
    if option.choices:
        lines.append(f"one of: {', '.join(option.choices)}")
    if option.repeatable:
        lines.append("may be given several times")
    if default not in (None, False, ()) and "default" not in option.help:
        shown = ",".join(default) if isinstance(default, tuple) else default
        lines.append(f"default: {shown}")
    return "\n".join(lines)


def _of_verbs(words: list[str]) -> str:
    if words[:1] == ["plan"] and len(words) > 1:
        return _of_options(words[1:])
    asked = [words[0], "--help"] if words and words[0] in parse.VERBS else ["--help"]
    try:
        parse.parse(asked, "%dist")
    except parse.HelpShown as shown:
        return str(shown)
    raise AssertionError(asked)


def install(ip: InteractiveShell) -> Callable[[], None]:
    """Replace ``do_inspect``. Returns a function that undoes this. Without a kernel (a terminal) nothing happens."""
    kernel: Any = getattr(ip, "kernel", None)
    original = getattr(kernel, "do_inspect", None)
    if original is None:
        return lambda: None

    async def do_inspect(code: str, cursor_pos: int, *more: Any, **named: Any) -> dict[str, Any]:
        said = explain(code, cursor_pos)
        if said is not None:
            return {"status": "ok", "found": True, "data": {"text/plain": said}, "metadata": {}}
        answer = original(code, cursor_pos, *more, **named)
        if inspect.isawaitable(answer):
            answer = await answer
        return dict(answer)

    kernel.do_inspect = do_inspect

    def uninstall() -> None:
        if kernel.__dict__.get("do_inspect") is do_inspect:
            del kernel.do_inspect

    return uninstall
