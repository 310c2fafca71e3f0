"""Items that a generator yields on a rank: each is pickled whole, as it is when it is yielded."""

from __future__ import annotations

import io
import sys
from typing import Any

from ..protocol.errors import RankFailed
from .culprit import explain
from .results import Reader, ResultPickler, made_once


def dump_item(item: Any) -> tuple[bytes, str]:
    """The pickle of ``item``, and "". If it cannot be pickled: nothing, and which part of ``item`` is the cause."""
    file = io.BytesIO()
    try:
        ResultPickler(file, None, large=sys.maxsize).dump(item)
    except Exception as error:  # noqa: BLE001  # the user's own reducers run here and may raise anything
        return b"", explain(item, "item", error).sentence
    return file.getvalue(), ""


def load_item(data: bytes, job: str, main_dict: dict[str, Any]) -> Any:
    """The item. Raises ``RankFailed`` if it cannot be rebuilt here."""
    try:
        with made_once(job, main_dict):
            return Reader(io.BytesIO(data), {}, main_dict).load()
    except Exception as error:  # rebuilding runs the user's own code, which may raise anything
        message = f"an item cannot be rebuilt here: {type(error).__name__}: {error}"
        raise RankFailed(message, "install the missing package here, or yield plain values") from error
