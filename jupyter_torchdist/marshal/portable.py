"""Code for another release of Python, which cannot read this one's bytecode: it travels as source.

A function's piece of its file is compiled where it arrives. Its closure, defaults and globals travel as values, so no
line of the user runs again. Here the piece is compiled first: it is sent only if that gives the function's own code.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
import pickle
import platform
import symtable
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

from . import codes

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names) & ~inspect.CO_NESTED
"""The flags of a code object that ``from __future__`` imports set. They are the same in all releases of Python."""
_LAMBDA = "<lambda>"


class Piece(NamedTuple):
    """The source of one function, without decorators. What is evaluated around it is not compiled."""

    text: str
    """From the line of ``def`` on, or the expression from ``lambda`` on."""
    line: int
    """Of that in its file."""
    first: int
    """The line of its first decorator, if it has any; else ``line``."""
    column: int
    name: str
    inside: str
    """The innermost class around it: names such as ``__x`` are private to it."""
    free: tuple[str, ...] = ()
    """Variables of functions around it, as the code object orders them."""
    flags: int = 0
    imported: tuple[str, ...] = ()
    """Names that the file imports beside it: a call of a module's function is compiled in another way."""


def minor(version: str) -> str:
    """``3.11.7`` → ``3.11``. Bytecode is the same within it."""
    return ".".join(version.split(".")[:2])


def is_ours(version: str) -> bool:
    """Whether code of this version of Python can be read here."""
    return minor(version) == minor(platform.python_version())


def reduce(code: CodeType, file: str) -> Any:
    """The reduction of a function's code. ``file``: its name in the other process.

    Raises ``PicklingError`` if its source is not known.
    """
    piece = _known.get(_digest(code)) or _find(code)
    if piece is None:
        name = getattr(code, "co_qualname", code.co_name)
        raise pickle.PicklingError(
            f"the source of {name} ({code.co_filename}, line {code.co_firstlineno}) is not known any more, "
            "and a host with another release of Python needs it"
        )
    return compiled, (tuple(piece), file, getattr(code, "co_qualname", ""))


_known: dict[str, Piece] = {}
"""Of code that came as source, by digest."""


def compiled(parts: tuple[Any, ...], file: str, full: str) -> CodeType:
    """The code of a function from another release of Python. ``full``: its qualified name, or empty.

    Streams contain this name.
    """
    piece = Piece(*parts)
    code = _compile(piece, file)
    if code.co_freevars != piece.free:
        raise ValueError(f"{piece.name} ({file}, line {piece.line}) uses other variables here than where it is from")
    if full and sys.version_info >= (3, 11):
        code = code.replace(co_qualname=full)
    _known[_digest(code)] = piece
    return code


def _digest(code: CodeType) -> str:
    return codes.code_digest(code.replace(co_flags=code.co_flags & ~inspect.CO_NESTED))


def _find(code: CodeType) -> Piece | None:
    """The piece that compiles to this code. A file that is not the one that was run is read again."""
    for _ in range(2):
        lines = linecache.getlines(code.co_filename)
        text = "".join("\n" if line.startswith("%%") else line for line in lines)  # the magic of a cell
        for piece in _pieces(text):
            if (piece.name, piece.first) == (code.co_name, code.co_firstlineno):
                whole = piece._replace(free=code.co_freevars, flags=code.co_flags & _FUTURE)
                # IPython compiles each statement of a cell by itself.
                for one in (whole, whole._replace(imported=_imported(text))):
                    if _digest(_compile(one, code.co_filename)) == _digest(code):
                        return one
        linecache.checkcache(code.co_filename)
    return None


@functools.lru_cache(maxsize=64)
def _pieces(text: str) -> tuple[Piece, ...]:
    """The functions in a file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(_within(tree, "", text, [f"{line}\n" for line in text.split("\n")]))


@functools.lru_cache(maxsize=64)
def _imported(text: str) -> tuple[str, ...]:
    """The names that a file's imports bind outside of functions and classes."""
    symbols = symtable.symtable(text, "file", "exec").get_symbols()
    return tuple(sorted(symbol.get_name() for symbol in symbols if symbol.is_imported()))


def _within(node: ast.AST, inside: str, text: str, lines: list[str]) -> Iterator[Piece]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Lambda):
            segment = ast.get_source_segment(text, child) or ""
            yield Piece(segment, child.lineno, child.lineno, child.col_offset, _LAMBDA, inside)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            segment = "".join(lines[child.lineno - 1 : child.end_lineno])
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield Piece(segment, child.lineno, first, child.col_offset, child.name, inside)
        yield from _within(child, child.name if isinstance(child, ast.ClassDef) else inside, text, lines)


def _compile(piece: Piece, file: str) -> CodeType:
    """The piece in a function that has its free variables, and in a class of the right name."""
    around = [f"def around({', '.join(piece.free)}):"] if piece.free else []
    around += [f"class {piece.inside}:"] if piece.inside else []
    outside = "".join(f"{' ' * depth}{line}\n" for depth, line in enumerate([*around, "0"]))
    tree: Any = ast.parse(outside)
    place = tree
    for _ in around:
        place = place.body[0]
    place.body[:] = [_parse(piece)]
    tree.body += ast.parse("".join(f"import {name}\n" for name in piece.imported)).body
    code: CodeType = compile(tree, file, "exec", piece.flags, dont_inherit=True)
    for _ in (*around, piece):
        code = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return code


def _parse(piece: Piece) -> Any:
    """The definition alone, at its lines: decorators, defaults and annotations are evaluated around it."""
    if piece.name == _LAMBDA:
        shown = "(" + " " * (piece.column - 1) + piece.text + ")"
        statement: Any = ast.parse(shown).body[0]
        node = statement.value
    else:
        indented = piece.text[:1].isspace()
        statement = ast.parse(("if 1:\n" if indented else "") + piece.text).body[0]
        node = statement = statement.body[0] if indented else statement
        node.returns, node.decorator_list = None, []
        if sys.version_info >= (3, 12):
            node.type_params = []
    arguments = node.args
    arguments.defaults = [ast.copy_location(ast.Constant(None), one) for one in arguments.defaults]
    arguments.kw_defaults = [one and ast.copy_location(ast.Constant(None), one) for one in arguments.kw_defaults]
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    ast.increment_lineno(statement, piece.line - node.lineno)
    if piece.first != piece.line:  # the code's first line
        decorator = ast.copy_location(ast.Constant(None), node)
        decorator.lineno = decorator.end_lineno = piece.first
        node.decorator_list = [decorator]
    return statement
