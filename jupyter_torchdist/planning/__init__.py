"""From what was asked and what there is to what will run: pure functions."""
