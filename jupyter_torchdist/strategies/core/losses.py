"""Attributes of loss tensors."""

from __future__ import annotations

UNSCALED = "_torchdist_unscaled"
"""Attribute of a loss that a ``GradScaler`` has scaled: the unscaled loss."""
