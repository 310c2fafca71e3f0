"""Makes a rank's output safe to show: colours kept or dropped, all other escapes dropped, HTML escaped. Pure."""

from __future__ import annotations

import html
import re

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""CSI and OSC sequences and two-character escapes (ECMA-48)."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HTML_COLOURS = ("#3e424d", "#e75c58", "#00a250", "#b58900", "#208ffb", "#d160c4", "#60a6a6", "#8a8d93")


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RESET = "\x1b[0m"


def safe(text: str) -> str:
    """``text`` for a terminal: colours stay, other escapes and control characters go, lines are folded at ``\\r``.

    A colour does not outlast the text.
    """
    if "\r" in text:
        text = "\n".join(fold(line) for line in text.split("\n"))
    if not _CONTROL.search(text):
        return text
    pieces = _ESCAPE.split(text)
    kept = [match[0] if _COLOUR.fullmatch(match[0]) else "" for match in _ESCAPE.finditer(text)]
    kept.append("")
    shown = "".join(_CONTROL.sub("", piece) + escape for piece, escape in zip(pieces, kept, strict=True))
    last = next((escape for escape in reversed(kept) if escape), _RESET)
    if last in (_RESET, "\x1b[m"):
        return shown
    end = shown.endswith("\n")
    return shown[: len(shown) - end] + _RESET + "\n" * end


def drop_colours(text: str) -> str:
    """``text`` without colours; everything else is kept, line breaks too."""
    return _COLOUR.sub("", text)


def plain(text: str) -> str:
    """``text`` without escapes and control characters; tabs are kept."""
    return _CONTROL.sub("", _ESCAPE.sub("", text).replace("\n", " "))


def fold(line: str) -> str:
    """The line as a terminal shows it after its carriage returns: what tqdm wrote last."""
    parts = [part for part in line.rstrip("\r\n").split("\r") if part]
    return parts[-1] if parts else ""


def to_html(text: str) -> str:
    """``text`` as HTML, with foreground colours and bold as spans; other escapes are dropped."""
    pieces: list[str] = []
    style = ""
    position = 0
    for match in _ESCAPE.finditer(text):
        pieces.append(_span(text[position : match.start()], style))
        position = match.end()
        if match[0].startswith("\x1b[") and match[0].endswith("m"):
            style = _style(match[0][2:-1], style)
    pieces.append(_span(text[position:], style))
    return "".join(pieces)


def _span(text: str, style: str) -> str:
    escaped = html.escape(_CONTROL.sub("", text), quote=False)
    return f'<span style="{style}">{escaped}</span>' if style and escaped else escaped


def _style(codes: str, style: str) -> str:
    """The style after one SGR sequence; unknown codes do not change it."""
    chosen = dict(item.split(":", 1) for item in style.split(";") if item)
    for code in codes.split(";") if codes else ["0"]:
        number = int(code) if code.isdigit() else -1
        if number == 0:
            chosen.clear()
        elif number == 1:
            chosen["font-weight"] = "bold"
        elif number == 39:
            chosen.pop("color", None)
        elif 30 <= number <= 37 or 90 <= number <= 97:
            chosen["color"] = _HTML_COLOURS[number % 10]
        elif number in (38, 48):
            break  # a 256-colour or true-colour triple follows; its numbers are not codes
    return ";".join(f"{key}:{value}" for key, value in chosen.items())
