"""Curves as a table: a pandas DataFrame if pandas can be imported, else a dict of columns."""

from __future__ import annotations

from typing import Any

from ..protocol.paths import JobPaths
from ..store import metrics


def curves(paths: JobPaths) -> Any:
    """``store.metrics.columns`` of the job; with pandas a ``DataFrame`` with NaN for None."""
    table = metrics.columns(paths)
    try:
        import pandas
    except ImportError:
        return table
    return pandas.DataFrame(table)
