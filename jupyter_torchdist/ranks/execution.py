"""Runs the user's code in the rank's ``__main__``: a cell, a captured call, a module, or a script."""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import tokenize
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from ..usercode.source import remember_source

VALUE = "__torchdist_value__"
"""Name in ``__main__`` for the value of the last line, or the result of the call."""

CALL = "__torchdist_call__"
"""Name in ``__main__`` for the captured (function, args, kwargs)."""


def compile_cell(source: str, label: str, first_line: int, flags: int = 0) -> CodeType:
    """The cell's code, with line numbers as the user sees them. The value of the last expression goes to ``VALUE``.

    ``flags``: compiler flags of the notebook's ``from __future__`` imports. Raises ``SyntaxError``.
    """
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    # Blank lines in front instead of shifted nodes, so that line numbers in compiler errors are right, too.
    shifted = "\n" * (first_line - 1) + source
    tree = compile(shifted, label, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    if tree.body and isinstance(last := tree.body[-1], ast.Expr) and not ends_quietly(source):
        target = ast.copy_location(ast.Name(VALUE, ast.Store()), last)
        tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
    code: CodeType = compile(tree, label, "exec", flags, dont_inherit=True)
    return code


def ends_quietly(source: str) -> bool:
    """Whether a trailing ``;`` asks not to show the last value."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT)
    words = [token.string for token in tokens if token.type not in skipped]
    return bool(words) and words[-1] == ";"


def as_in_a_notebook() -> None:
    """Let ``asyncio.get_event_loop()`` make a loop where there is none: in a notebook there always is one."""
    if type(asyncio.get_event_loop_policy()) is not asyncio.DefaultEventLoopPolicy:
        return  # a module of the user has chosen another one, such as uvloop's

    class Policy(asyncio.DefaultEventLoopPolicy):
        def get_event_loop(self) -> asyncio.AbstractEventLoop:
            if self._local._loop is None and threading.current_thread() is threading.main_thread():  # type: ignore[attr-defined]
                self.set_event_loop(self.new_event_loop())
            return super().get_event_loop()

    asyncio.set_event_loop_policy(Policy())


def run_cell(code: CodeType, namespace: dict[str, Any]) -> None:
    """Run the cell; with top-level ``await``, on an event loop."""
    as_in_a_notebook()
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, namespace))
    else:
        exec(code, namespace)


def called(namespace: Mapping[str, Any]) -> tuple[CodeType | None, Mapping[str, Any]]:
    """The code of the captured function, and the names that it uses. Code is None if it is not written in Python."""
    from ..strategies.already import reached_by

    function, args, kwargs = namespace[CALL]
    code, names = reached_by(function) or (None, {})
    given = {f"argument {number}": value for number, value in enumerate(args)} | dict(kwargs)
    return code, {**given, **names}


def script_code(source: str, path: str) -> CodeType | None:
    """The code of a script; None if it cannot be compiled (running it raises that error)."""
    try:
        code: CodeType = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return code


def yields(function: Callable[..., Any]) -> bool:
    """Whether ``function`` is written with ``yield``, so that its items are sent one by one."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def run_call(namespace: dict[str, Any], put: Callable[[Any], None] = lambda item: None) -> None:
    """Call the captured function; a coroutine is run until it ends. ``put`` gets each item of a generator."""
    function, args, kwargs = namespace[CALL]
    as_in_a_notebook()
    value = function(*args, **kwargs)
    if yields(function):
        value = asyncio.run(_drain_async(value, put)) if inspect.isasyncgen(value) else _drain(value, put)
    elif inspect.iscoroutine(value):
        value = asyncio.run(value)
    namespace[VALUE] = value


def _drain(generator: Generator[Any, None, Any], put: Callable[[Any], None]) -> Any:
    """What the generator returns."""
    while True:
        try:
            item = next(generator)
        except StopIteration as end:
            return end.value
        put(item)


async def _drain_async(generator: AsyncIterator[Any], put: Callable[[Any], None]) -> None:
    async for item in generator:
        put(item)


def run_command(argv: Sequence[str]) -> None:
    """Run a command as a child with this rank's environment and output. This rank then ends as the command did.

    SIGTERM and interrupts are passed on. If the command fails, this process ends at once, with its code or signal.
    """
    child = subprocess.Popen(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    try:
        code = child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        child.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    if code:
        os._exit(code)


_MAIN: dict[str, Any] = {
    **({"__annotations__": {}} if sys.version_info < (3, 14) else {}),
    **({"__cached__": None} if sys.version_info < (3, 15) else {}),
}
"""Other names that an interpreter sets in its ``__main__``."""


def run_module(module: str, argv: Sequence[str]) -> None:
    """Run a module as ``python -m module …`` would in the working directory."""
    sys.argv = list(argv)
    sys.path.insert(0, os.getcwd())
    runpy.run_module(module, dict(_MAIN), run_name="__main__", alter_sys=True)


def run_script(source: str, path: str, argv: Sequence[str], names: dict[str, Any]) -> None:
    """Run a script's text in ``names`` as ``python argv[0] …`` would. The file need not exist on this node.

    ``path`` is absolute; ``argv`` is as typed.
    """
    sys.argv = list(argv) or [path]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    names.update(__file__=path, __loader__=SourceFileLoader("__main__", path), **_MAIN)
    remember_source(path, source)
    exec(compile(source, path, "exec", dont_inherit=True), names)


def threads() -> list[threading.Thread]:
    """The user's non-daemon threads, for which an interpreter waits at exit."""
    return [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]


def join_threads() -> None:
    """Wait for the user's threads, as an interpreter does at exit.

    The exit handlers of ``threading`` end idle threads of executors.
    """
    for call in reversed(getattr(threading, "_threading_atexits", ())):
        call()
    for thread in threads():
        thread.join()
