"""One rank: everything around user code, and the API for user code."""
