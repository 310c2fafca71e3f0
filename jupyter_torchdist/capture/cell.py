"""A cell, or a call of a function, together with everything it needs from the notebook."""

from __future__ import annotations

import builtins
import difflib
import inspect
import linecache
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..protocol.bundle import Captured, Package
from ..protocol.errors import CaptureError, UndefinedName
from . import carried, modules
from .attributes import Attributes
from .closure import PROVIDED, Closure, Wanted, close, refused_history, refused_magic
from .describe import human
from .flow import Names
from .names import analyse

CALL = "__torchdist_call__"
"""The captured name that holds (function, args, kwargs) of a job of kind ``function``."""
HEAVY = 100_000_000
"""A captured name with more bytes than this gets a note."""
MISSING = 5
"""The largest number of notes on undefined names in functions."""


@dataclass
class Capture:
    """Everything that travels to the ranks. ``memo`` {place: object} is for ``marshal.load_results`` later."""

    names: tuple[str, ...]
    receipt: tuple[Captured, ...]
    bound: tuple[str, ...]
    notes: tuple[str, ...]
    memo: dict[int, Any]
    stream: bytes
    buffers: list[pickle.PickleBuffer]
    lines: dict[str, str]
    """File name in tracebacks → source text of earlier cells. The text of this cell is in the job's specification."""
    sources: dict[str, modules.Source] = field(default_factory=dict)
    """Path below the ranks' source directory → the local module's source."""
    flags: int = 0
    modules: dict[str, str] = field(default_factory=dict)
    """Modules that the capture names → what needs them first."""
    referred: frozenset[str] = frozenset()
    """Those without which the job cannot run."""
    portable: bool = False
    """Whether another release of Python can read it."""
    packages: tuple[Package, ...] = ()
    """The installed ones among them, if hosts are to be compared."""

    @property
    def size(self) -> int:
        """Bytes of the stream and its buffers."""
        return len(self.stream) + sum(buffer.raw().nbytes for buffer in self.buffers)


def capture_cell(
    source: str,
    label: str,
    first_line: int,
    namespace: Mapping[str, Any],
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    hidden: Iterable[str] = (),
    flags: int = 0,
    cwd: Path,
    labels: Mapping[str, str] | None = None,
    stateless: bool = False,
    portable: bool = False,
) -> Capture:
    """What the cell needs from ``namespace``, and the state of this process, unless the cell is ``stateless``.

    ``namespace`` must be the dictionary that is the globals of the notebook's functions. Only functions with these
    globals get the rank's namespace as globals. ``hidden`` are names in it that belong to the IPython shell; the cell
    cannot use them. ``include`` are names to take along although no code names them. ``label`` and ``first_line`` name
    the cell and its first line in tracebacks. ``flags`` are compiler flags of the notebook's ``from __future__``
    imports. ``labels`` renames source files of earlier cells (co_filename → ``Cell In[3]``). ``portable``: another
    release of Python can read it, too. Raises ``CellSyntaxError``, ``UndefinedName``, ``CaptureError``.
    """
    names = analyse(source, label, first_line, flags)
    for magic, line in names.magics.items():
        raise refused_magic(magic, f"line {line}")
    scope = namespace if isinstance(namespace, dict) else dict(namespace)
    kept_out = frozenset(hidden)
    notes = _check_defined(names, scope, kept_out)
    loaded = {name: need.line for name, need in names.needs.items()}
    named = dict.fromkeys(_included(include, scope, kept_out), "--include")
    spoken = {name: "a text of the cell" for name in sorted(names.spoken & scope.keys()) if name not in loaded}
    wanted = Wanted(
        scope,
        {**spoken, **{name: f"line {line}" for name, line in (names.commands | loaded).items()}, **named},
        soft=frozenset({*names.binds, *spoken}),
        texts=frozenset(names.texts),
        exclude=kept_out | frozenset(exclude),
        labels=labels or {},
        attributes=frozenset(names.attributes),
        imports=tuple(names.imports),
        portable=portable,
    )
    bound = tuple(dict.fromkeys([*names.binds, *_star_names(names.stars)]))
    capture = _capture(wanted, notes, source, names.imports, cwd, bound, names.flags | flags, stateless)
    imported = {module: f"line {line}" for module, line in names.imports.items()}
    return replace(capture, modules=capture.modules | imported, referred=capture.referred | names.surely_imported)


def _included(names: Iterable[str], scope: Mapping[str, Any], kept_out: frozenset[str]) -> Iterator[str]:
    for name in names:
        if name not in scope or name in kept_out:
            near = difflib.get_close_matches(name, [key for key in scope if not key.startswith("_")], 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else "run the cell that defines it first"
            raise UndefinedName(f"--include {name}: the notebook has no such name", hint, name=name)
        yield name


def capture_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    cwd: Path,
    labels: Mapping[str, str] | None = None,
    portable: bool = False,
) -> Capture:
    """A call of a function, as the captured name ``CALL``. Raises ``CaptureError``."""
    inner = getattr(function, "__func__", function)
    scope = getattr(inner, "__globals__", {})
    if scope.get("__name__") != "__main__":
        scope = vars(sys.modules["__main__"])
    user = f"the call of {getattr(function, '__qualname__', type(function).__name__)}"
    call = (function, tuple(args), dict(kwargs))
    wanted = Wanted(scope, {CALL: user}, labels=labels or {}, own={CALL: call}, portable=portable)
    try:
        return _capture(wanted, [], "", (), cwd, (), 0)
    except CaptureError as error:
        if not error.path.startswith(CALL):
            raise
        path, line, words = error.path, error.line, error.message.split("\n  ")[-1]
    # Not ``from`` that error: its frames would keep the arguments alive.
    message = f"{user} cannot leave the notebook\n  {_as_called(function, words)}"
    hint = "create it inside the function, and give the function what it is made from"
    raise CaptureError(message, hint, path=path, line=line)


