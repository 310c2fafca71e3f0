"""What the catalogue is written in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property


class Order(IntEnum):
    """The order of judgement: of several kinds in one log, the lowest is the cause."""

    OWN = 1
    """The rank's own: its exception, its GPU, its memory."""
    NCCL = 2
    RENDEZVOUS = 3
    EXIT = 4
    """A process that ended without a word of its own."""
    COLLECTIVE = 5
    UNCLEAR = 6
    """An error that names no cause."""
    CONSEQUENCE = 7
    """What one rank's end does to the others; a cause only for want of any other."""
    PERFORMANCE = 8
    UNDETERMINED = 9


@dataclass(frozen=True, eq=False)
class Kind:
    """One cause. A sign is a regular expression that begins with a literal character.

    Named groups of a sign fill ``sentence``, beside ``{who}`` (``rank 3 on node2``, or ``a rank``). The group
    ``culprit`` is the rank that is meant where it did not print the line. A group that a sign lacks reads as ``WORDS``
    has it.
    """

    code: str
    order: Order
    sentence: str
    cause: str
    remedy: str
    signs: tuple[str, ...] = ()
    severity: str = "fault"

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """Compiled on first use: most logs hold few words of the catalogue."""
        return tuple(re.compile(sign) for sign in self.signs)

    def said(self, words: Mapping[str, str]) -> str:
        """The sentence with ``words`` for its groups. A reason that is not known is left out."""
        sentence = self.sentence.format_map({**WORDS, **words}).replace(f": {WORDS['reason']}", "")
        return sentence[0].upper() + sentence[1:]


WORDS = {
    "who": "a rank",
    "address": "another rank's address",
    "port": "the port",
    "interface": "the one that was asked for",
    "name": "the rendezvous host's name",
    "reason": "no reason given",
    "seconds": "some",
    "here": "fewer than all",
    "all": "all",
    "error": "an error",
    "operation": "collective",
    "ranks": "some ranks",
    "step": "some step",
    "layer": "some layer",
    "ended": "another rank",
    "collective": "the collective in which the others waited",
}
"""For groups of a sentence that a line does not fill."""
