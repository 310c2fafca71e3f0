"""``td.stage``: which stage of a pipeline a module is of, said where it is built."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

MARK = "_stage_of_pipeline"
"""Attribute of a module with its stage; it stays when the model comes back to the notebook."""


@contextmanager
def stage(number: int) -> Iterator[None]:
    """Modules that are built within are of this stage, counted from 0, where ``-O balance=manual`` is given.

    Without a pipeline nothing comes of it. Modules built outside of any ``stage`` go with the one called before them.
    Within another ``stage`` the inner one holds. Raises ``ValueError`` for a negative number.
    """
    if number < 0:
        raise ValueError(f"stage {number}: stages are counted from 0")
    original = nn.Module.__init__

    @functools.wraps(original)
    def marked(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        vars(module)[MARK] = number  # an outer one has written before: the inner one holds

    nn.Module.__init__ = marked  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]
