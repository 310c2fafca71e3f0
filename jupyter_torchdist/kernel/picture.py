"""A curve as an image of SVG for the still picture: no script, no style sheet. Pure functions.

It is an ``img`` with its data: JupyterLab shows no ``svg`` element of a notebook that is not trusted. All text is in
the HTML around the image, so the page stays readable on a site that removes images.
"""

from __future__ import annotations

import base64
import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 220, 64
_MARGIN = 3
_INK = "#808080"
"""An image has no text colour: this one is seen on light and dark pages."""


@dataclass(frozen=True)
class Trace:
    """A curve over its steps: the mean of the ranks, and a band from their minimum to their maximum.

    Values that are not finite are gaps.
    """

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def parts(self) -> list[Trace]:
        """The parts between the gaps."""
        rows = zip(self.x, self.mean, self.low, self.high, strict=True)
        groups = itertools.groupby(rows, key=lambda row: all(map(math.isfinite, row)))
        return [Trace(*map(tuple, zip(*group, strict=True))) for whole, group in groups if whole]


def multiples(traces: Mapping[str, Trace], width: int) -> str:
    """One small picture for each curve, side by side; names are cut at ``width`` characters."""
    return "".join(
        _panel(name if len(name) <= width else name[: width - 1] + "…", trace) for name, trace in traces.items()
    )


def _panel(name: str, trace: Trace) -> str:
    said = f"{name} {trace.mean[-1]:.4g}".strip()
    parts = trace.parts
    low, high = min(min(part.low) for part in parts), max(max(part.high) for part in parts)
    within = f"{low:.4g} to {high:.4g}, steps {trace.x[0]:.6g} to {trace.x[-1]:.6g}"
    words = html.escape(f"{said} ({within})")
    drawing = base64.b64encode(_svg(trace, parts, low, high).encode()).decode()
    return (
        f'<div style="display:inline-block;width:{WIDTH}px;margin:4px 12px 4px 0;vertical-align:top">'
        f"<div><b>{html.escape(said)}</b></div>"
        f'<img width="{WIDTH}" height="{HEIGHT}" alt="{words}" src="data:image/svg+xml;base64,{drawing}">'
        f'<div style="opacity:.8"><small>{html.escape(within)}</small></div></div>'
    )


def _svg(trace: Trace, parts: Sequence[Trace], bottom: float, top: float) -> str:
    """The mean as a line, the band behind it; both are interrupted at gaps."""
    line, band = "", ""
    for part in parts:
        across = _scaled(part.x, min(trace.x), max(trace.x), _MARGIN, WIDTH - _MARGIN)
        rows = [_scaled(values, bottom, top, HEIGHT - _MARGIN, _MARGIN) for values in (part.mean, part.low, part.high)]
        mean, low, high = ([f"{x:.1f},{y:.1f}" for x, y in zip(across, row, strict=True)] for row in rows)
        line += f"M{' '.join(mean)}" + f" {mean[0]}" * (len(mean) == 1)  # a single point is a dot
        band += f"M{' '.join([*low, *reversed(high)])}z" if low != high else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" fill="none" stroke="{_INK}" '
        f'stroke-opacity="0.5"/><path d="{band}" fill="{_INK}" fill-opacity="0.3"/>'
        f'<path d="{line}" fill="none" stroke="{_INK}" stroke-width="1.5" stroke-linecap="round" '
        'stroke-linejoin="round"/></svg>'
    )


def _scaled(values: Sequence[float], low: float, high: float, start: float, end: float) -> list[float]:
    """``values`` scaled from ``low``…``high`` to ``start``…``end``; constant values are in the middle."""
    if not high / 2 - low / 2 > 0:  # halves: the difference of 1e308 and -1e308 overflows
        return [(start + end) / 2] * len(values)
    return [start + (end - start) * ((value / 2 - low / 2) / (high / 2 - low / 2)) for value in values]
