"""Several real hosts on one Linux machine, and the tests that run cells on them over SSH."""
