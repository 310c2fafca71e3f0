"""Notebook cells run plainly and on ranks: what a user can see afterwards must be the same."""
