"""One training step: the divided forward, its trial, and the gradients' way over the ranks."""
