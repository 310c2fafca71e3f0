"""Curves as a table: a pandas DataFrame where pandas can be imported, else a dict of columns."""

from __future__ import annotations

from typing import Any

from ..protocol.paths import JobPaths
from ..store import metrics as stored
