"""The memory plan: a cell's first training steps on tensors without values."""
