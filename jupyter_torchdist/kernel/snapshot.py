"""The still picture of a job as text and HTML: bounded, escaped, without script, complete without a kernel. Pure.

Readers may see it without style attributes (GitHub) and on light or dark pages. Therefore the text, in the page's own
colour, contains all information; colours only emphasize.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..protocol.state import JobState, RankState
from ..verbs import ansi
from ..views import failure_text, job_text, wording
from .picture import Trace, multiples

LOG_LINES = 28
"""Log lines of all ranks together; with header, curves, notes and summaries the text has at most 40 lines."""
LINES_OF_A_RANK = 10
CURVES = 12
NOTES = 4
REMARKS = 8
RUNS = 6
"""The largest number of rank ranges in one label."""
WAITS = 3
"""The largest number of collectives for which waiting ranks are shown."""
BYTES = 100_000
"""Limit of the HTML; with its text a saved picture is below 300 kB, whatever was printed."""
WIDTHS = (200, 120, 60, 24)
"""Line lengths to try until the HTML fits into ``BYTES``."""
HEAD = 400
"""The largest number of characters of the first line: state, place, time and error."""
NAME = 40
"""The largest number of characters of a curve's name."""
_NO_FORMULAS = "mathjax_ignore tex2jax_ignore"
"""Classes that MathJax 3 (JupyterLab) and 2 (nbconvert) ignore: an error's text may have two dollar signs."""
_LOG = "margin:2px 0;white-space:pre-wrap;overflow-wrap:anywhere;font-family:var(--jp-code-font-family,monospace)"
"""It names a font, because nbconvert's pages set none for ``pre`` in an output."""
_RED = "#c62828"
_COLOURS = {"succeeded": "#2e7d32", "failed": _RED, "timed_out": _RED, "lost": _RED, "cancelled": "#ad6800"}


@dataclass(frozen=True)
class Progress:
    """The job's progress bar: ``done`` of ``total`` steps (None: unknown), reported by the most advanced rank."""

    done: float
    total: float | None = None
    text: str = ""


Line = tuple[float, str]
"""About when it was written, and what."""


@dataclass(frozen=True)
class Snapshot:
    """What is shown. ``lines`` are the last lines of each rank as printed, with their times, oldest first."""

    state: JobState
    now: float
    lines: Mapping[int, Sequence[Line]] = field(default_factory=dict)
    curves: Mapping[str, float] = field(default_factory=dict)
    progress: Progress | None = None
    remarks: tuple[str, ...] = ()
    """The kernel's remarks at the end: which values came back, and which were left behind."""
    traces: Mapping[str, Trace] = field(default_factory=dict)
    """The points of the ``curves`` that are drawn."""

    @property
    def values(self) -> dict[str, float]:
        """The last value of each curve: of one that is drawn, where its line ends."""
        return {**self.curves, **{name: trace.mean[-1] for name, trace in self.traces.items()}}


def as_text(snapshot: Snapshot, width: int = WIDTHS[0]) -> str:
    """The picture as text, for plain terminals and as the text form beside the HTML."""
    title, head = job_text.title(snapshot.state), job_text.headline(snapshot.state, snapshot.now)
    lines = [f"{_cut(title, width)}: {_cut(ansi.plain(head), HEAD)}"]
    lines += _failure(snapshot, width)
    if snapshot.progress:
        lines.append(_progress_text(snapshot.progress))
    if snapshot.values:
        lines.append(_curves(snapshot.values))
    lines += [f"[{who}] {_cut(ansi.plain(line), width)}" for who, line in _log(snapshot)]
    return "\n".join([*lines, *_footer(snapshot, width)])


def as_html(snapshot: Snapshot) -> str:
    """The picture as HTML with drawn curves, within ``BYTES``."""
    for width in WIDTHS:
        page = _page(snapshot, width)
        if len(page.encode("utf-8", "replace")) <= BYTES:
            break
    return page


def _page(snapshot: Snapshot, width: int) -> str:
    state = snapshot.state
    colour = _COLOURS.get(state.state, "#1976d2")
    name, head = (
        html.escape(_cut(job_text.title(state), width)),
        html.escape(_cut(ansi.plain(job_text.headline(state, snapshot.now)), HEAD)),
    )
    parts = [
        f'<div class="torchdist-job {_NO_FORMULAS}" style="border-left:3px solid {colour};padding:2px 8px">',
        f"<div><b>{name}</b> <span>{head}</span></div>",
        *(f"<div>{html.escape(line)}</div>" for line in _failure(snapshot, width)),
    ]
    if snapshot.progress:
        bar = snapshot.progress
        value = f' value="{bar.done:g}" max="{bar.total:g}"' if bar.total else ""
        parts.append(f"<div><progress{value}></progress> {html.escape(_progress_text(bar))}</div>")
    drawn = dict(list(snapshot.traces.items())[:CURVES])
    if rest := {name: value for name, value in snapshot.curves.items() if name not in drawn}:
        parts.append(f"<div>{html.escape(_curves(rest))}</div>")
    if drawn:
        parts.append(f"<div>{multiples(drawn, NAME)}</div>")
    log = "\n".join(
        f'<span style="opacity:.8">[{who}]</span> {_line_html(line, width)}' for who, line in _log(snapshot)
    )
    if log:
        parts.append(f'<pre style="{_LOG}">{log}</pre>')
    parts += [f'<div style="opacity:.9">{html.escape(line)}</div>' for line in _footer(snapshot, width)]
    return "".join(parts) + "</div>"


