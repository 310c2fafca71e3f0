"""Programs on ranks: a Python script, a module, or any command with its arguments."""

from __future__ import annotations

import difflib
import os
import shutil
import tokenize
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..client.submit import Request
from ..protocol.errors import CellSyntaxError, OptionError
from ..protocol.spec import Options


def request(options: Options, words: Sequence[str], *, command: bool = False) -> Request:
    """The job for ``train.py args``, ``-m package.train args`` or, with ``command``, any program with its arguments.

    A ``--`` may stand before the arguments. Raises ``OptionError`` for a program that cannot be run, and
    ``CellSyntaxError`` with file and line for a script that does not compile.
    """
    if options.out == ("auto",):
        options = replace(options, out=("none",))  # a program has no names that results could go to
    program, arguments = words[0], words[1:]
    if command:
        if options.strategy not in (None, "none"):
            raise OptionError(f"--strategy changes Python code, and {program} is a command", "leave --strategy out")
        argv = (program, *arguments)
        _check_command(program)
        return Request(label=program, options=options, kind="command", argv=argv, cwd=Path.cwd())
    if program == "-m":
        module, argv = arguments[0], ("-m", *without_dashes(arguments[1:]))
        return Request(module, f"-m {module}", options=options, kind="module", argv=argv, cwd=Path.cwd())
    path = _script(Path(program).absolute())
    argv = (program, *without_dashes(arguments))
    return Request(_source(path), str(path), options=options, kind="script", argv=argv, cwd=Path.cwd())


def is_python(word: str) -> bool:
    """Whether ``word`` is a script for Python, and not a command that runs by itself."""
    return word.endswith((".py", ".pyw")) or shutil.which(word) is None


def without_dashes(words: Sequence[str]) -> list[str]:
    """``words`` without a leading ``--``."""
    return list(words[1:] if words[:1] == ["--"] else words)


def _script(path: Path) -> Path:
    """The file to run: of a directory its ``__main__.py``, as Python does."""
    if not path.exists():
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, 1)
        where = f"in {path.parent} there is {near[0]}" if near else "give the path of a Python script"
        raise OptionError(f"{path} does not exist", where)
    if path.is_dir():
        if (path / "__main__.py").is_file():
            return path / "__main__.py"
        scripts = ", ".join(sorted(file.name for file in path.glob("*.py"))[:5])
        raise OptionError(
            f"{path} is a directory without __main__.py",
            f"name one of its scripts: {scripts}" if scripts else "give the path of a Python script",
        )
    return path


def _source(path: Path) -> str:
    try:
        with tokenize.open(path) as file:
            source = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read: {error}", "give the path of a Python script") from error
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 0
        text = (getattr(error, "text", None) or "").strip()
        raise CellSyntaxError(
            f"{path}, line {line}: {getattr(error, 'msg', error)}" + (f": {text}" if text else ""),
            "correct the script; no rank was started",
            filename=str(path),
            lineno=line,
            text=text,
        ) from None
    return source


def _check_command(program: str) -> None:
    if shutil.which(program) is None:
        why = "cannot be executed" if Path(program).exists() else "is no command that can be found"
        hint = f"chmod +x {program}, or leave out --no-python" if Path(program).exists() else "give its path"
        raise OptionError(f"{program} {why}", hint)
