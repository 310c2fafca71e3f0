"""Which code is the user's, its position in the source, and what its names refer to. Standard library only."""
