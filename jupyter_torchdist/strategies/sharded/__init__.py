"""Makes sharded parameters look like whole tensors to user code."""
