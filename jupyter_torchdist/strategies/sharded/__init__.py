"""Sharded parameters that look whole to user code."""
