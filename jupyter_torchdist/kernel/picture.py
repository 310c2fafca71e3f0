"""A curve as inline SVG for the still picture: no script, no style sheet, the page's own text colour. Pure functions.

All text is in the HTML around the SVG, so the page stays readable on a site that removes SVG (as GitHub does).
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 220, 64
_MARGIN = 3


@dataclass(frozen=True)
class Trace:
    """A curve over its steps: the mean of the ranks, and a band from their minimum to their maximum. Finite numbers."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def multiples(traces: Mapping[str, Trace], last: Mapping[str, float], width: int) -> str:
    """One small picture for each curve, side by side; names are cut at ``width`` characters."""
    return "".join(
        _panel(name if len(name) <= width else name[: width - 1] + "…", trace, last.get(name))
        for name, trace in traces.items()
    )


def _panel(name: str, trace: Trace, last: float | None) -> str:
    said = f"{name} {'' if last is None else f'{last:.4g}'}".strip()
    within = f"{min(trace.low):.4g} to {max(trace.high):.4g}, steps {trace.x[0]:.6g} to {trace.x[-1]:.6g}"
    words = html.escape(f"{said} ({within})")
    return (
        f'<div style="display:inline-block;width:{WIDTH}px;margin:4px 12px 4px 0;vertical-align:top">'
        f"<div><b>{html.escape(said)}</b></div>{_svg(trace, words)}"
        f'<div style="opacity:.8"><small>{html.escape(within)}</small></div></div>'
    )


def _svg(trace: Trace, words: str) -> str:
    across = _scaled(trace.x, min(trace.x), max(trace.x), _MARGIN, WIDTH - _MARGIN)
    bottom, top = min(trace.low), max(trace.high)
    lines = [_scaled(values, bottom, top, HEIGHT - _MARGIN, _MARGIN) for values in (trace.mean, trace.low, trace.high)]
    mean, low, high = ([f"{x:.1f},{y:.1f}" for x, y in zip(across, line, strict=True)] for line in lines)
    band = f'<polygon points="{" ".join([*low, *reversed(high)])}" fill="currentColor" fill-opacity="0.18"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{words}">'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.3"/>'
        f"{band if low != high else ''}"
        f'<polyline points="{" ".join(mean)}" fill="none" stroke="currentColor" stroke-width="1.5" '
        'stroke-linejoin="round"/></svg>'
    )


def _scaled(values: Sequence[float], low: float, high: float, start: float, end: float) -> list[float]:
    """``values`` scaled from ``low``…``high`` to ``start``…``end``; constant values are in the middle."""
    if not high / 2 - low / 2 > 0:  # halves: the difference of 1e308 and -1e308 overflows
        return [(start + end) / 2] * len(values)
    return [start + (end - start) * ((value / 2 - low / 2) / (high / 2 - low / 2)) for value in values]
