"""The files that a rank writes while it runs: output, metrics, displays."""
