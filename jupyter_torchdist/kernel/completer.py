"""Tab after ``%%distribute`` and ``%dist``: options, their values, verbs, jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..protocol.errors import TorchDistError
from ..protocol.spec import BY_FLAG
from ..verbs import parse

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def options(words: list[str]) -> list[str]:
    """What may follow ``words`` of the option line (the last one is being typed)."""
    before = BY_FLAG.get(words[-2]) if len(words) > 1 else None
    if before is not None and before.convert is not None:
        return list(before.choices)
    flag, given, _ = words[-1].partition("=") if words else ("", "", "")
    if given and flag in BY_FLAG:
        return [f"{flag}={choice}" for choice in BY_FLAG[flag].choices]
    return [*BY_FLAG, "--help"]


def dist(words: list[str]) -> list[str]:
    """What may follow ``%dist`` and ``words``: a verb, else a job's id or name, or the verb's options."""
    if len(words) <= 1:
        return list(parse.VERBS)
    if words[-1].startswith("-"):
        return parse.flags(words[0])
    if words[0] not in parse.OF_A_JOB:
        return []
    from ..store import catalog  # sqlite3 and all: not before it is needed

    try:
        jobs = catalog.jobs()
    except TorchDistError:
        return []
    return [name for job in jobs for name in (job.name, job.job) if name]


def install(ip: InteractiveShell) -> Callable[[], None]:
    """Complete the two magics; the function returned undoes it."""
    hooks = {"%%distribute": options, "%dist": dist}
    shell: Any = ip
    for key, choices in hooks.items():
        shell.set_hook("complete_command", _completer(choices), str_key=key)

    def uninstall() -> None:
        table: Any = ip.strdispatchers["complete_command"].strs
        for key in hooks:
            table.pop(key, None)

    return uninstall


def _completer(choices: Callable[[list[str]], list[str]]) -> Callable[[Any, Any], list[str]]:
    def complete(_shell: Any, event: Any) -> list[str]:
        words = event.text_until_cursor.split()[1:]
        if event.text_until_cursor.endswith((" ", "\t")):
            words.append("")
        typed = words[-1] if words else ""
        return [choice for choice in choices(words) if choice.startswith(typed)]

    return complete
