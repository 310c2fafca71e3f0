"""Writes ``labextension/src/protocol.ts``: what Python writes as JSON, typed for TypeScript and not typed twice.

``--check`` writes nothing and exits with 1 when the file is not what it would write.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jupyter_torchdist.protocol import feed, state
from jupyter_torchdist.protocol.bundle import Captured
from jupyter_torchdist.protocol.events import ErrorRecord, Event, Evidence, Finding
from jupyter_torchdist.protocol.gauges import Gauges, Traffic
from jupyter_torchdist.protocol.plan import Died, NodePlan, Plan, Reach, Wanted
from jupyter_torchdist.protocol.spec import JobSpec, Options
from jupyter_torchdist.protocol.state import JobState, RankState, Stage, Stall, Waiting
from jupyter_torchdist.protocol.strategy import StrategyPlan
from jupyter_torchdist.server.listing import Row

TARGET = Path(__file__).resolve().parent.parent / "labextension" / "src" / "protocol.ts"

RECORDS = (
    ErrorRecord,
    Evidence,
    Finding,
    Stage,
    Waiting,
    Stall,
    RankState,
    JobState,
    Gauges,
    Traffic,
    Options,
    JobSpec,
    Reach,
    Wanted,
    NodePlan,
    StrategyPlan,
    Died,
    Plan,
    Captured,
)
WORDS = tuple(word for name, word in vars(feed).items() if typing.is_typeddict(word) and not name.startswith("_"))
"""What a feed says, in its order there."""
CONSTANTS = {state: ("FINAL_STATES", "RANK_ENDS"), feed: ("VERSION", "MIME_TYPE", "LINE_LIMIT", "FIRST_BYTES", "BEAT")}

_HEAD = """\
// Generated from Python by scripts/protocol_types.py: change the classes there and run it, not this file.
// The shapes are those of the JSON after codec.ts: times in seconds since the epoch, sizes in bytes.
"""
_EVENT = """\
export interface Event {
  kind: string;
  t: number;
  node: string | null;
  rank: number | null;
  seq: number;
  /** What belongs to the kind, beside the names above. */
  [data: string]: unknown;
}
"""
_PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", types.NoneType: "null", Any: "unknown"}


def typescript(hint: Any) -> str:
    """The TypeScript type of a field's JSON form. Raises ``TypeError`` for what has none."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)):
        return hint.__name__
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " | ".join(typescript(argument) for argument in arguments)
    if origin is typing.Annotated:
        return typescript(hint.__metadata__[0])
    if origin is dict:
        return f"Record<string, {typescript(arguments[1])}>"
    if origin in (list, Sequence) or (origin is tuple and arguments[-1] is Ellipsis):
        item = typescript(arguments[0])
        return f"({item})[]" if " " in item and not item.startswith("[") else f"{item}[]"
    if origin is tuple:
        return f"[{', '.join(map(typescript, arguments))}]"
    raise TypeError(f"{hint} has no TypeScript form")


def comment(text: str | None, indent: str = "") -> str:
    """A docstring as TSDoc; empty for none."""
    if not text:
        return ""
    words = re.sub(r"``(.*?)``", r"`\1`", inspect.cleandoc(text)).replace("*/", "* /")
    if "\n" not in words:
        return f"{indent}/** {words} */\n"
    body = textwrap.indent(words, f"{indent} * ", lambda _: True)
    lines = [line.rstrip() for line in body.splitlines()]
    return "\n".join([f"{indent}/**", *lines, f"{indent} */", ""])


def field_docs(record: type) -> dict[str, str]:
    """The strings that follow fields in the class's source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, after in pairwise(tree.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[field.target.id] = str(after.value.value)
    return docs


def interface(record: type) -> str:
    hints, docs = typing.get_type_hints(record, include_extras=True), field_docs(record)
    names = list(hints) if typing.is_typeddict(record) else [field.name for field in dataclasses.fields(record)]
    optional = getattr(record, "__optional_keys__", ())
    lines = [
        f"{comment(docs.get(name), '  ')}  {name}{'?' if name in optional else ''}: {typescript(hints[name])};\n"
        for name in names
    ]
    return f"{comment(record.__doc__)}export interface {record.__name__} {{\n{''.join(lines)}}}\n"


def constant(name: str, module: types.ModuleType) -> str:
    value, readonly = getattr(module, name), ""
    if isinstance(value, tuple):
        value, readonly = list(value), " as const"
    text = json.dumps(value, ensure_ascii=False).replace('"', "'")
    return f"{comment(docs_of(module).get(name))}export const {name} = {text}{readonly};\n"


def docs_of(module: types.ModuleType) -> dict[str, str]:
    """The strings that follow a module's constants."""
    body = ast.parse(inspect.getsource(module)).body
    return {
        place.targets[0].id: str(after.value.value)
        for place, after in pairwise(body)
        if isinstance(place, ast.Assign)
        and isinstance(place.targets[0], ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def generate() -> str:
    """The text of ``protocol.ts``."""
    constants = "\n".join(constant(name, module) for module, names in CONSTANTS.items() for name in names)
    event = comment(Event.__doc__) + _EVENT
    return "\n".join([_HEAD, constants, event, *map(interface, (*RECORDS, *WORDS, Row))])


def main(words: list[str]) -> int:
    text = generate()
    if words == ["--check"]:
        current = TARGET.exists() and TARGET.read_text(encoding="utf-8") == text
        if not current:
            print(f"{TARGET.name} is not current: run python scripts/protocol_types.py", file=sys.stderr)
        return 0 if current else 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
