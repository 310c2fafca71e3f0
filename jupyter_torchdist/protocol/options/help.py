"""What ``--help`` prints: all options, or with ``--strategy NAME`` the options of this strategy."""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import options_help
from .strategy import strategy_help, strategy_of


def help_text(words: Sequence[str]) -> str:
    """The help for ``%%distribute`` with ``words``, one of which is ``--help``."""
    if any(word.partition("=")[0] == "--strategy" for word in words):
        return strategy_help(strategy_of(words))
    return options_help()
