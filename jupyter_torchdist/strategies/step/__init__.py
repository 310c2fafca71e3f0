"""One training step: the divided forward, its trial, and the averaging of gradients over the ranks."""
