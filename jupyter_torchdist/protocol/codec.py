"""JSON for everything on disk and on a channel.

JSON (RFC 8259) has no NaN or infinity, and readers in a browser lose integers beyond 2**53. Both travel as
strings with a leading ``@``; a string that itself begins with ``@`` gets a second one, so decoding is exact.
"""

from __future__ import annotations

import json
import math
from typing import Any

SAFE_INTEGER = 2**53 - 1

_FLOATS = {"@nan": math.nan, "@inf": math.inf, "@-inf": -math.inf}


def _tag(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return "@" + value if value.startswith("@") else value
    if isinstance(value, int):
        return int(value) if -SAFE_INTEGER <= value <= SAFE_INTEGER else f"@int:{int(value)}"
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "@nan" if math.isnan(value) else ("@inf" if value > 0 else "@-inf")
    if isinstance(value, dict):
        return {str(key): _tag(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if all(type(item) is float for item in value) and all(map(math.isfinite, value)):
            return value  # a curve's points
        return [_tag(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _untag(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("@"):
        if value.startswith("@@"):
            return value[1:]
        if value.startswith("@int:"):
            return int(value[5:])
        return _FLOATS.get(value, value)
    if isinstance(value, dict):
        return {key: _untag(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untag(item) for item in value]
    return value


def dumps(value: Any) -> str:
    """One line of ASCII JSON. Raises ``TypeError`` for what has no JSON form."""
    return json.dumps(_tag(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """The value ``dumps`` wrote. Raises ``ValueError`` for anything that is not JSON."""
    try:
        return _untag(json.loads(text))
    except RecursionError:
        raise ValueError("nested more deeply than anything of ours") from None
