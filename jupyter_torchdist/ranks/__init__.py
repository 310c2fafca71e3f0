"""One rank: what happens around user code, and what user code sees."""
