"""Values of options: numbers and times."""

from __future__ import annotations

import math
import re


def count(text: str) -> int:
    value = int(text) if re.fullmatch(r"[+-]?\d+", text) else None
    if value is None:
        raise ValueError("a whole number")
    if value < 1:
        raise ValueError("at least 1")
    return value


def node_range(text: str) -> tuple[int | None, int]:
    """``4`` is (None, 4), ``2:4`` is (2, 4): at least 2 of 4."""
    least, colon, most = text.rpartition(":")
    if not re.fullmatch(r"(\d{1,6}:)?\d{1,6}", text) or int(most) < 1 or (colon and not 1 <= int(least) <= int(most)):
        raise ValueError("a whole number, or MIN:MAX such as 2:4")
    return int(least) if colon else None, int(most)


def number(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text):
        raise ValueError("a whole number, 0 or more")
    return int(text)


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min|h|d)?", text)
    if not match:
        raise ValueError("a time such as 90, 30s, 10m, 2h or 1d")
    value = float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[match[2] or "s"]
    if not math.isfinite(value) or value <= 0:
        raise ValueError("more than 0")
    return value


def stall(text: str) -> float:
    return 0.0 if text == "off" else seconds(text)
