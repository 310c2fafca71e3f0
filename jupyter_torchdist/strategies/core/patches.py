"""Patches functions of torch while the user code of a job runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

_NONE = object()
_all: weakref.WeakSet[Patches] = weakref.WeakSet()


def is_replaced(owner: Any, name: str) -> bool:
    """Whether ``owner.name`` is patched now in this process."""
    return any(one is owner and other == name for patches in _all for one, other, _ in patches._undo)


class Patches:
    """A set of patches that can be undone."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self._added: list[tuple[dict[Any, Any], list[Any]]] = []
        self._handles: list[RemovableHandle] = []
        _all.add(self)

    def around(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """``owner.name(...)`` becomes ``wrapper(original, ...)``."""

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def replaced(*args: Any, **kwargs: Any) -> Any:
                return wrapper(original, *args, **kwargs)

            return replaced

        self.replace(owner, name, wrapped)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """``owner.name`` becomes ``make(owner.name)``: a call costs one frame less than with ``around``."""
        original = getattr(owner, name)
        self._undo.append((owner, name, original))
        setattr(owner, name, make(original))

    def put(self, owner: type, name: str, value: Any) -> None:
        """Replace the class's own attribute ``name`` (for example a ``classmethod``) by ``value``."""
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def give(self, owner: Any, name: str, value: Any) -> None:
        """Add an attribute ``owner.name`` that does not exist yet."""
        self._undo.append((owner, name, _NONE))
        setattr(owner, name, value)

    def add(self, mapping: dict[Any, Any], items: dict[Any, Any]) -> None:
        """Add ``items`` to ``mapping``; keys that exist already are left alone."""
        new = {key: value for key, value in items.items() if key not in mapping}
        mapping.update(new)
        self._added.append((mapping, list(new)))

    def hook(self, handle: RemovableHandle) -> None:
        """Register the handle of a global hook (for all optimizers or modules)."""
        self._handles.append(handle)

    def undo(self) -> None:
        """Undo all patches."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for mapping, keys in self._added:
            for key in keys:
                mapping.pop(key, None)
        self._added.clear()
        for owner, name, original in reversed(self._undo):
            if original is _NONE:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._undo.clear()
