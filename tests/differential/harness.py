"""Cases: notebook cells that run as they are, and with ``%%distribute`` above some of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.notebook import Cell, Notebook, plain

CASES = Path(__file__).parent / "cases"
_CASE = re.compile(r"^#### (?P<name>\w+)(?P<words>.*)\n", re.MULTILINE)
_OUTER = ("%%capture", "%%timeit")
_CELL = re.compile(r"^# %%(?P<words>.*)\n", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """``cells``: (text, options of ``%%distribute``, or None for a cell that is never distributed).

    ``own``: the case needs a kernel of its own. ``soak``: it runs in ``make soak`` only. ``says``: the case differs,
    and these words tell it.
    """

    name: str
    cells: tuple[tuple[str, str | None], ...]
    own: bool = False
    soak: bool = False
    says: str = ""


def cases() -> Iterator[Case]:
    """The cases of all files: ``#### name | own | soak | says: words``, then cells after ``# %%`` or ``# %% ranks``."""
    for file in sorted(CASES.glob("*.ipy")):
        yield from read(file.read_text())


def read(text: str) -> Iterator[Case]:
    starts = [*_CASE.finditer(text)]
    ends = [start.start() for start in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=True):
        words = [word.strip() for word in start["words"].split("|")]
        says = next((word.removeprefix("says:").strip() for word in words if word.startswith("says:")), "")
        cells = tuple(_cells(text[start.end() : end]))
        yield Case(start["name"], cells, "own" in words, "soak" in words, says)


def _cells(text: str) -> Iterator[tuple[str, str | None]]:
    starts = [*_CELL.finditer(text)]
    ends = [start.start() for start in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=True):
        first, _, options = start["words"].strip().partition(" ")
        yield text[start.end() : end].strip("\n"), options if first == "ranks" else None


@dataclass(frozen=True)
class Seen:
    """What a user saw: of each cell, and of the names and files afterwards. ``words`` is all text of all cells."""

    cells: list[dict[str, str]]
    names: dict[str, str]
    words: str


def run(case: Case, notebook: Notebook, directory: Path, ranks: int = 0) -> Seen:
    """Run the case's cells; on ``ranks`` ranks those that ask for it, or on none."""
    notebook.run("%reset -f")
    notebook.value(f"__import__('tests.differential.observe', fromlist=['begin']).begin({str(directory)!r})")
    notebook.run("import jupyter_torchdist as td")
    told, words = [], []
    for text, options in case.cells:
        distributed = options is not None and ranks > 0
        cell = notebook.try_run(_above(text, f"%%distribute --ranks {ranks} {options}\n") if distributed else text)
        told.append(_told(cell, notebook, distributed and not text.startswith(_OUTER)))
        words.append(cell.text)
    observer = "__import__('tests.differential.observe', fromlist=['seen'])"
    names = notebook.value(f"{observer}.seen(get_ipython().user_ns, get_ipython().user_ns_hidden)")
    return Seen(told, names, "\n".join(words))


def _above(text: str, line: str) -> str:
    """The cell with our line on top, below a magic that takes whole cells."""
    first, newline, rest = text.partition("\n")
    return f"{first}{newline}{line}{rest}" if first.startswith(_OUTER) else line + text


def _told(cell: Cell, notebook: Notebook, distributed: bool) -> dict[str, str]:
    printed = cell.stdout
    if distributed:
        job = "__import__('jupyter_torchdist').last"
        printed = notebook.value(f"{job}.logs(0, 'out') if {job} else ''")
    error = f"{cell.error.name}: {cell.error.value}".split("\n")[0] if cell.error else ""
    result = str((cell.result or {}).get("text/plain", ""))
    return {"printed": _even(printed), "result": _even(result), "error": _even(error)}


def _even(text: str) -> str:
    return re.sub(
        r"(CPU times?|Wall time): .*|.* per loop .*|0x[0-9a-f]+|In\[\d+\]|\S*/(?:plain|ranks\d)\b", "…", plain(text)
    ).strip()


def differences(before: Seen, after: Seen) -> list[str]:
    """What differs, in words."""
    found = []
    for number, (one, other) in enumerate(zip(before.cells, after.cells, strict=True), 1):
        found += [_said(f"cell {number} {what}", one[what], other[what]) for what in one if one[what] != other[what]]
    for name in sorted(before.names.keys() | after.names.keys()):
        plain, here = (side.names.get(name, "(missing)") for side in (before, after))
        if plain != here:
            found.append(_said(name, plain[:1500], here[:1500]))
    return found


def _said(what: str, plain: str, here: str) -> str:
    return f"{what}\n    plain {plain}\n    here  {here}"