def _as_called(function: Callable[..., Any], words: str) -> str:
    """``words`` with the names of parameters and of the function where they have places in ``CALL``."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    names = [one.name for one in inspect.signature(function).parameters.values() if one.kind not in kinds]
    words = re.sub(rf"{CALL}\[1\]\[(\d+)\]", lambda found: names[min(int(found[1]), len(names) - 1)], words)
    words = re.sub(rf"{CALL}\[2\]\['(\w+)'\]", r"\1", words)
    return words.replace(f"{CALL}[0]", getattr(function, "__qualname__", type(function).__name__))


def _capture(
    wanted: Wanted,
    notes: list[str],
    source: str,
    imports: Iterable[str],
    cwd: Path,
    bound: tuple[str, ...],
    flags: int,
    stateless: bool = False,
) -> Capture:
    local = modules.LocalSources(cwd)
    local.add(imports)
    attributes = Attributes(wanted.namespace, source, local)
    state = carried.found(wanted.namespace, stateless)
    own = replace(wanted, reach=attributes.along_with, states=state.values, objects=attributes.objects())
    closure, more = close(own)
    return Capture(
        names=closure.names,
        receipt=(*closure.receipt, *carried.receipt(state, closure.sizes)),
        bound=(*bound, *attributes.watched),
        notes=(*notes, *more, *local.notes, *_notes(closure, wanted.attributes | closure.attributes), *state.notes),
        memo=closure.memo,
        stream=closure.stream,
        buffers=closure.buffers,
        lines=_lines(closure.files, wanted.labels),
        sources=local.found,
        flags=flags,
        portable=wanted.portable,
        modules=dict.fromkeys(local.others, "a local module") | closure.modules,
        referred=frozenset(closure.referred),
    )


def _notes(closure: Closure, attributes: frozenset[str]) -> list[str]:
    notes = [
        f"{item.name} is large ({human(item.size)}, {item.what}): loading it inside the cell is faster"
        for item in closure.receipt
        if item.size > HEAVY
    ]
    notes += [
        f"{name} is not defined ({place}); the job fails if it runs that line"
        for name, place in list(closure.missing.items())[:MISSING]
    ]
    if closure.moved:
        notes.append(f"tensors on {', '.join(sorted(closure.moved))} are copied over the CPU")
    if closure.graphs and "backward" in attributes:
        names = ", ".join(closure.graphs)
        notes.append(
            f"backward() ends at {names}, computed in an earlier cell: compute it in this one to go on from it"
        )
    return notes


_USUAL = {"td": "`import jupyter_torchdist as td` first"}
"""Hints for undefined names that have a usual meaning."""


def _check_defined(names: Names, namespace: Mapping[str, Any], kept_out: frozenset[str]) -> list[str]:
    """Notes on names that may be missing. Raises ``UndefinedName`` for a name that is surely missing."""
    notes = []
    scope = {name: value for name, value in namespace.items() if name not in kept_out}
    for name, need in names.needs.items():
        if name in scope or name in PROVIDED or hasattr(builtins, name):
            continue
        if need.certain and not names.stars and not names.dynamic:
            if name in names.binds:
                line = names.binds[name]
                message = f"name {name!r} is used (line {need.line}) before the cell defines it (line {line})"
                raise UndefinedName(message, "move its definition up", name=name)
            if name in namespace:
                raise refused_history(name, f"line {need.line}")
            known = [key for key in (*scope, *names.binds, *dir(builtins)) if not key.startswith("_")]
            near = difflib.get_close_matches(name, known, 1, 0.6)
            hint = _USUAL.get(name) or (f"did you mean {near[0]}?" if near else "run the cell that defines it first")
            raise UndefinedName(f"name {name!r} is not defined (line {need.line})", hint, name=name)
        if name not in names.binds and not names.stars and not names.dynamic:
            notes.append(f"{name} (line {need.line}) is not defined; the cell fails if it runs that line")
    return notes


def _star_names(stars: Iterable[str]) -> Iterator[str]:
    """The names that ``from … import *`` binds, for modules that are loaded in this process."""
    for module in stars:
        loaded = sys.modules.get(module)
        if loaded is not None:
            yield from getattr(loaded, "__all__", None) or [name for name in vars(loaded) if not name.startswith("_")]


def _lines(files: Iterable[str], labels: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for file in files:
        if file.startswith("<") and file not in linecache.cache:
            continue
        text = "".join(linecache.getlines(file))
        if text:
            found[labels.get(file, file)] = text
    return found