def _line_html(line: str, width: int) -> str:
    short = ansi.plain(line)
    # A line that must be cut loses its colours, because cutting between escapes is complicated.
    return ansi.to_html(line) if len(short) <= width and len(line) <= 2 * width else html.escape(_cut(short, width))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _progress_text(bar: Progress) -> str:
    share = f" ({100 * bar.done / bar.total:.0f} %)" if bar.total else ""
    of = f" of {bar.total:g}" if bar.total else ""
    return f"{_cut(bar.text, NAME)} {bar.done:g}{of}{share}".strip()


def _curves(curves: Mapping[str, float]) -> str:
    shown = [f"{_cut(name, NAME)} {value:.4g}" for name, value in list(curves.items())[:CURVES]]
    more = len(curves) - len(shown)
    return " · ".join(shown) + (f" · {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Voices:
    """Ranks whose last lines are the same."""

    ranks: tuple[int, ...]
    lines: tuple[Line, ...]
    """With the times of the first of these ranks."""

    @property
    def label(self) -> str:
        """``rank 3``, ``ranks 0–7``, ``ranks 0, 2–5``."""
        word = "rank" if len(self.ranks) == 1 else "ranks"
        said = wording.runs(self.ranks, "–", 2)
        return f"{word} {', '.join(said[:RUNS])}" + ("…" if len(said) > RUNS else "")


def _log(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Pairs of a label of ranks and a line, by time, within ``LOG_LINES``; all lines of the first failed rank."""
    chosen = _voices(snapshot)[:LOG_LINES]
    found: list[tuple[str, Line]] = []
    if chosen and set(chosen[0].ranks) & set(_failed_ranks(snapshot)):
        found += [(chosen[0].label, line) for line in chosen[0].lines]
        chosen = chosen[1 : 1 + LOG_LINES - len(found)]
    each = max(1, min(LINES_OF_A_RANK, (LOG_LINES - len(found)) // max(len(chosen), 1)))
    found += [(voices.label, line) for voices in chosen for line in voices.lines[-each:]]
    return [(who, text) for who, (_, text) in sorted(found, key=lambda said: said[1][0])]


def _voices(snapshot: Snapshot) -> list[Voices]:
    """The lines of all ranks that printed: first failed ranks (the first failure at the top), then by number."""
    failed = {rank: place for place, rank in enumerate(_failed_ranks(snapshot))}
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in sorted(snapshot.lines.items()):
        if lines:
            alike.setdefault(tuple(text for _, text in lines[-LINES_OF_A_RANK:]), []).append(rank)
    found = [Voices(tuple(ranks), tuple(snapshot.lines[ranks[0]][-LINES_OF_A_RANK:])) for ranks in alike.values()]
    return sorted(found, key=lambda voices: min(failed.get(rank, len(failed)) for rank in voices.ranks))


def _failed_ranks(snapshot: Snapshot) -> list[int]:
    return [rank.rank for rank in snapshot.state.failures()]


def _footer(snapshot: Snapshot, width: int) -> list[str]:
    state = snapshot.state
    lines = []
    shown = {who for who, _ in _log(snapshot)}
    hidden = sum(len(voices.ranks) for voices in _voices(snapshot) if voices.label not in shown)
    if hidden > 0:
        lines.append(f"{wording.count(hidden, 'more rank')}: %dist logs {state.job} --rank N")
    lines += [*state.notes[-NOTES:], *snapshot.remarks[:REMARKS]]
    if (more := len(snapshot.remarks) - REMARKS) > 0:
        lines.append(f"{wording.count(more, 'more note')}: %dist show {state.job}")
    return [_cut(ansi.plain(line), 2 * width) for line in lines]


def _failure(snapshot: Snapshot, width: int) -> list[str]:
    """The failure, or what ranks wait for. It is shown first, because readers look for it."""
    state = snapshot.state
    failed = state.failures()
    lines = _failed(state, failed[0]) if failed else job_text.waiting_lines(state, snapshot.now)[:WAITS]
    return [_cut(ansi.plain(line), 2 * width) for line in lines]


def _failed(state: JobState, first: RankState) -> list[str]:
    """The rank that failed first, unless the first line already names it, and what happened to the other ranks."""
    where = f"rank {first.rank}" + (f" on {first.host}" if first.host else "")
    said = [] if state.reason.startswith(where) else [f"{where} {job_text.rank_line(state, first)}"]
    causes = [finding.sentence for finding in state.findings]
    return [*said, *causes, *filter(None, [failure_text.others(state, first.rank) if state.final else ""])]
