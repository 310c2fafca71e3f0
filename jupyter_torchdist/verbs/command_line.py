"""The words of ``torchdist run`` and ``%dist run``: options of ours and of torchrun, then a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..client.submit import Request
from ..protocol.columns import beside
from ..protocol.errors import OptionError
from ..protocol.options.help import help_text
from . import defaults, parse, programs, torchrun

HELP = ("-h", "--help")


@dataclass(frozen=True)
class CommandLine:
    """Our options and torchrun's as they were written, and the program with its arguments."""

    options: list[str]
    program: list[str]
    json: bool
    """Whether ``--json`` was among the options."""

    @property
    def asks_for_help(self) -> bool:
        return bool(set(HELP) & set(self.options))

    def meant(self, environ: Mapping[str, str]) -> torchrun.Meant:
        """What torchrun's options mean. Raises ``OptionError``."""
        return torchrun.translate(torchrun.from_environment(self.options, environ))

    def request(self, meant: torchrun.Meant, directory: Path, words: str) -> Request:
        """The job, with the default options of ``directory``. ``words`` is how one writes such a line.

        Raises ``OptionError``, and ``CellSyntaxError`` for a script that does not compile.
        """
        chosen = defaults.options(meant.words, directory)
        if not self.program:
            raise OptionError("run needs a script", f"{words} --ranks 2 train.py -- args")
        if self.program[0] == "-m" and len(self.program) < 2:
            raise OptionError("-m needs the name of a module", f"{words} --ranks 2 -m package.train -- args")
        request = programs.request(chosen, self.program, command=meant.command)
        return replace(request, options=meant.on(request.options))


def split(words: Sequence[str]) -> CommandLine:
    """Split ``--ranks 2 script.py -- --lr 1`` at the program.

    The program of a module begins with ``-m``. A ``--`` may stand before the program.
    """
    options: list[str] = []
    module: list[str] = []
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "--":
        word = left.pop(0)
        if word in ("-m", "--module"):
            module = ["-m"]
            continue
        options.append(word)
        flag, given, _ = torchrun.parted(word)
        if torchrun.takes_value(flag) and not given and left:
            options.append(left.pop(0))
    ours = [word for word in options if word != parse.JSON]
    return CommandLine(ours, [*module, *programs.without_dashes(left)], parse.JSON in options)


def help_of(line: CommandLine, words: str) -> str:
    """What ``--help`` prints. ``words`` is how one writes such a line."""
    usage = f"{words} [options] script.py -- args   run it; with --json first, print objects of JSON"
    ours = help_text(line.options).replace("%%distribute [options]   run this cell", usage)
    return "\n".join([ours, "as torchrun, on one machine:", *beside(torchrun.torchrun_help())])
