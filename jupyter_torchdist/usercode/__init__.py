"""Which code is the user's, where in its source it is, and what its names stand for. Standard library only."""
