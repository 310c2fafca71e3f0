"""A rank's replacement for a notebook's front end: no keyboard, a small shell, displays written to a file."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from ..marshal import commands
from ..protocol.errors import UserError
from .afterimport import Change, after_import
from .streams.display import Display, Frontend


class RankShell:
    """The result of ``get_ipython()`` on a rank: supports only ``!command``."""

    user_ns: dict[str, Any]

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.user_ns = namespace
        self._began: tuple[float, float] | None = None

    def clock(self) -> None:
        """``%%time`` below the magic: the time is printed at the end of the cell."""
        self._began = time.perf_counter(), time.process_time()

    def stop_clock(self) -> None:
        if self._began is not None:
            _say_time(*self._began)

    @contextlib.contextmanager
    def clocked(self) -> Iterator[None]:
        """``%time statement``."""
        began = time.perf_counter(), time.process_time()
        yield
        _say_time(*began)

    def system(self, command: str) -> None:
        """``!command``: the output goes to the rank's output, the exit status to ``_exit_code``, as in IPython."""
        sys.stdout.flush()
        sys.stderr.flush()
        command = self._expanded(command)
        self.user_ns["_exit_code"] = subprocess.call(command, shell=True, executable=_shell())

    system_raw = system_piped = system

    def getoutput(self, command: str, split: bool = True, depth: int = 0) -> Any:
        """``x = !command``: returns the lines of its output, or its text."""
        command = self._expanded(command)
        done = subprocess.run(
            command, shell=True, executable=_shell(), stdout=subprocess.PIPE, text=True, errors="replace", check=False
        )
        self.user_ns["_exit_code"] = done.returncode
        return _lines(done.stdout) if split else done.stdout

    def _expanded(self, command: str) -> str:
        """The command with names replaced by their values in the calling code, two frames above."""
        return commands.expand(command, {**self.user_ns, **sys._getframe(2).f_locals})

    def run_line_magic(self, name: str, line: str = "", **_: Any) -> NoReturn:
        raise _no_magic(f"%{name}")

    def run_cell_magic(self, name: str, line: str = "", cell: str = "") -> NoReturn:
        raise _no_magic(f"%%{name}")


def _say_time(wall: float, processor: float) -> None:
    print(f"CPU time: {time.process_time() - processor:.3g} s\nWall time: {time.perf_counter() - wall:.3g} s")


def _shell() -> str:
    return os.environ.get("SHELL") or "/bin/sh"


def _lines(text: str) -> list[str]:
    """As IPython's list of lines, which has ``.n`` and ``.s``; a node may lack IPython."""
    try:
        kind: type[list[str]] = importlib.import_module("IPython.utils.text").SList
    except (ImportError, AttributeError):
        kind = list
    return kind(text.splitlines())


def _no_magic(magic: str) -> UserError:
    return UserError(f"{magic} cannot run on a rank", commands.INSTEAD_OF_MAGICS)


def no_input(prompt: object = "", /) -> NoReturn:
    raise UserError("input() does not work: a rank has no keyboard", "set the value in a cell before this one")


def no_password(*_: Any, **__: Any) -> NoReturn:
    raise UserError("getpass() does not work: a rank has no keyboard", "ask for it in a cell before this one")


def no_breakpoint(*_: Any, **__: Any) -> NoReturn:
    hint = "print what you want to see, or run the code without the magic"
    raise UserError("breakpoint() does not work: a rank has no keyboard", hint)


def install(display: Display, namespace: dict[str, Any], *, program: bool = False) -> RankShell:
    """Replace ``display``, ``get_ipython``, ``input``… in this process, also in libraries that are imported later.

    A ``program`` keeps ``input`` and ``breakpoint``: its standard input may be the shell's. Returns ``get_ipython()``.
    """
    frontend = Frontend(display)
    shell = RankShell(namespace)
    names: dict[str, Any] = {"display": frontend.display, "get_ipython": lambda: shell, "input": no_input}
    if program:
        del names["input"]
    else:
        sys.breakpointhook = no_breakpoint
    for name, value in names.items():
        setattr(builtins, name, value)
    verbs = {name: getattr(frontend, name) for name in ("display", "update_display", "clear_output")}
    if importlib.util.find_spec("IPython") is None:
        _stand_in(verbs)
    changes: dict[str, Change] = {
        "IPython.core.display_functions": lambda module: vars(module).update(verbs),
        "IPython.display": lambda module: vars(module).update(verbs),
        "matplotlib": _draw_into_memory,
        "matplotlib.pyplot": lambda module: vars(module).update(show=lambda *_, **__: display.figures()),
        "tqdm.notebook": _text_bars,
    }
    if not program:
        changes["getpass"] = lambda module: vars(module).update(getpass=no_password)
    after_import(changes)
    return shell


def _stand_in(verbs: dict[str, Any]) -> None:
    """``from IPython.display import display, clear_output`` on a node without IPython."""
    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    package.__path__ = []
    vars(module).update(verbs)
    for name, method in _TEXTS.items():
        vars(module)[name] = type(name, (_Text,), {method: lambda self: self.data})
    vars(package).update(display=module, get_ipython=builtins.get_ipython)  # type: ignore[attr-defined]
    sys.modules["IPython"], sys.modules["IPython.display"] = package, module


class _Text:
    """``HTML("…")`` and similar classes: text with a MIME type."""

    def __init__(self, data: str) -> None:
        self.data = data


_TEXTS = {"HTML": "_repr_html_", "Markdown": "_repr_markdown_", "Latex": "_repr_latex_", "SVG": "_repr_svg_"}


def _draw_into_memory(matplotlib: ModuleType) -> None:
    """Set the backend again: matplotlib may have been imported before the fork, in another environment."""
    matplotlib.rcParams["backend"] = os.environ.get("MPLBACKEND", "Agg")


def _text_bars(module: ModuleType) -> None:
    """Replace the names of ``tqdm.notebook`` by the text bar, because its widgets need a kernel."""
    std = sys.modules["tqdm.std"]

    vars(module).update(tqdm_notebook=std.tqdm, tqdm=std.tqdm, tnrange=std.trange, trange=std.trange)
