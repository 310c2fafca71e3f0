"""JSON for everything on disk and on a channel.

JSON (RFC 8259) has no NaN or infinity, and JavaScript loses integers beyond 2**53. Both become strings with a leading
``@``. A string that itself begins with ``@`` gets a second ``@``, so decoding is exact.
A long column of numbers may be an ``array("d")``. It becomes ``@f64:`` and the base64 (RFC 4648) of its little-endian
doubles, which takes a tenth of the time of decimal digits. It is decoded as a list.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from array import array
from typing import Any

SAFE_INTEGER = 2**53 - 1

_COLUMN = "@f64:"
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
        return [_tag(item) for item in value]
    if isinstance(value, array) and value.typecode == "d":
        return _COLUMN + base64.b64encode(_little_endian(value).tobytes()).decode()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _untag(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("@"):
        if value.startswith("@@"):
            return value[1:]
        if value.startswith("@int:"):
            return int(value[5:])
        if value.startswith(_COLUMN):
            return _little_endian(array("d", base64.b64decode(value[len(_COLUMN) :], validate=True))).tolist()
        return _FLOATS.get(value, value)
    if isinstance(value, dict):
        return {key: _untag(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untag(item) for item in value]
    return value


def _little_endian(column: array[float]) -> array[float]:
    """The column converted from this machine's byte order to little-endian, or back."""
    if sys.byteorder == "big":
        column = array("d", column)
        column.byteswap()
    return column


def dumps(value: Any) -> str:
    """One line of ASCII JSON. Raises ``TypeError`` for a value without a JSON form."""
    return json.dumps(_tag(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def plain(value: Any) -> Any:
    """``value`` as JSON for programs of others, without tags. A number that is not finite becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple, array)) else value


def loads(text: str | bytes) -> Any:
    """The value that ``dumps`` wrote. Raises ``ValueError`` for anything that is not JSON."""
    try:
        value = json.loads(text)
        return _untag(value) if _may_have_tags(text) else value
    except RecursionError:
        raise ValueError("nested more deeply than anything of ours") from None


def _may_have_tags(text: str | bytes) -> bool:
    """Whether a second pass is needed. Most lines have no tags, and a kernel reads thousands of lines a second."""
    if isinstance(text, bytes):
        return b'"@' in text or b"\\u0040" in text
    return '"@' in text or "\\u0040" in text
