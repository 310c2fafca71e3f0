"""What ``--help`` prints: all options, or with ``--strategy NAME`` or ``--launcher NAME`` the options of this one."""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import options_help
from .launcher import launcher_help, launcher_of
from .strategy import strategy_help, strategy_of


def help_text(words: Sequence[str]) -> str:
    """The help for ``%%distribute`` with ``words``, one of which is ``--help``."""
    if any(word.partition("=")[0] == "--strategy" for word in words):
        return strategy_help(strategy_of(words))
    if launcher := launcher_of(words):
        return launcher_help(launcher)
    return options_help()
