"""Representations of an object by MIME type, without IPython."""

from __future__ import annotations

import base64
import importlib
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

TEXT_LIMIT = 10_000
"""Largest number of characters of a plain ``repr``."""
LINE = 79
"""Characters of a line, as in IPython."""

_METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
    "_repr_javascript_": "application/javascript",
    "_repr_pdf_": "application/pdf",
}

Bundle = tuple[dict[str, Any], dict[str, Any]]
"""Data and metadata, by MIME type."""


def mimebundle(value: Any) -> Bundle:
    """``value`` as (data, metadata); binary data in base64. A representation that raises is left out."""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if isinstance(value, type):
        return {"text/plain": plain(value)}, metadata
    _take(data, metadata, _call(value, "_repr_mimebundle_"))
    for method, mime in _METHODS.items():
        if mime not in data:
            _take_one(data, metadata, mime, _call(value, method))
    if "image/png" not in data and _is_figure(value):
        _take_one(data, metadata, "image/png", _attempt(lambda: png_of(value)))
    data.setdefault("text/plain", plain(value))
    return {mime: _as_text(item) for mime, item in data.items()}, metadata


def plain(value: Any) -> str:
    """``repr`` or IPython's text, with a bounded length. If ``repr`` raises, a text that names the error."""
    try:
        text = _attempt(lambda: _pretty(value)) or repr(value)
    except Exception as error:  # noqa: BLE001  # the user's __repr__
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    if len(text) > TEXT_LIMIT:
        half = TEXT_LIMIT // 2
        text = f"{text[:half]}\n… {len(text) - TEXT_LIMIT} characters left out …\n{text[-half:]}"
    return text


def _pretty(value: Any) -> str | None:
    """IPython's text where it differs from ``repr``: a long container, a class that writes its own."""
    is_container = isinstance(value, (dict, list, tuple, set, frozenset))
    long = is_container and (len(value) > LINE or len(repr(value)) > LINE)
    if not long and not hasattr(value, "_repr_pretty_"):
        return None
    pretty = importlib.import_module("IPython.lib.pretty")  # a node may lack it
    return str(pretty.pretty(value))


def png_of(figure: Any) -> bytes:
    """A matplotlib figure as PNG, cropped to its content, as in notebooks."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", facecolor=figure.get_facecolor())
    return buffer.getvalue()


def _is_figure(value: Any) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def shows_itself(value: Any) -> bool:
    """Whether the object has shown itself by its own ``_ipython_display_``."""
    function = None if isinstance(value, type) else getattr(value, "_ipython_display_", None)
    try:
        return callable(function) and (function(), True)[1]
    except Exception:  # noqa: BLE001  # the user's own code; then its other representations are shown
        return False


def _call(value: Any, method: str) -> Any:
    function = getattr(value, method, None)
    return _attempt(function) if callable(function) else None


def _attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:  # noqa: BLE001  # as in IPython: one broken representation must not hide the others
        return None


def _take(data: dict[str, Any], metadata: dict[str, Any], given: Any) -> None:
    if isinstance(given, tuple) and len(given) == 2:
        given, more = given
        if isinstance(more, Mapping):
            metadata.update(more)
    if isinstance(given, Mapping):
        data.update({str(mime): item for mime, item in given.items() if item is not None})


def _take_one(data: dict[str, Any], metadata: dict[str, Any], mime: str, given: Any) -> None:
    if isinstance(given, tuple) and len(given) == 2:
        given, metadata[mime] = given
    if given is not None:
        data[mime] = given


def _as_text(item: Any) -> Any:
    return base64.b64encode(item).decode("ascii") if isinstance(item, (bytes, bytearray)) else item
