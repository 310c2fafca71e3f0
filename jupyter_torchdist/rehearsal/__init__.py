"""The memory plan: runs a cell's first training steps on fake tensors (without values)."""
