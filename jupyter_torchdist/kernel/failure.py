"""How IPython shows exceptions: a rank's exception with lines of the notebook, our own exceptions without a stack.

IPython first calls an exception's ``_render_traceback_``, but not for a ``SyntaxError`` or an exception group;
``install`` adds these.
"""

from __future__ import annotations

import builtins
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.errors import CaptureError, CellSyntaxError, TorchDistError
from ..protocol.events import ErrorRecord
from ..protocol.spec import JobSpec
from ..protocol.state import JobState, RankState
from ..verbs import ansi
from ..views import failure_text, wording

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

RED, GREEN, CYAN, PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[0m"
RULE = 75
AROUND = 2
"""How many source lines are shown above and below the line that raised."""
_CHAINED = (
    "\nThe above exception was the direct cause of the following exception:\n",
    "\nDuring handling of the above exception, another exception occurred:\n",
)


class Rendering:
    """The value of ``_render_traceback_``: a callable that can be pickled and copied with its exception."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)

    def __call__(self) -> list[str]:
        return self.lines


def attach(error: BaseException, lines: Sequence[str]) -> BaseException:
    """Make IPython show ``error`` as ``lines``. If ``error`` refuses attributes, the lines become a note."""
    try:
        # Not setattr: the class may be a frozen dataclass, or have a ``__setattr__`` of its own.
        object.__setattr__(error, "_render_traceback_", Rendering(lines))
    except (AttributeError, TypeError):
        if hasattr(error, "add_note"):
            error.add_note("\n".join(lines))
    return error


def dress(ip: InteractiveShell, error: BaseException, lines: Sequence[str]) -> BaseException:
    """``attach``, with or without colours as the shell is configured."""
    return attach(error, in_colours_of(ip, lines))


def in_colours_of(ip: InteractiveShell, lines: Sequence[str]) -> Sequence[str]:
    """``lines``, without colours if the shell's ``colors`` is ``NoColor``."""
    plain = str(getattr(ip, "colors", "")).lower() == "nocolor"
    return [ansi.drop_colours(line) for line in lines] if plain else lines


def rank_failure(state: JobState, rank: RankState, sources: Mapping[str, Sequence[str]]) -> list[str]:
    """The traceback of the first failed rank, with the other ranks summarized below. ``sources``: label -> lines."""
    record = rank.error
    assert record is not None
    head = f"{RED}{record.type}{PLAIN}"
    what = "Traceback (most recent call last)"
    blanks = " " * max(RULE - len(record.type) - len(what), 1)
    lines = [f"{RED}{'-' * RULE}{PLAIN}", f"{head}{blanks}{what}", f"{CYAN}{_place(rank)}{PLAIN}"]
    if record.frames and not record.text.lstrip().startswith("+ "):
        lines += [wording.indent(_causes(record.text)) + "\n"] if _causes(record.text) else []
        lines += [_frame(frame, sources) for frame in record.frames]
        lines.append(f"{RED}{record.type}{PLAIN}: {_ending(record)}")
    else:
        lines.append(failure_text.error_text(record))
    if rest := failure_text.others(state, rank.rank):
        lines.append(f"\n{CYAN}{rest}{PLAIN}")
    lines += [f"\n{cause}" for cause in failure_text.because(state)]
    return lines


def _place(rank: RankState) -> str:
    return f"rank {rank.rank}" + (f" on {rank.host}" if rank.host else "")


def _causes(text: str) -> str:
    """The part of a chained traceback before the last exception, with the joining sentence; empty without a chain."""
    end = max((text.rfind(sentence) + len(sentence) for sentence in _CHAINED if sentence in text), default=0)
    return text[:end].strip("\n")


def _ending(record: ErrorRecord) -> str:
    """The message and the notes at the end of the recorded traceback."""
    start = record.text.rfind(record.title)
    found = record.text[start:].rstrip() if start >= 0 else record.title
    return found[len(record.type) :].removeprefix(":").lstrip(" ")


def _frame(frame: tuple[str, int, str, str], sources: Mapping[str, Sequence[str]]) -> str:
    file, number, function, line = frame
    where = f"{GREEN}{file}{PLAIN}, line {GREEN}{number}{PLAIN}"
    inside = f", in {CYAN}{function}{PLAIN}" if function and function != "<module>" else ""
    source = sources.get(file) or [text.rstrip("\n") for text in linecache.getlines(file)]
    if not 1 <= number <= len(source) or (line and source[number - 1].strip() != line.strip()):
        # The file here differs from the file that the rank ran: show only the rank's line.
        return f"{where}{inside}\n{GREEN}----> {number}{PLAIN} {line}\n"
    rows = [_row(at, source[at - 1], at == number) for at in _window(number, source)]
    return "\n".join([f"{where}{inside}", *rows, ""])


def _window(number: int, source: Sequence[str]) -> range:
    """The lines to show around ``number``, without blank lines at the edges (the magic's line is blank)."""
    first, last = max(number - AROUND, 1), min(number + AROUND, len(source))
    while first < number and not source[first - 1].strip():
        first += 1
    while last > number and not source[last - 1].strip():
        last -= 1
    return range(first, last + 1)


def _row(number: int, line: str, here: bool) -> str:
    if not here:
        return f"{number:>7} {line}"
    arrow = "-" * (5 - len(str(number))) + "> "
    return f"{GREEN}{arrow}{number}{PLAIN} {line}"


def sources_of(spec: JobSpec, labels: Mapping[str, str]) -> dict[str, list[str]]:
    """The lines of every cell that a traceback may name, by label. The magic's lines are blank, so numbers match."""
    found = {label: linecache.getlines(file) for file, label in labels.items()}
    sources = {label: [line.rstrip("\n") for line in lines] for label, lines in found.items() if lines}
    sources[spec.label] = [""] * (spec.first_line - 1) + spec.source.split("\n")
    return sources


def refusal(error: TorchDistError) -> list[str]:
    """One of our own errors without our stack: the place, the message, and a hint."""
    lines = []
    if isinstance(error, CellSyntaxError):
        lines = _caret(error)
    elif isinstance(error, CaptureError) and error.line and error.line not in error.message:
        lines = [error.line]
    lines.append(f"{RED}{type(error).__name__}{PLAIN}: {error.message}")
    return [*lines, *hint(error), *getattr(error, "__notes__", ())]


def hint(error: BaseException) -> list[str]:
    """The hint of one of our errors, if it has one."""
    return [f"  → {error.hint}"] if isinstance(error, TorchDistError) and error.hint else []


def _caret(error: CellSyntaxError) -> list[str]:
    text, offset = (error.text or "").rstrip("\n"), error.offset or 0
    stripped = text.lstrip()
    lines = [f"  {error.filename}, line {GREEN}{error.lineno}{PLAIN}"]
    if stripped:
        lines.append(f"    {stripped}")
        if offset > 0:
            lines.append(f"    {' ' * max(offset - 1 - (len(text) - len(stripped)), 0)}{RED}^{PLAIN}")
    return lines


def brief(error: BaseException) -> list[str]:
    """Type and message only, for errors without a place: an interrupt, a timeout."""
    return [f"{RED}{type(error).__name__}{PLAIN}: {error}"]


Handler = Callable[..., Any]


def _groups() -> tuple[type[BaseException], ...]:
    """Exception groups are new in Python 3.11."""
    group = getattr(builtins, "BaseExceptionGroup", None)
    return (group,) if group else ()


def install(ip: InteractiveShell) -> Callable[[], None]:
    """Show attached renderings of syntax errors and exception groups, too. Returns a function that undoes this."""
    previous = (ip.custom_exceptions, ip.CustomTB)

    def show(
        shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: int | None = None
    ) -> None:
        rendering = getattr(error, "_render_traceback_", None)
        if isinstance(rendering, Rendering):
            sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
            shell._showtraceback(kind, error, rendering())
        elif previous[0] and isinstance(error, previous[0]):
            previous[1](kind, error, trace, tb_offset)
        else:
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)

    shell: Any = ip
    shell.set_custom_exc((SyntaxError, *_groups(), *previous[0]), show)
    installed = ip.CustomTB

    def uninstall() -> None:
        if ip.CustomTB is installed:  # else other code replaced our handler
            ip.custom_exceptions, ip.CustomTB = previous

    return uninstall
