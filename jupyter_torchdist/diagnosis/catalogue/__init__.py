"""The catalogue of causes: a file for each layer in which a job fails."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from . import collectives, fabric, gpu, network, process, rendezvous, stalls, stragglers, training, unclear
from .kind import Kind, Order

_INNERMOST = re.compile(
    r"(?<!\\)\((?:\?P<\w+>|\?:|(?P<look>\?[!=<]))?(?P<inner>(?:\\.|[^()|\\])*)(?P<choice>\|(?:\\.|[^()\\])*)?\)"
    r"(?P<many>[?*]|\{0)?"
)

KINDS: tuple[Kind, ...] = (
    *process.KINDS,
    *gpu.KINDS,
    *network.KINDS,
    *fabric.KINDS,
    *rendezvous.KINDS,
    *collectives.KINDS,
    *training.KINDS,
    *stalls.KINDS,
    *stragglers.KINDS,
    *unclear.KINDS,
)

"""A line is of the first kind whose sign it holds; so is a job, among kinds of one order."""

LISTED = {kind: place for place, kind in enumerate(KINDS)}

BY_CODE = {kind.code: kind for kind in KINDS}


__all__ = ["BY_CODE", "KINDS", "LISTED", "Kind", "Order", "kinds_by_word"]


@cache
def kinds_by_word() -> dict[str, tuple[Kind, ...]]:
    """A few words, one of which stands in every line that holds a sign; with the kinds that they may mean."""
    signs = [(kind, frozenset(_words(sign))) for kind in KINDS for sign in kind.signs]
    found: dict[str, tuple[Kind, ...]] = {}
    while signs:
        word, _ = Counter(word for _, words in signs for word in words).most_common(1)[0]
        found[word] = tuple(dict.fromkeys(kind for kind, words in signs if word in words))
        signs = [(kind, words) for kind, words in signs if word not in words]
    return found


def _words(sign: str) -> list[str]:
    """The words that a line must have to match ``sign``: letters outside classes, choices and what is optional."""
    text = re.sub(r"\[(?:\\.|[^\]\\])*\][?*+]?(?:\{[^}]*\})?", " ", re.sub(r"\\[a-zA-Z]", " ", sign))
    while (group := _INNERMOST.search(text)) is not None:
        wanted = not (group["choice"] or group["look"] or group["many"])
        text = text[: group.start()] + (group["inner"] if wanted else " ") + text[group.end() :]
    text = re.sub(r".(?:[?*]|\{0?,?\d*\})", " ", text)
    words = re.findall(r"[A-Za-z_]{3,}", text)
    return [word for word in words if len(word) >= 5] or words  # short ones stand in every other line
