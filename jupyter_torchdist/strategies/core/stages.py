"""``td.stage``: assigns modules to pipeline stages where they are built."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

MARK = "_stage_of_pipeline"
"""Attribute of a module with its stage; kept when the model returns to the notebook."""


@contextmanager
def stage(number: int) -> Iterator[None]:
    """Modules built within belong to stage ``number`` (from 0) under ``-O balance=manual``.

    It has no effect without a pipeline. A module built outside any ``stage`` joins the stage of the module called
    before it. The inner of two nested ``stage`` blocks counts. Raises ``ValueError`` for a negative number.
    """
    if number < 0:
        raise ValueError(f"stage {number}: stages are counted from 0")
    original = nn.Module.__init__

    @functools.wraps(original)
    def marked(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        vars(module)[MARK] = number  # overwrites the number of an outer block

    nn.Module.__init__ = marked  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]
