"""Placeholder until the lazy names are in place."""

__version__ = "0.1.0"
